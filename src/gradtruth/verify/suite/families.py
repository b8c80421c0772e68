"""Input families: seeded values in closed form, the same bits on every device.

Independent noise is blind to every fault that mixes up rows, heads or batch items, because in it they are
all alike. Each family but the plain ones makes sequences, heads, rows or columns differ in a way that real
activations do; probes have results that need no reference. docs/families.md says what each one shows.

Only integer operations, and additions and multiplications in fp64 in a fixed order, are used, so no device
or version changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gradtruth.errors import InvalidProblem
from gradtruth.verify.suite.noise import ROLES, STREAM, noise, stream, words
from gradtruth.verify.suite.probes import PROBES
from gradtruth.verify.suite.tags import tags

__all__ = ["FAMILIES", "noise", "values"]

Shape = tuple[int, int, int, int]

_OUTLIERS = (20.0, -15.0, 8.0)


def _closed_form(role: str, shape: Shape, seed: int, device: torch.device | str) -> Tensor:
    return noise(stream(role, seed), *shape, device=device)


def _gaussian(role: str, shape: Shape, seed: int, device: torch.device | str) -> Tensor:
    """Nearly normal, |x| < 3.47: four uniforms added, the 16-bit parts of one word each."""
    drawn = words(stream(role, seed), shape, device)
    total = drawn & 0xFFFF
    for bits in (16, 32, 48):
        total += (drawn >> bits).bitwise_and_(0xFFFF)
    return (total.double() - 131070.0).mul_(1.0 / math.sqrt((2.0**32 - 1.0) / 3.0))


def _heterogeneous(role: str, shape: Shape, seed: int, device: torch.device | str) -> Tensor:
    """Another scale and offset for every sequence and head, another scale for every row."""
    batch, rows, heads, dims = shape
    key = stream(role, seed)
    octave = (noise(key + STREAM, batch, 1, heads, 1, device=device) * 1.15).round().long()
    scale = torch.tensor([0.25, 0.5, 1.0, 2.0, 3.0], dtype=torch.float64, device=device)[octave + 2]
    row = 1.0 + 0.25 * noise(key + 2 * STREAM, batch, rows, heads, 1, device=device)
    offset = 0.5 * noise(key + 3 * STREAM, batch, 1, heads, dims, device=device)
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
    "tagged": tags,
    **PROBES,
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
    if role not in ROLES:
        raise InvalidProblem(f"role is {role!r}, expected one of {', '.join(map(repr, ROLES))}")
    return FAMILIES[family](role, shape, seed, device)
