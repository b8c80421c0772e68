"""Places: the tokens of a case put elsewhere in storage, with everything that is indexed by them.

Shortened sequences, other gaps, another layout and other sequences are all this one operation: for each new storage
place the old one, and for each new row of a bias or mask the old one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse, stored
from gradtruth.core.spec import Layout
from gradtruth.verify.cases.case import Case
from gradtruth.verify.edits.edited import edited
from gradtruth.verify.truth.scoring import Place

__all__ = [
    "SIDES",
    "Side",
    "Span",
    "around",
    "bias_rows",
    "cumulated",
    "dense_side",
    "moved",
    "slots",
    "spans",
    "thd_side",
]

SIDES = ("q", "kv")
_ROLES = {"q": ("q", "dout"), "kv": ("k", "v")}


@dataclass(frozen=True, slots=True)
class Side:
    """Where the queries, or the keys, of a new case come from.

    Attributes:
        index: int64 [R, L], R storage rows of L places: the old place, counted through all rows; -1 where there is
            none.
        within: int64 [B, M]: for row m of bias and mask the old row; -1 where there is none.
        lengths: cu_seqlens, cu_seqlens_padded and padding_mask (or None) of this side by the names in ``Inputs``.
        bound: max_seqlen of this side.
    """

    index: Tensor
    within: Tensor
    lengths: dict[str, Tensor | None]
    bound: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence that stay.

    Attributes:
        start, length: storage places, in the sequence's own row.
        first: how many tokens of the sequence are left out before them.
        gap: how many storage places follow that are not the sequence's: thd slots, kept with it.
        gap_start: where they are.
    """

    start: int
    length: int
    first: int = 0
    gap: int = 0
    gap_start: int = 0


def spans(case: Case, side: str, whole: Sequence[Place]) -> list[Span]:
    """The sequences as they are, with the gaps of thd slots."""
    lengths = [(p.start_q, p.length_q) if side == "q" else (p.start_kv, p.length_kv) for p in whole]
    if case.problem.layout != "thd":
        return [Span(start, length) for start, length in lengths]
    ends = [end for _, end in slots(case, side)]
    return [
        Span(start, length, 0, max(0, end - start - length), start + length)
        for (start, length), end in zip(lengths, ends, strict=True)
    ]


def slots(case: Case, side: str) -> list[tuple[int, int]]:
    """Start and end of the thd slots."""
    padded = getattr(case.inputs, f"cu_seqlens_{side}_padded")
    given = getattr(case.inputs, f"cu_seqlens_{side}") if padded is None else padded
    total = case.problem.seqlen_q if side == "q" else case.problem.seqlen_kv
    at = [min(max(0, n), total) for n in given.tolist()]
    return list(pairwise(at))


def around(case: Case, side: str) -> dict[str, range]:
    """Places before the first and behind the last thd slot."""
    total = case.problem.seqlen_q if side == "q" else case.problem.seqlen_kv
    found = slots(case, side)
    if not found:
        return {"tail": range(total)}
    return {"lead": range(found[0][0]), "tail": range(found[-1][1], total)}


def bias_rows(case: Case, side: str) -> int | None:
    """Rows (or columns) that bias or mask have for each sequence; None where they have none of their own."""
    dim = 2 if side == "q" else 3
    found = [
        tensor.shape[dim]
        for tensor in (case.inputs.bias, case.inputs.attention_mask)
        if tensor is not None and tensor.shape[dim] > 1
    ]
    return max(found, default=None)


def thd_side(
    device: torch.device,
    chosen: Sequence[Span],
    side: str,
    *,
    rows: Sequence[int] | None = None,
    lead: range = range(0),
    tail: range = range(0),
    longest: int | None = None,
    bound: int | None = None,
) -> Side:
    """A side in thd: sequences one after the other, each with its gap.

    Args:
        device: of the new tensors.
        chosen: the sequences.
        side: "q" or "kv".
        rows: per sequence what to add to its places, where the old storage has several rows.
        lead, tail: old places before the first and after the last slot.
        longest: rows of a bias; the longest sequence by default.
        bound: max_seqlen.
    """
    index, starts, at = list(lead), [], len(lead)
    for n, span in enumerate(chosen):
        row = 0 if rows is None else rows[n]
        index += range(row + span.start, row + span.start + span.length)
        index += range(row + span.gap_start, row + span.gap_start + span.gap)
        starts.append(at)
        at += span.length + span.gap
    index += tail
    cu = cumulated([span.length for span in chosen], device)
    packed = [*starts, at] == cu.tolist() or not chosen
    padded = None if packed else torch.tensor([*starts, at], dtype=torch.int32, device=device)
    most = max([span.length for span in chosen], default=0) if longest is None else longest
    return Side(
        index=torch.tensor(index, dtype=torch.long, device=device).unsqueeze(0),
        within=torch.stack([_shifted(span, most, device) for span in chosen])
        if chosen
        else torch.zeros((0, most), dtype=torch.long, device=device),
        lengths={
            f"cu_seqlens_{side}": cu,
            f"cu_seqlens_{side}_padded": padded,
            f"padding_mask_{side}": None,
        },
        bound=bound,
    )


