"""What the checks on parts share: which parts to look at, and results that are put together again."""

from __future__ import annotations

from torch import Tensor

from gradtruth.verify.checks.check import NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import unanswered

__all__ = ["few", "reachable", "whole_form"]


def few(count: int, limit: int = 4) -> list[int]:
    """At most ``limit`` of ``count`` numbers: the first, the last and some between."""
    if count <= limit:
        return list(range(count))
    return sorted({round(at * (count - 1) / (limit - 1)) for at in range(limit)})


def reachable(subject: Subject, count: int, what: str) -> NotReached | None:
    """Why parts of a case say nothing; None where they do."""
    if count < 2:
        return NotReached(f"the case has {count} {what}")
    if 0.0 < subject.case.problem.spec.dropout_p < 1.0:
        return NotReached("dropout goes by global numbers, which parts do not have")
    return unanswered(subject)


def whole_form(subject: Subject, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Copies of the first run's results, for parts to be written into."""
    return {name: tensor.clone() for name, tensor in subject.first.tensors.items() if name in names}
