"""batch_slice: a sequence alone gives what it gives in the batch."""

from __future__ import annotations

from collections.abc import Iterator

from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.parts import few_sequences, reachable, whole_form
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import bits, differences
from gradtruth.verify.edits.sequences import place_sequences, sequences
from gradtruth.verify.findings import Kind

__all__ = ["BATCH_SLICE"]

_NAMES = ("out", "lse", "dq", "dk", "dv")


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """dQ was wrong as soon as the batch held two sequences, right for each alone.

    NVIDIA/TransformerEngine#3216; flashinfer-ai/flashinfer#3800 read the queries of batch item 0 for all.
    """
    case = subject.case
    missing = reachable(subject, case.problem.batch, "sequences")
    if missing is not None:
        yield missing
        return
    assembled = whole_form(subject, _NAMES)
    for n in few_sequences(case):
        part = sequences(case, [n])
        refusal = subject.supports(part)
        if refusal is not None:
            yield NotReached(f"sequence {n} alone: {refusal}")
            return
        run = subject.run(part)
        if run.error is not None:
            yield Judged(kind=Kind.RAISED, detail=(f"sequence {n} alone: {run.error}",))
            return
        place_sequences(case, [n], run.tensors, assembled)
    what = "the call of each sequence alone"
    yield from differences(subject, subject.first.tensors, assembled, what)
    if subject.claims.batch_invariant:
        yield from bits(subject.first.tensors, assembled, what, "batch_invariant")


BATCH_SLICE = Check("batch_slice", _run)
