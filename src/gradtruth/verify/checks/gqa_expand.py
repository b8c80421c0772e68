"""gqa_expand: grouped heads give what repeated keys and values give, gradients summed over the group."""

from __future__ import annotations

from collections.abc import Iterator

from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import differences, unanswered
from gradtruth.verify.edits.heads import expand_groups, fold_groups
from gradtruth.verify.findings import Kind

__all__ = ["GQA_EXPAND"]

_SLACK = 2.0  # dk and dv of every query head are rounded before they are added


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """dk and dv of broadcast KV heads were those of one member of the group; another kernel mapped heads two ways.

    marin-community/levanter#449, XunhaoLai/native-sparse-attention-triton#27.
    """
    case = subject.case
    missing = unanswered(subject)
    if case.problem.group_size < 2:
        missing = NotReached("every query head has a KV head of its own")
    if missing is not None:
        yield missing
        return
    part = expand_groups(case)
    refusal = subject.supports(part)
    if refusal is not None:
        yield NotReached(f"with repeated heads: {refusal}")
        return
    run = subject.run(part)
    if run.error is not None:
        yield Judged(kind=Kind.RAISED, detail=(f"with repeated heads: {run.error}",))
        return
    found = fold_groups(case, run.tensors)
    what = "repeated keys and values, summed over the group"
    yield from differences(subject, subject.first.tensors, found, what, slack=_SLACK)


GQA_EXPAND = Check("gqa_expand", _run)
