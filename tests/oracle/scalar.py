"""Attention written from SEMANTICS.md as loops over single scores; torch only for autograd of scalars."""

from __future__ import annotations

import itertools
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
    by_storage: bool = True  # how bias and mask are indexed; for thd by i and j

    def picked(self, table: Tensor, n: int, h: int, i: int, j: int) -> Tensor:
        """An element of a broadcast [1|B, 1|H, 1|S, 1|T] tensor."""
        if self.by_storage:
            i, j = i + self.sides_q[n].start, j + self.sides_kv[n].start
        at = (n, h, i, j)
        return table[tuple(0 if s == 1 else a for a, s in zip(at, table.shape, strict=True))]


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


def sees(m: Meaning, n: int, h: int, i: int, j: int) -> bool:
    """Whether key j is visible to query i, counted from the first place of their sequence."""
    side_q, side_kv = m.sides_q[n], m.sides_kv[n]
    off = side_kv.length - side_q.length if m.bottom_right else 0
    if i in side_q.hidden or j in side_kv.hidden:
        return False
    if m.left is not None and j < i + off - m.left:
        return False
    if m.right is not None and j > i + off + m.right:
        return False
    if m.mask is not None and bool(m.picked(m.mask, n, h, i, j)):
        return False
    return m.bias_kind != "post_scale" or m.picked(m.bias, n, h, i, j).item() != -math.inf


def score(m: Meaning, n: int, h: int, i: int, j: int) -> Tensor:
    """The final score of a visible pair."""
    side_q, side_kv = m.sides_q[n], m.sides_kv[n]
    g = h // (m.q.shape[2] // m.k.shape[2])
    x = (m.q[side_q.row, side_q.start + i, h] * m.k[side_kv.row, side_kv.start + j, g]).sum()
    if m.bias_kind == "pre_scale":
        x = x + m.picked(m.bias, n, h, i, j)
    x = x * m.scale
    if m.softcap is not None:
        x = m.softcap * torch.tanh(x / m.softcap)
    if m.bias_kind == "post_scale":
        x = x + m.picked(m.bias, n, h, i, j)
    if m.slopes is not None:
        off = side_kv.length - side_q.length if m.bottom_right else 0
        slope = m.slopes[n, h] if m.slopes.dim() == 2 else m.slopes[h]
        x = x - slope * abs(i + off - j)
    return x


def kept(m: Meaning, n: int, h: int, i: int, j: int) -> float:
    """keep / (1 - p)."""
    if m.dropout_p == 1.0:
        return 0.0
    keep = philox_word(m.seed, n, h, i, j) >= math.floor(m.dropout_p * 2**32)
    return float(keep) / (1 - m.dropout_p)


def attend(m: Meaning) -> tuple[Tensor, Tensor, Tensor]:
    """out [rows, places, H, Dv], lse [rows, H, places] and max_logit [H], differentiable."""
    heads = m.q.shape[2]
    out = torch.zeros(*m.q.shape[:3], m.v.shape[3], dtype=torch.float64)
    lse = torch.full((m.q.shape[0], heads, m.q.shape[1]), -math.inf, dtype=torch.float64)
    top = torch.full((heads,), -math.inf, dtype=torch.float64)
    for n, (side_q, side_kv) in enumerate(zip(m.sides_q, m.sides_kv, strict=True)):
        g_of = [h // (heads // m.k.shape[2]) for h in range(heads)]
        for h, i in itertools.product(range(heads), range(side_q.length)):
            if i in side_q.hidden:
                continue
            keys = [j for j in range(side_kv.length) if sees(m, n, h, i, j)]
            place = side_q.row, side_q.start + i
            if not keys:
                if m.sink is not None:
                    lse[place[0], h, place[1]] = m.sink[h].detach()
                continue
            scores = torch.stack([score(m, n, h, i, j) for j in keys])
            top[h] = max(top[h], scores.max().detach())
            denominator = torch.exp(scores).sum()
            if m.sink is not None:
                denominator = denominator + torch.exp(m.sink[h])
            keep = torch.tensor([kept(m, n, h, i, j) for j in keys], dtype=torch.float64)
            values = torch.stack([m.v[side_kv.row, side_kv.start + j, g_of[h]] for j in keys])
            weights = torch.exp(scores) / denominator * keep
            out[place[0], place[1], h] = (weights.unsqueeze(1) * values).sum(0)
            lse[place[0], h, place[1]] = torch.log(denominator)
    return out, lse, top
