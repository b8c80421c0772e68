"""Input families: seeded values in closed form, the same bits on every device.

Independent noise is blind to every fault that mixes up rows, heads or batch items, because in it they are
all alike. Each family but the plain ones makes sequences, heads, rows or columns differ in a way that real
activations do.

Only integer operations, and additions and multiplications in fp64 in a fixed order, are used, so no device
or version changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gradtruth.errors import InvalidProblem

__all__ = ["FAMILIES", "noise", "values"]

Shape = tuple[int, int, int, int]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_STREAM = 1000003
_ROLES = {
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
_OUTLIERS = (20.0, -15.0, 8.0)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


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
    uniform = _shifted(_words(seed, shape, device), 11).double() * 2.0**-52 - 1.0
    return uniform.mul_(math.sqrt(3.0))


def _words(seed: int, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    """Splitmix64 of the flat index, counted from 1: int64 of that shape."""
    first = 1 + _signed(seed * _STREAM)
    z = torch.arange(first, first + math.prod(shape), dtype=torch.int64, device=device)
    z *= _signed(_GOLDEN)
    for shift, factor in zip((30, 27), _MIX, strict=True):
        z ^= _shifted(z, shift)
        z *= _signed(factor)
    z ^= _shifted(z, 31)
    return z.view(shape)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's is arithmetic."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _closed_form(role: str, shape: Shape, seed: int, device: torch.device | str) -> Tensor:
    return noise(16 * seed + _ROLES[role], *shape, device=device)


def _gaussian(role: str, shape: Shape, seed: int, device: torch.device | str) -> Tensor:
    """Nearly normal, |x| < 3.47: four uniforms added, the 16-bit parts of one word each."""
    words = _words(16 * seed + _ROLES[role], shape, device)
    total = words & 0xFFFF
    for bits in (16, 32, 48):
        total += (words >> bits).bitwise_and_(0xFFFF)
    return (total.double() - 131070.0).mul_(1.0 / math.sqrt((2.0**32 - 1.0) / 3.0))


def _heterogeneous(role: str, shape: Shape, seed: int, device: torch.device | str) -> Tensor:
    """Another scale and offset for every sequence and head, another scale for every row."""
    batch, rows, heads, dims = shape
    key = 16 * seed + _ROLES[role]
    octave = (noise(key + _STREAM, batch, 1, heads, 1, device=device) * 1.15).round().long()
    scale = torch.tensor([0.25, 0.5, 1.0, 2.0, 3.0], dtype=torch.float64, device=device)[octave + 2]
    row = 1.0 + 0.25 * noise(key + 2 * _STREAM, batch, rows, heads, 1, device=device)
    offset = 0.5 * noise(key + 3 * _STREAM, batch, 1, heads, dims, device=device)
    return _gaussian(role, shape, seed, device) * scale * row + offset


def _outlier(role: str, shape: Shape, seed: int, device: torch.device | str) -> Tensor:
    """A few channels of q and k with large constant offsets, others in every head."""
    base = _heterogeneous(role, shape, seed, device)
    if role not in ("q", "k"):
        return base
    share = 1.0 if role == "k" else 0.3
    dims = shape[3]
    for n in range(shape[0]):
        for place, offset in enumerate(_OUTLIERS):
            base[n, :, :, (n + 5 * place + seed) % dims] += share * offset
    return base


def _peaked(role: str, shape: Shape, seed: int, device: torch.device | str) -> Tensor:
    """Scores so far apart that most rows look at one key."""
    factor = {"q": 4.0, "k": 2.0}.get(role, 1.0)
    return _heterogeneous(role, shape, seed, device) * factor


def _large_offset(role: str, shape: Shape, seed: int, device: torch.device | str) -> Tensor:
    """A large common part in keys and values: the gradients of q and k are small differences."""
    offset = {"k": 4.0, "v": 8.0}.get(role, 0.0)
    return _heterogeneous(role, shape, seed, device) + offset


def _repeated_keys(role: str, shape: Shape, seed: int, device: torch.device | str) -> Tensor:
    """Keys of period three, so that equal scores meet and dq cancels."""
    base = _heterogeneous(role, shape, seed, device)
    if role != "k":
        return base
    return base[:, torch.arange(shape[1], device=base.device) % 3]


FAMILIES: dict[str, Callable[[str, Shape, int, torch.device | str], Tensor]] = {
    "closed_form": _closed_form,
    "gaussian": _gaussian,
    "heterogeneous": _heterogeneous,
    "outlier": _outlier,
    "peaked": _peaked,
    "large_offset": _large_offset,
    "repeated_keys": _repeated_keys,
}


def values(
    family: str, role: str, shape: Shape, seed: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The values of one tensor.

    Args:
        family: a name in ``FAMILIES``.
        role: which tensor: q, k, v, dout, bias, ...; each draws its own stream.
        shape: [B, L, H, D]: sequence, place in it, head, channel.
        seed: any int.
        device: of the result; does not change its bits.

    Returns:
        fp64 of that shape.

    Raises:
        InvalidProblem: an unknown family or role.
    """
    if family not in FAMILIES:
        raise InvalidProblem(
            f"family is {family!r}, expected one of {', '.join(map(repr, FAMILIES))}"
        )
    if role not in _ROLES:
        raise InvalidProblem(f"role is {role!r}, expected one of {', '.join(map(repr, _ROLES))}")
    return FAMILIES[family](role, shape, seed, device)
