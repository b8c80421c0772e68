"""head_slice: a KV head with its query heads alone gives what it gives among the others."""

from __future__ import annotations

from collections.abc import Iterator

from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.parts import few, reachable, whole_form
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import differences
from gradtruth.verify.edits.heads import kv_heads, place_heads
from gradtruth.verify.findings import Kind

__all__ = ["HEAD_SLICE"]

_NAMES = ("out", "lse", "dq", "dk", "dv", "dsoftmax_offset")


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """A padded tile was stored without a column bound, over the first columns of the next head.

    Dao-AILab/flash-attention#2698.
    """
    case = subject.case
    groups = case.problem.num_gqa_groups
    missing = reachable(subject, groups, "KV heads")
    if missing is not None:
        yield missing
        return
    assembled = whole_form(subject, _NAMES)
    for group in few(groups):
        part = kv_heads(case, [group])
        refusal = subject.supports(part)
        if refusal is not None:
            yield NotReached(f"KV head {group} alone: {refusal}")
            return
        run = subject.run(part)
        if run.error is not None:
            yield Judged(kind=Kind.RAISED, detail=(f"KV head {group} alone: {run.error}",))
            return
        place_heads(case, [group], run.tensors, assembled)
    what = "the call of each KV head alone"
    yield from differences(subject, subject.first.tensors, assembled, what)


HEAD_SLICE = Check("head_slice", _run)
