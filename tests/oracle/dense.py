"""Dense problems with random tensors, and attention over them in a few lines of fp64 torch."""

from __future__ import annotations

import torch

from gradtruth.core.problem import DTYPES, Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def heterogeneous(seed, batch, length, heads, dim):
    """Another scale and offset for every sequence and head."""
    scale = torch.exp(0.6 * draw(seed + 1000, batch, 1, heads, 1))
    return draw(seed, batch, length, heads, dim) * scale + 0.3 * draw(
        seed + 2000, batch, 1, heads, dim
    )


def dense(
    seed=0,
    *,
    b=2,
    s=40,
    t=None,
    h=4,
    g=2,
    d=16,
    dv=None,
    dtype="float64",
    make=heterogeneous,
    **spec,
):
    """problem, inputs, dout of a bshd problem."""
    t, dv = t or s, dv or d
    to = DTYPES[dtype]
    inputs = Inputs(
        q=make(seed, b, s, h, d).to(to),
        k=make(seed + 1, b, t, g, d).to(to),
        v=make(seed + 2, b, t, g, dv).to(to),
        softmax_offset=draw(seed + 4, h).float() if spec.get("softmax") == "learnable" else None,
        bias=draw(seed + 5, 1, h, s, t).to(to) if spec.get("bias", "none") != "none" else None,
    )
    problem = Problem.of(Spec(**spec), inputs)
    return problem, inputs, make(seed + 3, b, s, h, dv).to(to)


def by_head(x, heads):
    """[B, S, G, D] as [B, H, S, D]."""
    return x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)


def scores(q, k, problem, bias=None):
    """Final scores [B, H, S, T] of a top-left band."""
    spec = problem.spec
    x = by_head(q, q.shape[2]) @ by_head(k, q.shape[2]).mT * problem.scale
    if spec.softcap is not None:
        x = spec.softcap * torch.tanh(x / spec.softcap)
    if bias is not None:
        x = x + bias
    i, j = torch.arange(x.shape[2])[:, None], torch.arange(x.shape[3])
    if spec.right is not None:
        x = x.masked_fill(j > i + spec.right, -torch.inf)
    return x
