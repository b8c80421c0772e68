"""batch_permutation: the order of the sequences in a batch changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.parts import reachable, whole_form
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import differences
from gradtruth.verify.edits.sequences import place_sequences, sequences
from gradtruth.verify.findings import Kind

__all__ = ["BATCH_PERMUTATION"]

_NAMES = ("out", "lse", "dq", "dk", "dv")


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """Every batch item after the first read the wrong queries: a batch stride of one token.

    flashinfer-ai/flashinfer#3800. The batch is run in reversed order.
    """
    case = subject.case
    missing = reachable(subject, case.problem.batch, "sequences")
    if missing is not None:
        yield missing
        return
    order = list(reversed(range(case.problem.batch)))
    part = sequences(case, order)
    refusal = subject.supports(part)
    if refusal is not None:
        yield NotReached(f"in reversed order: {refusal}")
        return
    run = subject.run(part)
    if run.error is not None:
        yield Judged(kind=Kind.RAISED, detail=(f"in reversed order: {run.error}",))
        return
    found = whole_form(subject, _NAMES)
    place_sequences(case, order, run.tensors, found)
    yield from differences(subject, subject.first.tensors, found, "the batch in reversed order")


BATCH_PERMUTATION = Check("batch_permutation", _run)
