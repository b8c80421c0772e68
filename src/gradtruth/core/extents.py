"""Extents: where every sequence lies in its storage, on the device and without a host sync.

All ways to say where sequences are (full tensors, cu_seqlens, thd offsets, boolean padding masks, a tile
of any of these) become the same eleven integers per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gradtruth.core.layout import sequence_dim
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Inputs
from gradtruth.errors import InvalidProblem

__all__ = ["Extents", "resolve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """Eleven int32 [B] tensors. Query i of sequence n lies at storage place ``start_q[n] + i``.

    Attributes:
        start_q, start_kv: storage place of the first query and key, in the sequence's storage row.
        length_q, length_kv: how many places from there belong to the sequence (hidden places between count).
        diagonal: key j is on the diagonal of query i when ``j == i + diagonal``; carried by tiles, never
            recomputed from clipped lengths.
        index_q, index_kv: row and column of (i, j) = (0, 0) in bias and attention_mask.
        origin_q, origin_kv: global index of query 0 and key 0; keys dropout.
        sequence, head: global number of this sequence and of the first head; key dropout.
    """

    start_q: Tensor
    length_q: Tensor
    start_kv: Tensor
    length_kv: Tensor
    diagonal: Tensor
    index_q: Tensor
    index_kv: Tensor
    origin_q: Tensor
    origin_kv: Tensor
    sequence: Tensor
    head: Tensor

    def pack(self) -> Tensor:
        """One int32 [11, B] tensor, the form in which a tile travels."""
        return torch.stack([getattr(self, f.name) for f in fields(self)])

    @staticmethod
    def unpack(packed: Tensor) -> Extents:
        """The inverse of ``pack``."""
        names = [f.name for f in fields(Extents)]
        if packed.dim() != 2 or packed.shape[0] != len(names):
            raise InvalidProblem(
                f"extents has shape {list(packed.shape)}, expected [{len(names)}, batch]"
            )
        return Extents(**dict(zip(names, packed.unbind(0), strict=True)))


def resolve(problem: Problem, inputs: Inputs) -> Extents:
    """Find where each sequence lies.

    Whatever the content of cu_seqlens, the places named are inside the tensors: starts are clamped to the
    storage and lengths to what is left of the slot.

    Args:
        problem: says which of the forms ``inputs`` uses.
        inputs: its integer and mask tensors are read, on their device.
    """
    if problem.spec.lengths == "extents":
        if inputs.extents is None:
            raise InvalidProblem("extents is None, expected int32 [11, batch] for a tile")
        return _clamped_tile(problem, Extents.unpack(inputs.extents))
    start_q, length_q = _side(problem, inputs, "q")
    start_kv, length_kv = _side(problem, inputs, "kv")
    zero = torch.zeros_like(start_q)
    thd = problem.layout == "thd"
    return Extents(
        start_q=start_q,
        length_q=length_q,
        start_kv=start_kv,
        length_kv=length_kv,
        diagonal=length_kv - length_q if problem.spec.alignment == "bottom_right" else zero,
        index_q=zero if thd else start_q,
        index_kv=zero if thd else start_kv,
        origin_q=zero,
        origin_kv=zero,
        sequence=torch.arange(problem.batch, dtype=torch.int32, device=start_q.device),
        head=zero,
    )


def _side(problem: Problem, inputs: Inputs, side: str) -> tuple[Tensor, Tensor]:
    """Start and length, int32 [B] each, on the query ("q") or key ("kv") side."""
    tensor = inputs.q if side == "q" else inputs.k
    places = tensor.shape[sequence_dim(problem.spec.layout)]
    lengths = problem.spec.lengths
    if lengths == "padding_mask":
        start, length = _from_mask(getattr(inputs, f"padding_mask_{side}"), places, problem, tensor)
    elif lengths == "cu_seqlens":
        cu = getattr(inputs, f"cu_seqlens_{side}")
        padded = getattr(inputs, f"cu_seqlens_{side}_padded")
        if problem.layout == "thd":
            start, length = _from_thd(cu, cu if padded is None else padded, places)
        else:
            length = _differences(cu).clamp(0, places).int()
            start = torch.zeros_like(length)
    else:
        start = torch.zeros(problem.batch, dtype=torch.int32, device=tensor.device)
        length = torch.full_like(start, places)
    bound = problem.max_seqlen_q if side == "q" else problem.max_seqlen_kv
    return start, length if bound is None else length.clamp(max=min(bound, places))


def _from_thd(cu: Tensor, padded: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Start and length of thd sequences; no address outside [0, places) whatever the content."""
    start = padded[:-1].clamp(0, places)
    end = padded[1:].clamp(0, places)
    length = torch.minimum(_differences(cu), end - start).clamp(min=0)
    return start, length.int()


def _differences(cu: Tensor) -> Tensor:
    """cu[n + 1] - cu[n] in int64: the difference of two hostile int32 values may overflow."""
    return cu[1:].long() - cu[:-1].long()


def _from_mask(
    mask: Tensor | None, places: int, problem: Problem, like: Tensor
) -> tuple[Tensor, Tensor]:
    """First valid place, and the number of places from there to the last valid one."""
    if mask is None or places == 0:
        start = torch.zeros(problem.batch, dtype=torch.int32, device=like.device)
        return start, torch.full_like(start, places)
    at = torch.arange(places, dtype=torch.int32, device=mask.device)
    first = at.masked_fill(mask, places).amin(1)
    last = at.masked_fill(mask, -1).amax(1)
    length = (last - first + 1).clamp(min=0)
    return torch.where(length > 0, first, 0), length


def _clamped_tile(problem: Problem, extents: Extents) -> Extents:
    """The same extents with starts and lengths inside the storage."""
    clamped = {}
    for side, places in (("q", problem.seqlen_q), ("kv", problem.seqlen_kv)):
        start = getattr(extents, f"start_{side}").clamp(0, places)
        clamped[f"start_{side}"] = start
        length = torch.minimum(getattr(extents, f"length_{side}"), places - start).clamp(min=0)
        clamped[f"length_{side}"] = length
    rest = {f.name: getattr(extents, f.name) for f in fields(extents) if f.name not in clamped}
    return Extents(**clamped, **rest)
