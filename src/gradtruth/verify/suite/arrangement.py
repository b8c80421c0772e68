"""How the values of a tensor lie in memory: slices of packed buffers, other layouts, expanded heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.core.layout import PACKED_DIM
from gradtruth.core.spec import Packing
from gradtruth.core.tensors import Inputs
from gradtruth.errors import InvalidProblem

__all__ = ["ARRANGEMENTS", "DOUT_ARRANGEMENTS", "arrange", "arrange_dout"]


def _buffer(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory full of NaN (True for bool): what lies between the elements of a view must not matter."""
    filler = True if like.dtype == torch.bool else float("nan")
    return torch.full(shape, filler, dtype=like.dtype, device=like.device)


def _contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def _other_layout(x: Tensor) -> Tensor:
    """The first two dims swapped in storage: bshd kept as sbhd, thd kept head-major."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _second_row(x: Tensor) -> Tensor:
    """Every second place of the two outermost dims of a buffer."""
    view = _buffer((2 * x.shape[0], 2 * x.shape[1], *x.shape[2:]), x)[1::2, ::2]
    return view.copy_(x)


def _offset(x: Tensor) -> Tensor:
    """Starts one element into its storage, so on no 16-byte boundary."""
    view = _buffer((x.numel() + 1,), x)[1:].view(x.shape)
    return view.copy_(x)


def _wide(x: Tensor) -> Tensor:
    """The middle of a longer last dim, so no row starts on a 16-byte boundary."""
    view = _buffer((*x.shape[:-1], x.shape[-1] + 3), x)[..., 1:-2]
    return view.copy_(x)


def _strided_last(x: Tensor) -> Tensor:
    """Every second element of the last dim."""
    view = _buffer((*x.shape[:-1], 2 * x.shape[-1]), x)[..., ::2]
    return view.copy_(x)


def _expanded_heads(x: Tensor) -> Tensor:
    """One head, seen as many. The values of all heads must be the same."""
    return x.narrow(-2, 0, 1).contiguous().expand(x.shape)


def _expanded_all(x: Tensor) -> Tensor:
    """One element, seen everywhere, as the gradient of a sum. All values must be the same."""
    return x.reshape(-1)[:1].expand(x.numel()).view(x.shape) if x.numel() else x


_EACH: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": _contiguous,
    "other_layout": _other_layout,
    "second_row": _second_row,
    "offset": _offset,
    "wide": _wide,
    "strided_last": _strided_last,
}
_PACKED: dict[str, Packing] = {"3hd": "3hd", "h3d": "h3d", "2hd": "2hd", "h2d": "h2d"}

ARRANGEMENTS: tuple[str, ...] = (*_EACH, *_PACKED, "expanded_heads")
DOUT_ARRANGEMENTS: tuple[str, ...] = (*_EACH, "expanded_heads", "expanded_all")


def arrange(inputs: Inputs, name: str) -> Inputs:
    """Put q, k, v (and bias and attention_mask) into memory in a given way. Values stay.

    Args:
        inputs: contiguous tensors. Packed qkv needs q, k, v of one shape, packed kv k and v of one shape.
            "expanded_heads" needs equal values in all KV heads.
        name: one of ``ARRANGEMENTS``.

    Raises:
        InvalidProblem: an unknown name, or shapes that cannot be packed.
    """
    if name in _PACKED:
        return _pack(inputs, _PACKED[name])
    if name == "expanded_heads":
        return replace(inputs, k=_expanded_heads(inputs.k), v=_expanded_heads(inputs.v))
    if name not in _EACH:
        raise InvalidProblem(
            f"arrangement is {name!r}, expected one of {', '.join(map(repr, ARRANGEMENTS))}"
        )
    given = {n: getattr(inputs, n) for n in ("q", "k", "v", "bias", "attention_mask")}
    moved = {n: _EACH[name](tensor) for n, tensor in given.items() if tensor is not None}
    return replace(inputs, **moved)


def arrange_dout(dout: Tensor, name: str) -> Tensor:
    """Put dout into memory in a given way, one of ``DOUT_ARRANGEMENTS``."""
    if name == "expanded_heads":
        return _expanded_heads(dout)
    if name == "expanded_all":
        return _expanded_all(dout)
    if name not in _EACH:
        raise InvalidProblem(
            f"arrangement of dout is {name!r}, expected one of {', '.join(map(repr, DOUT_ARRANGEMENTS))}"
        )
    return _EACH[name](dout)


def _pack(inputs: Inputs, packing: Packing) -> Inputs:
    names = ("q", "k", "v") if packing in ("3hd", "h3d") else ("k", "v")
    parts = [getattr(inputs, name) for name in names]
    if len({part.shape for part in parts}) > 1:
        shapes = ", ".join(f"{n} {list(p.shape)}" for n, p in zip(names, parts, strict=True))
        raise InvalidProblem(f"packing is {packing!r}, expected tensors of one shape, got {shapes}")
    views = torch.stack(parts, dim=PACKED_DIM[packing]).unbind(PACKED_DIM[packing])
    return replace(inputs, **dict(zip(names, views, strict=True)))
