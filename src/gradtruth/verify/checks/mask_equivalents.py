"""mask_equivalents: one mask said in several ways gives one result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch

from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.parts import place_tokens, whole_form
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.variants import variant
from gradtruth.verify.checks.verdicts import differences, unanswered
from gradtruth.verify.edits.layouts import as_dense, as_thd
from gradtruth.verify.findings import Kind
from gradtruth.verify.truth.scoring import places

__all__ = ["MASK_EQUIVALENTS"]

_LARGEST_MASK = 1 << 24  # elements
_BY_PLACE = ("out", "lse", "dq", "dk", "dv")


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
        found = run.tensors
        if case.problem.layout != subject.case.problem.layout:
            found = whole_form(subject, (*_BY_PLACE, "max_logit", "dsoftmax_offset"))
            place_tokens(subject.case, case, run.tensors, found)
        yield from differences(subject, found, subject.first.tensors, f"the same without {what}")
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
        yield "a padding mask that hides nothing", _with_padding_mask(case)
    if spec.lengths == "full" and S == T and not spec.band.open:
        other = "top_left" if spec.alignment == "bottom_right" else "bottom_right"
        yield f"the {other} diagonal of equal lengths", variant(case, alignment=other)
    if not spec.band.open and problem.batch and spec.lengths != "extents":
        yield from _band_as_mask(case)
    yield from _loose(case)
    yield from _other_storage(case)


def _loose(case: Case) -> Iterator[tuple[str, Case]]:
    """Bounds on the lengths that are larger than they need to be."""
    problem = case.problem
    # In thd, a bias or mask has as many rows as the bound says.
    indexed = problem.bias_shape is not None or problem.mask_shape is not None
    if problem.spec.lengths != "cu_seqlens" or (problem.layout == "thd" and indexed):
        return
    bounds = tuple(
        count + 7 if bound is None else bound
        for count, bound in (
            (problem.seqlen_q, problem.max_seqlen_q),
            (problem.seqlen_kv, problem.max_seqlen_kv),
        )
    )
    with suppress(InvalidProblem):
        yield "loose bounds on the lengths", variant(case, max_seqlen=(bounds[0], bounds[1]))


def _other_storage(case: Case) -> Iterator[tuple[str, Case]]:
    """Dense as thd, thd as dense: padding becomes none, and the other way round."""
    if case.problem.spec.lengths == "extents" or not case.problem.batch:
        return
    thd = case.problem.layout == "thd"
    with suppress(InvalidProblem):
        yield (("dense storage", as_dense(case)) if thd else ("thd storage", as_thd(case)))


def _band_as_mask(case: Case) -> Iterator[tuple[str, Case]]:
    """The band said by a mask tensor; the diagonal stays what it is, for ALiBi."""
    problem, mask = case.problem, case.inputs.attention_mask
    whole = places(problem, case.inputs)
    rows, columns = problem.seqlen_q, problem.seqlen_kv
    if problem.layout == "thd":
        if mask is not None or problem.bias_shape is not None:
            return
        rows = max(place.length_q for place in whole)
        columns = max(place.length_kv for place in whole)
    if not rows or not columns or problem.batch * rows * columns > _LARGEST_MASK:
        return
    hidden = torch.zeros((problem.batch, 1, rows, columns), dtype=torch.bool, device=case.device)
    for n, place in enumerate(whole):
        i = torch.arange(place.length_q, device=case.device).view(-1, 1)
        ahead = torch.arange(place.length_kv, device=case.device) - i - place.diagonal
        own = hidden[n, 0, place.index_q :, place.index_kv :][: len(i), : ahead.shape[1]]
        if problem.spec.left is not None:
            own |= ahead < -problem.spec.left
        if problem.spec.right is not None:
            own |= ahead > problem.spec.right
    if mask is not None:
        hidden = hidden | mask
    with suppress(InvalidProblem):
        yield (
            "a mask tensor that says the band",
            variant(case, {"attention_mask": hidden}, left=None, right=None, arbitrary=True),
        )


def _with_lengths(case: Case) -> Case:
    problem = case.problem
    count = torch.arange(problem.batch + 1, dtype=torch.int32, device=case.device)
    lengths = {
        "cu_seqlens_q": count * problem.seqlen_q,
        "cu_seqlens_kv": count * problem.seqlen_kv,
    }
    return variant(case, dict(lengths), lengths="cu_seqlens")


def _with_padding_mask(case: Case) -> Case:
    problem = case.problem
    masks = {
        f"padding_mask_{side}": torch.zeros(
            (problem.batch, count), dtype=torch.bool, device=case.device
        )
        for side, count in (("q", problem.seqlen_q), ("kv", problem.seqlen_kv))
    }
    return variant(case, dict(masks), lengths="padding_mask")


MASK_EQUIVALENTS = Check("mask_equivalents", _run)
