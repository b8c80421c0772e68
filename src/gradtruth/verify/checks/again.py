"""A call once more: the same call must give what it gave, whatever lies between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from gradtruth.verify.checks.check import Judged
from gradtruth.verify.checks.subject import Run, Subject
from gradtruth.verify.checks.verdicts import bits, differences
from gradtruth.verify.findings import Kind

__all__ = ["again", "same"]


def again(subject: Subject, run: Run, what: str, *, breaks: str = "pure") -> Iterator[Judged]:
    """A run of the case against its first run.

    Args:
        subject: whose first run it is held against.
        run: the other one.
        what: "the first run, on a side stream", for the detail.
        breaks: the claim that unequal bits break.
    """
    if run.error is not None:
        yield Judged(kind=Kind.RAISED, detail=(f"differs from {what}: {run.error}",))
        return
    yield from same(subject, run.tensors, subject.first.tensors, what, breaks=breaks)


def same(
    subject: Subject,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    what: str,
    *,
    breaks: str = "pure",
) -> Iterator[Judged]:
    """Results that must be the same: their values for any backend, their bits where it is deterministic.

    Args:
        subject: its standard says what rounding is.
        found, expected: by name.
        what: for the detail.
        breaks: the claim that unequal bits break.
    """
    for name in sorted(set(expected) - set(found)):
        text = f"differs from {what}: {name} is missing or of another form"
        yield Judged(tensor=name, kind=Kind.FORM, detail=(text,))
    values = list(differences(subject, found, expected, what))
    yield from values
    named = {answer.tensor for answer in values}
    if subject.claims.deterministic:
        rest = {name: tensor for name, tensor in found.items() if name not in named}
        yield from bits(rest, expected, what, breaks)
