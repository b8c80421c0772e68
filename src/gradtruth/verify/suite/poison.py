"""poison: fill every place that must not matter, so that a read of it shows."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.core.extents import Extents, resolve
from gradtruth.core.layout import canonical, canonical_lse, stored
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Forward, Inputs

__all__ = ["poison", "poison_forward", "poison_lse", "poison_rows", "restride", "valid_places"]


def valid_places(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Which storage places belong to a sequence: bool [B', S] and [B', T], B' = 1 for thd.

    Reads lengths on the host: for checks, not for kernels.
    """
    where = resolve(problem, inputs)
    both = []
    for side, places in (("q", problem.seqlen_q), ("kv", problem.seqlen_kv)):
        rows = 1 if problem.layout == "thd" else problem.batch
        valid = torch.zeros((rows, places), dtype=torch.bool, device=inputs.q.device)
        for n, (start, length) in enumerate(_spans(where, side)):
            valid[n if rows > 1 else 0, start : start + length] = True
        hidden = getattr(inputs, f"padding_mask_{side}")
        both.append(valid if hidden is None else valid & ~hidden)
    return both[0], both[1]


def poison(problem: Problem, inputs: Inputs, value: float = float("nan")) -> Inputs:
    """A copy of the inputs in which whatever no result may depend on is ``value``.

    These are q, k and v in padding, gaps, tails and hidden places, and bias and attention_mask at
    coordinates outside every sequence (the mask is flipped there). Strides stay, except that a tensor expanded
    over sequences or places becomes contiguous.

    Args:
        problem: any problem, a tile included.
        inputs: its tensors, which are not written.
        value: NaN, Inf or a number, clamped to what the dtype holds.
    """
    valid_q, valid_kv = valid_places(problem, inputs)
    changed: dict[str, Tensor] = {"q": _fill_rows(problem, inputs.q, valid_q, value)}
    for name in ("k", "v"):
        changed[name] = _fill_rows(problem, getattr(inputs, name), valid_kv, value)
    for name in ("bias", "attention_mask"):
        tensor = getattr(inputs, name)
        if tensor is None:
            continue
        used = _used_coordinates(problem, inputs, tensor)
        other = ~tensor if tensor.dtype == torch.bool else _held(value, tensor)
        changed[name] = restride(torch.where(used, tensor, other), tensor)
    return replace(inputs, **changed)


def poison_rows(
    problem: Problem, inputs: Inputs, tensor: Tensor, value: float = float("nan")
) -> Tensor:
    """A copy of dout or out (laid out like q) with ``value`` at rows outside every sequence."""
    return _fill_rows(problem, tensor, valid_places(problem, inputs)[0], value)


def poison_lse(
    problem: Problem, inputs: Inputs, lse: Tensor, value: float = float("nan")
) -> Tensor:
    """A copy of lse or dlse ([B, H, S], thd [tokens, H]) with ``value`` at rows outside every sequence."""
    valid = valid_places(problem, inputs)[0]
    inner = canonical_lse(lse, problem.spec.layout)
    filled = torch.where(valid.unsqueeze(1), inner, value)
    return restride(filled.squeeze(0).t() if problem.layout == "thd" else filled, lse)


def poison_forward(
    problem: Problem, inputs: Inputs, forward: Forward, value: float = float("nan")
) -> Forward:
    """What a backward gets when out and lse hold ``value`` at rows outside every sequence."""
    return replace(
        forward,
        out=poison_rows(problem, inputs, forward.out, value),
        lse=poison_lse(problem, inputs, forward.lse, value),
    )


def restride(values: Tensor, like: Tensor) -> Tensor:
    """The values in fresh memory with the strides and storage offset of another tensor.

    Memory between the elements is NaN (True for bool). Where the values differ along a dim of stride 0, the
    result is contiguous instead.
    """
    narrow = values
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            narrow = narrow.narrow(dim, 0, 1)
    if not torch.equal(_bits(narrow.expand_as(values)), _bits(values)):
        return values.clone(memory_format=torch.contiguous_format)
    offset = like.storage_offset()
    reach = offset + 1 + sum((n - 1) * st for n, st in zip(like.shape, like.stride(), strict=True))
    filler = True if values.dtype == torch.bool else float("nan")
    base = torch.full((max(reach, offset),), filler, dtype=values.dtype, device=values.device)
    if values.numel():
        base.as_strided(narrow.shape, like.stride(), offset).copy_(narrow)
    return base.as_strided(values.shape, like.stride(), offset)


def _bits(tensor: Tensor) -> Tensor:
    """Comparable with NaN in it."""
    return tensor if tensor.dtype == torch.bool else tensor.nan_to_num(nan=1.234567e3)


def _spans(where: Extents, side: str) -> list[tuple[int, int]]:
    starts, lengths = getattr(where, f"start_{side}"), getattr(where, f"length_{side}")
    return list(zip(starts.tolist(), lengths.tolist(), strict=True))


def _held(value: float, like: Tensor) -> Tensor:
    """The value as a scalar tensor of a dtype; finite numbers stay finite."""
    top = torch.finfo(like.dtype).max
    held = max(-top, min(top, value)) if math.isfinite(value) else value
    return torch.tensor(held, dtype=like.dtype, device=like.device)


def _fill_rows(problem: Problem, tensor: Tensor, valid: Tensor, value: float) -> Tensor:
    layout = problem.spec.layout
    inner = canonical(tensor, layout)
    filled = torch.where(valid[:, :, None, None], inner, _held(value, tensor))
    return restride(stored(filled, layout), tensor)


def _used_coordinates(problem: Problem, inputs: Inputs, tensor: Tensor) -> Tensor:
    """Where in a [1|B, 1|H, 1|S, 1|T] tensor some sequence has a valid query and key: bool, H dim 1."""
    where = resolve(problem, inputs)
    valid = valid_places(problem, inputs)
    batch, _, rows, columns = tensor.shape
    used = torch.zeros((batch, 1, rows, columns), dtype=torch.bool, device=tensor.device)
    for n in range(problem.batch):
        sides = []
        for side, places, size in (("q", valid[0], rows), ("kv", valid[1], columns)):
            start, length = _spans(where, side)[n]
            index = int(getattr(where, f"index_{side}")[n])
            here = places[n if places.shape[0] > 1 else 0, start : start + length]
            line = torch.zeros(size, dtype=torch.bool, device=tensor.device)
            if size == 1:
                line[0] = here.any()
            else:
                line[index : index + length] = here[: max(0, size - index)]
            sides.append(line)
        used[n if batch > 1 else 0, 0] |= sides[0][:, None] & sides[1][None, :]
    return used
