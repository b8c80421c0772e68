"""tile: the part of a problem that some queries, keys, heads and sequences span, as a problem again.

A tile of a band mask is a band mask with another diagonal; bias, masks, ALiBi and dropout follow by global
index; a sink leaves the tile and enters once, in ``merge.apply_sink``. Context parallelism, split-KV and
the minimiser are this one operation.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.core.extents import Extents, resolve
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Inputs
from gradtruth.errors import InvalidProblem

__all__ = ["Range", "tile"]

Range = tuple[int | Tensor, int | Tensor]
_INT32_MAX = 2**31 - 1


def tile(
    problem: Problem,
    inputs: Inputs,
    *,
    queries: Range | None = None,
    keys: Range | None = None,
    groups: tuple[int, int] | None = None,
    sequences: tuple[int, int] | None = None,
) -> tuple[Problem, Inputs]:
    """Restrict a problem to a rectangle of every sequence.

    The storage stays as it is, as views: rows outside the tile are padding, so out is 0 and lse is -inf
    there, and partial results merge with ``merge.merge``. The softmax is vanilla in the tile.

    Args:
        problem: any problem, a tile included.
        inputs: its tensors.
        queries: half-open range of i within each sequence: ints, or int32 [B] tensors for other ranges per
            sequence. Clamped to the sequence. None is all.
        keys: half-open range of j within each sequence, likewise.
        groups: half-open range of KV heads; the query heads of these groups come along.
        sequences: half-open range of sequences. thd storage is kept whole.

    Returns:
        The problem and inputs of the tile. ``softmax_offset`` is None in it.

    Raises:
        InvalidProblem: groups or sequences reach outside the problem, or groups is empty.
    """
    extents = resolve(problem, inputs)
    if sequences is not None:
        _check_range("sequences", sequences, problem.batch)
        inputs, extents = _take_sequences(problem, inputs, extents, sequences)
    if groups is not None:
        _check_range("groups", groups, problem.num_gqa_groups)
        if groups[0] == groups[1]:
            raise InvalidProblem(f"groups is {groups}, expected at least one group")
        inputs = _take_groups(problem, inputs, groups)
        extents = replace(extents, head=extents.head + groups[0] * problem.group_size)
    extents = _cut(extents, queries, keys)
    spec = replace(problem.spec, lengths="extents", softmax="vanilla", packing="separate")
    inputs = replace(
        inputs,
        extents=extents.pack(),
        softmax_offset=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
    )
    return Problem.of(spec, inputs), inputs


def _check_range(name: str, given: tuple[int, int], count: int) -> None:
    first, last = given
    if not 0 <= first <= last <= count:
        raise InvalidProblem(f"{name} is {given}, expected a range within [0, {count})")


def _cut(extents: Extents, queries: Range | None, keys: Range | None) -> Extents:
    cut = {}
    shift = {}
    for side, given in (("q", queries), ("kv", keys)):
        length = getattr(extents, f"length_{side}")
        first, last = (_bound(end, length) for end in given or (0, length))
        shift[side] = first
        cut[f"length_{side}"] = (last - first).clamp(min=0)
        for name in ("start", "index", "origin"):
            cut[f"{name}_{side}"] = getattr(extents, f"{name}_{side}") + first
    return replace(extents, **cut, diagonal=extents.diagonal + shift["q"] - shift["kv"])


def _bound(end: int | Tensor, length: Tensor) -> Tensor:
    """An end of a range as int32 [B], inside the sequence."""
    if isinstance(end, int):
        # Not a tensor: a number from the host would be a copy to the device.
        return length.clamp(max=max(0, min(end, _INT32_MAX)))
    places = length.long()  # the end may be any int64
    return torch.minimum(end.to(places), places).clamp(min=0).int()


def _take_sequences(
    problem: Problem, inputs: Inputs, extents: Extents, given: tuple[int, int]
) -> tuple[Inputs, Extents]:
    part = slice(*given)
    taken: dict[str, Tensor | None] = {
        name: tensor[part]
        for name, tensor in inputs.items()
        if (name in ("bias", "attention_mask") and tensor.shape[0] > 1)
        or (name == "alibi_slopes" and tensor.dim() == 2)
    }
    if problem.layout != "thd":
        dim = 0 if problem.layout == "bshd" else 1
        for name in ("q", "k", "v"):
            taken[name] = getattr(inputs, name).narrow(dim, given[0], given[1] - given[0])
        for name in ("padding_mask_q", "padding_mask_kv"):
            mask = getattr(inputs, name)
            taken[name] = None if mask is None else mask[part]
    return replace(inputs, **taken), Extents.unpack(extents.pack()[:, part])


def _take_groups(problem: Problem, inputs: Inputs, given: tuple[int, int]) -> Inputs:
    group_part = slice(*given)
    head_part = slice(given[0] * problem.group_size, given[1] * problem.group_size)
    taken: dict[str, Tensor] = {
        "q": inputs.q[..., head_part, :],
        "k": inputs.k[..., group_part, :],
        "v": inputs.v[..., group_part, :],
    }
    for name in ("bias", "attention_mask"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            taken[name] = tensor[:, head_part] if tensor.shape[1] > 1 else tensor
    if inputs.alibi_slopes is not None:
        taken["alibi_slopes"] = inputs.alibi_slopes[..., head_part]
    return replace(inputs, **taken)
