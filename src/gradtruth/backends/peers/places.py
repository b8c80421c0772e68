"""Places: which sequence every storage place belongs to, as the index tensors that masks are written with.

torch's peers know no sequences: padding, windows, bias and thd reach them as a mask over storage places, built
from these tensors. A materialised mask takes S x T memory; the peers that need one say so in their claims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradtruth.core.extents import Extents, resolve
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Inputs

__all__ = ["Places", "additive_mask", "at_places", "places_of", "plain_mask", "visible_mask"]


def plain_mask(problem: Problem) -> Literal["none", "causal"] | None:
    """Which mask a kernel needs that knows only none and top-left causal; None when that is not enough.

    Bottom-right is top-left where both sides are full and equally long.
    """
    spec = problem.spec
    bound_q, bound_kv = problem.max_seqlen_q, problem.max_seqlen_kv
    if spec.ragged or spec.arbitrary or spec.bias != "none" or spec.alibi:
        return None
    if bound_q is not None and bound_q < problem.seqlen_q:
        return None
    if bound_kv is not None and bound_kv < problem.seqlen_kv:
        return None
    if spec.left is None and spec.right is None:
        return "none"
    aligned = spec.alignment == "top_left" or problem.seqlen_q == problem.seqlen_kv
    return "causal" if aligned and spec.left is None and spec.right == 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """One number per storage place; B' is 1 for thd. int64, so that they can index.

    Attributes:
        sequence_q: [B', S], the sequence of a query place, -1 where it belongs to none or is hidden.
        sequence_kv: [B', T], likewise, but -2 where it belongs to none, so that nothing equals nothing nowhere.
        i, j: [B', S] and [B', T], the place within its sequence.
        diagonal: [B', S], of the query's sequence.
        row, column: [B', S] and [B', T], the index into bias and attention_mask.
    """

    sequence_q: Tensor
    sequence_kv: Tensor
    i: Tensor
    j: Tensor
    diagonal: Tensor
    row: Tensor
    column: Tensor


def places_of(problem: Problem, inputs: Inputs) -> Places:
    """Number the places of a problem, on its device and without a host sync."""
    extents = resolve(problem, inputs)
    sequence_q, i, owner_q = _side(problem, extents, "q", problem.seqlen_q)
    sequence_kv, j, owner_kv = _side(problem, extents, "kv", problem.seqlen_kv)
    for sequence, mask, nothing in (
        (sequence_q, inputs.padding_mask_q, -1),
        (sequence_kv, inputs.padding_mask_kv, -2),
    ):
        if mask is not None:
            sequence.masked_fill_(mask, nothing)
    return Places(
        sequence_q=sequence_q.masked_fill_(sequence_q < 0, -1),
        sequence_kv=sequence_kv.masked_fill_(sequence_kv < 0, -2),
        i=i,
        j=j,
        diagonal=extents.diagonal.long()[owner_q],
        row=extents.index_q.long()[owner_q] + i,
        column=extents.index_kv.long()[owner_kv] + j,
    )


def _side(
    problem: Problem, extents: Extents, side: str, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence (-1 for none), index in it, and an owner that is a legal index, each [B', count]."""
    start = getattr(extents, f"start_{side}").long()
    end = start + getattr(extents, f"length_{side}").long()
    at = torch.arange(count, device=start.device)
    inside = (at >= start[:, None]) & (at < end[:, None])
    if problem.layout == "thd":
        owner = inside.to(torch.int8).argmax(0, keepdim=True)
        sequence = torch.where(inside.any(0, keepdim=True), owner, -1)
    else:
        owner = torch.arange(problem.batch, device=start.device)[:, None].expand(-1, count)
        sequence = torch.where(inside, owner, -1)
    return sequence, at - start[owner], owner


def visible_mask(problem: Problem, inputs: Inputs, places: Places) -> Tensor:
    """bool [B', 1|H, S, T], True where the query may see the key; a bias of -inf is not looked at."""
    visible = (places.sequence_q[:, :, None] == places.sequence_kv[:, None, :])[:, None]
    i, j = places.i[:, None, :, None], places.j[:, None, None, :]
    band = problem.spec.band.visible(i, j, places.diagonal[:, None, :, None])
    if band is not None:
        visible = visible & band
    if inputs.attention_mask is not None:
        visible = visible & ~at_places(inputs.attention_mask, problem, places)
    return visible


def additive_mask(problem: Problem, inputs: Inputs, places: Places, bias: Tensor | None) -> Tensor:
    """What is added to scale * (q . k): bias and ALiBi where visible, -inf elsewhere.

    Args:
        problem: names the kind of the bias.
        inputs: masks and slopes are read.
        places: of the same problem.
        bias: the bias in the accumulation dtype; gradients flow through.

    Returns:
        [B', 1|H, S, T] in the accumulation dtype.
    """
    added = torch.zeros((), dtype=problem.accumulate_dtype, device=inputs.q.device)
    if bias is not None:
        # Looked up in fp64, so that its gradient, a sum over whatever was broadcast, is rounded once.
        found = at_places(bias.double(), problem, places).to(added.dtype)
        added = added + (found * problem.scale if problem.spec.bias == "pre_scale" else found)
    if inputs.alibi_slopes is not None:
        distance = places.i + places.diagonal
        distance = (distance[:, :, None] - places.j[:, None, :]).abs()[:, None]
        added = added - _slopes(inputs.alibi_slopes, places).to(added.dtype) * distance
    return torch.where(visible_mask(problem, inputs, places), added, -torch.inf)


def _slopes(slopes: Tensor, places: Places) -> Tensor:
    """[B' | 1, H, S | 1, 1]."""
    if slopes.dim() == 1:
        return slopes[None, :, None, None]
    return slopes[places.sequence_q.clamp(min=0)].transpose(1, 2)[..., None]


def at_places(tensor: Tensor, problem: Problem, places: Places) -> Tensor:
    """A bias or attention_mask [1|B, 1|H, 1|S, 1|T], broadcastable to [B', H, S, T] over storage places."""
    if problem.layout != "thd" and problem.spec.lengths != "extents":
        return tensor
    if tensor.numel() == 0:
        # No sequence has both queries and keys, so nothing is looked up.
        return tensor.new_zeros(1, 1, 1, 1)
    batches, heads, rows, columns = tensor.shape
    n = places.sequence_q.clamp(min=0) if batches > 1 else torch.zeros_like(places.row)
    h = torch.arange(heads, device=tensor.device)
    row = places.row.clamp(0, rows - 1)
    column = places.column.clamp(0, columns - 1)
    return tensor[
        n[:, None, :, None], h[None, :, None, None], row[:, None, :, None], column[:, None, None, :]
    ]
