"""mask_equivalents: one mask said in several ways gives one result."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.variants import variant
from gradtruth.verify.checks.verdicts import differences, unanswered
from gradtruth.verify.findings import Kind

__all__ = ["MASK_EQUIVALENTS"]


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """-1 for an open window was taken as a number; a right bound clamped to the keys dropped some of them.

    NVIDIA/TransformerEngine#3528, Dao-AILab/flash-attention#895; NVIDIA/cudnn-frontend#160 gave NaN without a padding
    mask and none with one that covers everything.
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    ran, refusals = 0, []
    for what, case in _equivalents(subject.case):
        refusal = subject.supports(case)
        if refusal is not None:
            refusals.append(f"{what}: {refusal}")
            continue
        ran += 1
        run = subject.run(case)
        if run.error is not None:
            yield Judged(kind=Kind.RAISED, detail=(f"{what}: {run.error}",))
            continue
        yield from differences(
            subject, run.tensors, subject.first.tensors, f"the same without {what}"
        )
    if not ran:
        yield NotReached("; ".join(refusals) or "the mask has no second form")


def _equivalents(case: Case) -> Iterator[tuple[str, Case]]:
    """The same problem said in other ways."""
    problem, spec = case.problem, case.problem.spec
    S, T = problem.seqlen_q, problem.seqlen_kv
    if spec.left is None:
        yield "a left bound that covers everything", variant(case, left=S + T)
    if spec.right is None:
        yield "a right bound that covers everything", variant(case, right=S + T)
    if spec.lengths == "full" and problem.batch:
        yield "cu_seqlens of full lengths", _with_lengths(case)
    if spec.lengths == "full" and S == T and not spec.band.open:
        other = "top_left" if spec.alignment == "bottom_right" else "bottom_right"
        yield f"the {other} diagonal of equal lengths", variant(case, alignment=other)
    if spec.lengths == "cu_seqlens":
        bounds = tuple(
            places + 7 if bound is None else bound
            for places, bound in ((S, problem.max_seqlen_q), (T, problem.max_seqlen_kv))
        )
        if problem.layout != "thd" or (problem.bias_shape is None and problem.mask_shape is None):
            try:
                yield (
                    "loose bounds on the lengths",
                    variant(case, max_seqlen=(bounds[0], bounds[1])),
                )
            except InvalidProblem:
                return


def _with_lengths(case: Case) -> Case:
    problem = case.problem
    count = torch.arange(problem.batch + 1, dtype=torch.int32, device=case.device)
    lengths = {
        "cu_seqlens_q": count * problem.seqlen_q,
        "cu_seqlens_kv": count * problem.seqlen_kv,
    }
    return variant(case, dict(lengths), lengths="cu_seqlens")


MASK_EQUIVALENTS = Check("mask_equivalents", _run)
