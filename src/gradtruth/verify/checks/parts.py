"""What the checks on parts share: which parts to look at, and results that are put together again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.check import NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import unanswered
from gradtruth.verify.truth.scoring import places

__all__ = ["few", "few_sequences", "place_tokens", "reachable", "whole_form"]

_KEY_SIDE = ("dk", "dv")
_QUERY_SIDE = ("out", "dq")


def few(count: int, limit: int = 4) -> list[int]:
    """At most ``limit`` of ``count`` numbers: the first, the last and some between."""
    if count <= limit:
        return list(range(count))
    return sorted({round(at * (count - 1) / (limit - 1)) for at in range(limit)})


def few_sequences(case: Case) -> list[int]:
    """At most four sequences of a batch: the first, the last, the shortest and the longest."""
    whole = places(case.problem, case.inputs)
    if not whole:
        return []
    sizes = [place.length_q + place.length_kv for place in whole]
    shortest, longest = sizes.index(min(sizes)), sizes.index(max(sizes))
    return sorted({0, len(whole) - 1, shortest, longest})


def place_tokens(
    case: Case, other: Case, results: Mapping[str, Tensor], into: dict[str, Tensor]
) -> None:
    """Write results of a case that has the same sequences in other storage to where this one has them.

    Args:
        case: whose form ``into`` has.
        other: the same sequences, in any layout.
        results: of ``other``, by name; dbias is passed over, it may have another shape.
        into: written at the tokens of every sequence; places outside stay as they are.
    """
    pairs = list(
        zip(
            places(case.problem, case.inputs),
            places(other.problem, other.inputs),
            strict=True,
        )
    )
    for name, tensor in results.items():
        if name in ("max_logit", "dsoftmax_offset") and name in into:
            into[name].copy_(tensor)
        if name not in into or name not in (*_QUERY_SIDE, *_KEY_SIDE, "lse"):
            continue
        target, source = (
            canonical_lse(x, c.problem.layout).transpose(1, 2)
            if name == "lse"
            else canonical(x, c.problem.layout)
            for x, c in ((into[name], case), (tensor, other))
        )
        for n, (there, here) in enumerate(pairs):
            to, at = (there.keys, here.keys) if name in _KEY_SIDE else (there.queries, here.queries)
            row = 0 if case.problem.layout == "thd" else n
            target[row, to] = source[0 if other.problem.layout == "thd" else n, at]


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
