"""Small tensors for DotProductAttention, what it makes of them, and what the definition says; all as [B, S, ...]."""

from __future__ import annotations

from typing import Any

import torch
from tests.dense import attend, causal
from torch import Tensor

from gradtruth import DotProductAttention

B, S, H, G, D, DV = 2, 5, 4, 2, 6, 3
CLOSE = {"rtol": 1e-11, "atol": 1e-12}
FORMATS = ("sbhd", "bshd", "thd")
SEEN = causal(S, S)


def made(
    s: int = S, t: int = S, *, seed: int = 0, dv: int = DV, heads: int = H, groups: int = G
) -> list[Tensor]:
    """q [B, S, H, D], k [B, T, G, D], v [B, T, G, Dv], dout [B, S, H, Dv]; fp64."""
    gen = torch.Generator().manual_seed(seed)
    shapes = ((s, heads, D), (t, groups, D), (t, groups, dv), (s, heads, dv))
    return [torch.randn(B, *shape, generator=gen, dtype=torch.float64) for shape in shapes]


def module(**options: Any) -> DotProductAttention:
    return DotProductAttention(
        **{"num_attention_heads": H, "kv_channels": (D, DV), "num_gqa_groups": G, **options}
    )


def stored(tensor: Tensor, form: str) -> Tensor:
    """[B, S, ...] in the storage of a format; for thd the sequences one after the other."""
    if form == "thd":
        return tensor.flatten(0, 1)
    return tensor if form == "bshd" else tensor.transpose(0, 1).contiguous()


def read(tensor: Tensor, form: str, length: int) -> Tensor:
    """The inverse of ``stored``, a view."""
    if form == "thd":
        return tensor.unflatten(0, (B, length))
    return tensor if form == "bshd" else tensor.transpose(0, 1)


def lengths(form: str, s: int = S, t: int = S) -> dict[str, Any]:
    """What thd needs beside the tensors when every sequence is full."""
    if form != "thd":
        return {}
    return {"cu_seqlens_q": cu(*[s] * B), "cu_seqlens_kv": cu(*[t] * B)}


def cu(*counts: int) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def run(
    attention: DotProductAttention, form: str, tensors: list[Tensor], **call: Any
) -> tuple[Tensor, ...]:
    """out [B, S, H, Dv] and dq, dk, dv as [B, S, heads, dim]."""
    leaves = [stored(t, form).requires_grad_() for t in tensors[:3]]
    out = attention(*leaves, **call)
    dout = stored(tensors[3], form)
    assert out.shape == dout.flatten(-2).shape
    grads = torch.autograd.grad(out, leaves, dout.flatten(-2))
    found = (out.detach().unflatten(-1, dout.shape[-2:]), *grads)
    return tuple(
        read(
            t, form, t.shape[{"bshd": 1, "sbhd": 0, "thd": 0}[form]] // (B if form == "thd" else 1)
        )
        for t in found
    )


def defined(
    tensors: list[Tensor], *each: dict[str, Any], rows: Any = None, keys: Any = None
) -> tuple[Tensor, ...]:
    """The definition's out, dq, dk, dv. ``each``: options per sequence; rows, keys: its places, per sequence."""
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    q, k, v = leaves
    outs = []
    for n in range(B):
        at = slice(None) if rows is None else rows[n]
        seen = slice(None) if keys is None else keys[n]
        out = torch.zeros_like(tensors[3][n])
        out[at] = attend(q[n, at], k[n, seen], v[n, seen], **each[n % len(each)]).out
        outs.append(out)
    out = torch.stack(outs)
    return (out.detach(), *torch.autograd.grad(out, leaves, tensors[3]))


def agree(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
