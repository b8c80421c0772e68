"""Noise in closed form: seeded, the same bits on every device and version.

Only integer operations, and additions and multiplications in fp64 in a fixed order, are used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradtruth.errors import InvalidProblem

__all__ = ["ROLES", "STREAM", "noise", "stream", "words"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
STREAM = 1000003
ROLES = {
    "q": 1,
    "k": 2,
    "v": 3,
    "dout": 4,
    "bias": 5,
    "attention_mask": 6,
    "softmax_offset": 7,
    "dlse": 8,
    "masked_rows": 10,
}


def noise(seed: int, *shape: int, device: torch.device | str = "cpu") -> Tensor:
    """H(seed, shape): splitmix64 of the flat index, uniform with mean 0, variance 1 and |x| < 1.74.

    Args:
        seed: any int.
        shape: of the result.
        device: of the result; does not change its bits.

    Returns:
        fp64.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    uniform = _shifted(words(seed, shape, device), 11).double() * 2.0**-52 - 1.0
    return uniform.mul_(math.sqrt(3.0))


def stream(role: str, seed: int) -> int:
    """The seed of a tensor's own noise.

    Raises:
        InvalidProblem: an unknown role.
    """
    if role not in ROLES:
        raise InvalidProblem(f"role is {role!r}, expected one of {', '.join(map(repr, ROLES))}")
    return 16 * seed + ROLES[role]


def words(seed: int, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    """Splitmix64 of the flat index, counted from 1: int64 of that shape."""
    first = 1 + _signed(seed * STREAM)
    z = torch.arange(first, first + math.prod(shape), dtype=torch.int64, device=device)
    z *= _signed(_GOLDEN)
    for shift, factor in zip((30, 27), _MIX, strict=True):
        z ^= _shifted(z, shift)
        z *= _signed(factor)
    z ^= _shifted(z, 31)
    return z.view(shape)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's is arithmetic."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
