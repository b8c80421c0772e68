"""Stateless dropout: whether a weight is kept depends on the seed and on global indices, nothing else.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with the 64-bit seed
as key and counter (j >> 2, i, h, n); word j & 3 decides. n, h, i, j are global under any tiling, layout
and context parallelism, so every backend draws the same mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["keep_mask", "philox", "threshold"]

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(counter: tuple[Any, Any, Any, Any], seed: Tensor) -> tuple[Tensor, ...]:
    """Four 32-bit words per counter, as int64 tensors in [0, 2^32).

    Args:
        counter: four ints or broadcastable int64 tensors with values in [0, 2^32).
        seed: int64 scalar tensor; its 64 bits are the key, low word first.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        # The low 64 bits of the product are exact under wrap-around, and the high word is their upper half.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def threshold(p: float) -> int:
    """A weight is kept when its word is at least floor(p * 2^32)."""
    return int(p * 2.0**32)


def keep_mask(p: float, seed: Tensor, n: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The weights that dropout keeps.

    Args:
        p: dropout probability in [0, 1].
        seed: int64 scalar tensor.
        n, h, i, j: global sequence, query head, query and key index: broadcastable integer tensors.

    Returns:
        bool, of the broadcast shape.
    """
    n, h, i, j = (x.long() for x in (n, h, i, j))
    words = philox((j >> 2, i, h, n), seed.long())
    lane = (j & 3).expand(words[0].shape)
    word = torch.where(
        lane < 2,
        torch.where(lane == 0, words[0], words[1]),
        torch.where(lane == 2, words[2], words[3]),
    )
    return word >= threshold(p)
