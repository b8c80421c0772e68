"""Attention as SEMANTICS defines it: fp64, one sequence, every pair written out, gradients by autograd."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradtruth.core.dropout import keep_mask


class Attended(NamedTuple):
    """out [S, H, Dv], lse [H, S], the final scores with -inf where nothing is seen [H, S, T]."""

    out: Tensor
    lse: Tensor
    scores: Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    pre: Tensor | None = None,
    post: Tensor | None = None,
    sink: Tensor | None = None,
    keep: Tensor | None = None,
    p: float = 0.0,
) -> Attended:
    """One sequence: q [S, H, D], k [T, G, D], v [T, G, Dv], sink [H]; the others broadcast to [H, S, T]."""
    q, k, v = q.double(), k.double(), v.double()
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    x = torch.einsum("ihd,jhd->hij", q, k)
    x = (x if pre is None else x + pre.double()) * (
        1 / math.sqrt(q.shape[-1]) if scale is None else scale
    )
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    x = x if post is None else x + post.double()
    shown = torch.ones((), dtype=torch.bool) if visible is None else visible
    shown = shown.expand(x.shape)
    weights = torch.where(shown, x, 0.0).exp() * shown
    total = weights.sum(-1)
    if sink is not None:
        total = total + sink.double().exp()[:, None]
    weights = weights / torch.where(total > 0, total, 1.0)[..., None]
    if keep is not None:
        weights = weights * keep / (1 - p)
    return Attended(
        torch.einsum("hij,jhd->ihd", weights, v),
        total.detach().log(),
        x.detach().masked_fill(~shown, -torch.inf),
    )


def causal(s: int, t: int, diagonal: int = 0, left: int | None = None) -> Tensor:
    """bool [S, T]: j <= i + diagonal, and with ``left`` not further back than that."""
    i, j = torch.arange(s)[:, None] + diagonal, torch.arange(t)[None]
    return (j <= i) if left is None else (j <= i) & (j >= i - left)


def kept(p: float, seed: Tensor | int, n: int, h: int, s: int, t: int) -> Tensor:
    """bool [H, S, T]: the weights of sequence n that dropout keeps."""
    at = torch.arange(h)[:, None, None], torch.arange(s)[:, None], torch.arange(t)
    return keep_mask(p, torch.as_tensor(seed), torch.tensor(n), *at)
