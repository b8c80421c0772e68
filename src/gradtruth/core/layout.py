"""Layouts as strided views: one canonical form [B', S, H, D] for every storage, never a copy.

B' is the number of storage rows: B for dense layouts, 1 for thd (all tokens in one row).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtruth.core.spec import Layout, Packing
from gradtruth.errors import InvalidProblem

__all__ = [
    "PACKED_DIM",
    "canonical",
    "canonical_lse",
    "empty_like_query",
    "empty_lse",
    "pack_gradients",
    "sequence_dim",
    "split_packed",
    "stored",
]

PACKED_DIM: dict[Packing, int] = {"3hd": -3, "h3d": -2, "2hd": -3, "h2d": -2}
_PACKED_COUNT: dict[Packing, int] = {"3hd": 3, "h3d": 3, "2hd": 2, "h2d": 2}


def sequence_dim(layout: Layout) -> int:
    """The dim of q that counts storage places: S, or tokens for thd."""
    return 1 if layout == "bshd" else 0


def canonical(tensor: Tensor, layout: Layout) -> Tensor:
    """View a stored q, k, v, out or gradient as [B', S, H, D]."""
    if layout == "bshd":
        return tensor
    return tensor.transpose(0, 1) if layout == "sbhd" else tensor.unsqueeze(0)


def stored(tensor: Tensor, layout: Layout) -> Tensor:
    """The inverse of ``canonical``: view [B', S, H, D] in the storage's order of dims."""
    if layout == "bshd":
        return tensor
    return tensor.transpose(0, 1) if layout == "sbhd" else tensor.squeeze(0)


def canonical_lse(lse: Tensor, layout: Layout) -> Tensor:
    """View lse ([B, H, S], thd [tokens, H]) as [B', H, S]."""
    return lse.t().unsqueeze(0) if layout == "thd" else lse


def empty_like_query(q: Tensor, head_dim_v: int) -> Tensor:
    """Fresh contiguous memory for out: q's shape with last dim Dv."""
    return torch.empty((*q.shape[:-1], head_dim_v), dtype=q.dtype, device=q.device)


def empty_lse(q: Tensor, layout: Layout) -> Tensor:
    """Fresh memory for lse: [B, H, S], or [tokens, H] stored head-major; fp32, or fp64 for fp64 inputs."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if layout == "thd":
        return torch.empty((q.shape[1], q.shape[0]), dtype=dtype, device=q.device).t()
    batch, length = (q.shape[0], q.shape[1]) if layout == "bshd" else (q.shape[1], q.shape[0])
    return torch.empty((batch, q.shape[2], length), dtype=dtype, device=q.device)


def split_packed(
    packing: Packing, q: Tensor, k: Tensor | None, v: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of what was given: three tensors, one qkv buffer, or q and one kv buffer.

    Args:
        packing: "separate", or how the buffer interleaves (see ``Spec.packing``).
        q: the query, or the qkv buffer for "3hd" and "h3d".
        k: the key, the kv buffer for "2hd" and "h2d", None for a qkv buffer.
        v: the value, None when packed.

    Raises:
        InvalidProblem: a tensor is missing or too many, or the buffer does not have the packing's shape.
    """
    if packing == "separate":
        if k is None or v is None:
            raise InvalidProblem("key and value are missing beside query, expected three tensors")
        return q, k, v
    if packing in ("3hd", "h3d"):
        if k is not None or v is not None:
            raise InvalidProblem(
                f"key or value is given beside a {packing!r} buffer, which holds them"
            )
        q, k, v = _unpacked(packing, q)
        return q, k, v
    if k is None or v is not None:
        raise InvalidProblem(
            f"packing is {packing!r}, expected query and one buffer of key and value"
        )
    k, v = _unpacked(packing, k)
    return q, k, v


def _unpacked(packing: Packing, buffer: Tensor) -> tuple[Tensor, ...]:
    dim, count = PACKED_DIM[packing], _PACKED_COUNT[packing]
    if buffer.dim() < 3 or buffer.shape[dim] != count:
        raise InvalidProblem(
            f"the packed buffer has shape {list(buffer.shape)}, expected {count} at dim {dim} for {packing!r}"
        )
    return buffer.unbind(dim)


def pack_gradients(packing: Packing, parts: tuple[Tensor, ...]) -> Tensor:
    """One fresh buffer that holds dq, dk, dv (or dk, dv) in the layout of the packed input."""
    count = _PACKED_COUNT.get(packing, 0)
    if len(parts) != count:
        raise InvalidProblem(
            f"packing is {packing!r}, expected {count} gradients, got {len(parts)}"
        )
    return torch.stack(parts, dim=PACKED_DIM[packing])
