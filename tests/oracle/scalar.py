"""Attention written from SEMANTICS.md as loops over single scores; torch only for autograd of scalars."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Side:
    """Where one sequence lies on one side: storage row, places, and which of them are hidden."""

    row: int
    start: int
    length: int
    hidden: frozenset[int] = frozenset()  # of 0 .. length - 1


@dataclass
class Meaning:
    """A problem in plain values. q, k, v are [rows, places, heads, dim] leaves in fp64."""

    q: Tensor
    k: Tensor
    v: Tensor
    sides_q: list[Side]
    sides_kv: list[Side]
    scale: float
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    softcap: float | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    bias_kind: str = "none"
    slopes: Tensor | None = None
    sink: Tensor | None = None  # [H] leaf, or zeros for off-by-one
    dropout_p: float = 0.0
    seed: int = 0
    by_storage: bool = True  # bias and mask are indexed by storage place; within the sequence for thd


def philox_word(seed: int, n: int, h: int, i: int, j: int) -> int:
    """Philox-4x32-10, key = seed, counter (j >> 2, i, h, n), word j & 3."""
    word = 0xFFFFFFFF
    c = [j >> 2, i, h, n]
    k = [seed & word, (seed >> 32) & word]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & word, (a >> 32) ^ c[3] ^ k[1], a & word]
        k = [(k[0] + 0x9E3779B9) & word, (k[1] + 0xBB67AE85) & word]
    return c[j & 3]


def pick(tensor: Tensor, n: int, h: int, i: int, j: int) -> Tensor:
    """An element of a broadcast [1|B, 1|H, 1|S, 1|T] tensor."""
    at = (n, h, i, j)
    return tensor[tuple(0 if size == 1 else a for a, size in zip(at, tensor.shape, strict=True))]


def attend(m: Meaning) -> tuple[Tensor, Tensor, Tensor]:
    """out [rows, places, H, Dv], lse [rows, H, places] and max_logit [H], differentiable."""
    heads, groups = m.q.shape[2], m.k.shape[2]
    out = torch.zeros(*m.q.shape[:3], m.v.shape[3], dtype=torch.float64)
    lse = torch.full((m.q.shape[0], heads, m.q.shape[1]), -math.inf, dtype=torch.float64)
    top = [-math.inf] * heads
    out_parts, lse_parts = [], []
    for n, (side_q, side_kv) in enumerate(zip(m.sides_q, m.sides_kv, strict=True)):
        off = side_kv.length - side_q.length if m.bottom_right else 0
        for h in range(heads):
            g = h // (heads // groups)
            for i in range(side_q.length):
                if i in side_q.hidden:
                    continue
                scores, values, keeps = [], [], []
                for j in range(side_kv.length):
                    at_q = side_q.start + i if m.by_storage else i
                    at_kv = side_kv.start + j if m.by_storage else j
                    if j in side_kv.hidden:
                        continue
                    if m.left is not None and j < i + off - m.left:
                        continue
                    if m.right is not None and j > i + off + m.right:
                        continue
                    if m.mask is not None and bool(pick(m.mask, n, h, at_q, at_kv)):
                        continue
                    bias = None if m.bias is None else pick(m.bias, n, h, at_q, at_kv)
                    if m.bias_kind == "post_scale" and bias.item() == -math.inf:
                        continue
                    q_i, k_j = m.q[side_q.row, side_q.start + i, h], m.k[side_kv.row, side_kv.start + j, g]
                    x = (q_i * k_j).sum()
                    if m.bias_kind == "pre_scale":
                        x = x + bias
                    x = x * m.scale
                    if m.softcap is not None:
                        x = m.softcap * torch.tanh(x / m.softcap)
                    if m.bias_kind == "post_scale":
                        x = x + bias
                    if m.slopes is not None:
                        slope = m.slopes[n, h] if m.slopes.dim() == 2 else m.slopes[h]
                        x = x - slope * abs(i + off - j)
                    scores.append(x)
                    values.append(m.v[side_kv.row, side_kv.start + j, g])
                    keep = philox_word(m.seed, n, h, i, j) >= math.floor(m.dropout_p * 2**32)
                    keeps.append(float(keep) / (1 - m.dropout_p) if m.dropout_p < 1 else 0.0)
                    top[h] = max(top[h], x.item())
                place = (side_q.row, side_q.start + i, h)
                if not scores:
                    if m.sink is not None:
                        lse[place[0], h, place[1]] = m.sink[h].detach()
                    continue
                weights = torch.exp(torch.stack(scores))
                denominator = weights.sum()
                if m.sink is not None:
                    denominator = denominator + torch.exp(m.sink[h])
                share = weights / denominator * torch.tensor(keeps, dtype=torch.float64)
                out_parts.append((place, (share.unsqueeze(1) * torch.stack(values)).sum(0)))
                lse_parts.append(((place[0], h, place[1]), torch.log(denominator)))
    for target, parts in ((out, out_parts), (lse, lse_parts)):
        for place, value in parts:
            target[place] = value
    return out, lse, torch.tensor(top, dtype=torch.float64)