def dense_side(
    index: Tensor, lengths: dict[str, Tensor | None], places: int, bound: int | None = None
) -> Side:
    """A side that is dense before and after: rows of bias and mask go with the storage places.

    Args:
        index: as in ``Side``.
        lengths: as in ``Side``.
        places: of an old storage row.
        bound: max_seqlen.
    """
    return Side(index, index % places if places else index, lengths, bound)


def cumulated(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32 [B + 1]."""
    return torch.tensor([0, *lengths], dtype=torch.int64, device=device).cumsum(0).int()


def moved(
    case: Case,
    sides: Mapping[str, Side],
    step: str,
    *,
    chosen: Sequence[int] | None = None,
    layout: Layout | None = None,
    lengths: str | None = None,
) -> Case:
    """The case with its tokens elsewhere. A place without an old one holds 0, a mask there False.

    A bias or mask that all sequences share gets a copy per sequence where they are no longer moved alike: their
    dbias add up to the old one.

    Args:
        case: no tile.
        sides: "q", "kv" or both; a side that is not given stays, and then so do the sequences and the layout.
        step: for ``history``.
        chosen: old numbers of the new sequences; all by default.
        layout: the new one.
        lengths: the new field of the Spec.
    """
    problem, inputs = case.problem, case.inputs
    old, new = problem.spec.layout, layout or problem.spec.layout
    taken: dict[str, Tensor | None] = {}
    for name, side in sides.items():
        taken |= side.lengths
        for role in _ROLES[name]:
            tensor = case.dout if role == "dout" else getattr(inputs, role)
            flat = canonical(tensor, old).flatten(0, 1)
            taken[role] = stored(_taken(flat, side.index), new).contiguous()
    if case.dlse is not None and "q" in sides:
        flat = canonical_lse(case.dlse, old).transpose(1, 2).flatten(0, 1)
        found = _taken(flat, sides["q"].index)  # [R, L, H]
        taken["dlse"] = (found[0] if new == "thd" else found.transpose(1, 2)).contiguous()
    numbers = list(range(problem.batch)) if chosen is None else list(chosen)
    for name in ("bias", "attention_mask"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            taken[name] = _pairs(tensor, sides, numbers)
    if inputs.alibi_slopes is not None and inputs.alibi_slopes.dim() == 2:
        taken["alibi_slopes"] = inputs.alibi_slopes[numbers]
    bounds = [problem.max_seqlen_q, problem.max_seqlen_kv]
    for at, name in enumerate(SIDES):
        if name in sides:
            bounds[at] = sides[name].bound
    spec = {"layout": new, "lengths": lengths or problem.spec.lengths}
    return edited(case, taken, step, max_seqlen=(bounds[0], bounds[1]), **spec)


def _shifted(span: Span, count: int, device: torch.device) -> Tensor:
    return torch.arange(span.first, span.first + count, device=device)


def _taken(flat: Tensor, index: Tensor) -> Tensor:
    """Rows of [places, ...] by [R, L] numbers, 0 where the number is -1."""
    if not flat.shape[0]:
        return flat.new_zeros((*index.shape, *flat.shape[1:]))
    found = flat[index.clamp(min=0)]
    none = index < 0
    if bool(none.any()):
        found[none] = 0
    return found


def _pairs(tensor: Tensor, sides: Mapping[str, Side], numbers: list[int]) -> Tensor:
    """A bias or mask [1|B, 1|H, 1|S, 1|T] with its sequences, rows and columns taken."""
    if tensor.shape[0] > 1:
        tensor = tensor[numbers]
    for name, dim in (("q", 2), ("kv", 3)):
        if name not in sides or tensor.shape[dim] == 1:
            continue
        within = sides[name].within
        alike = not len(within) or bool((within == within[:1]).all())
        if alike and tensor.shape[0] == 1:
            row = within[:1] if len(within) else within.new_zeros((1, within.shape[1]))
        else:
            row = within
            tensor = tensor.expand(len(within), *tensor.shape[1:])
        tensor = (
            torch.stack([_lines(part, dim - 1, at) for part, at in zip(tensor, row, strict=True)])
            if len(row)
            else tensor
        )
    return tensor.contiguous()


def _lines(part: Tensor, dim: int, at: Tensor) -> Tensor:
    """Lines of [H, S, T] along a dim, 0 where the number is outside."""
    size = part.shape[dim]
    outside = (at < 0) | (at >= size)
    if not size:
        shape = [*part.shape]
        shape[dim] = len(at)
        return part.new_zeros(shape)
    found = part.index_select(dim, at.clamp(0, size - 1))
    if bool(outside.any()):
        shape = [1, 1, 1]
        shape[dim] = len(at)
        found = found.masked_fill(outside.view(shape), 0)
    return found
