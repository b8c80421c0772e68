"""Tags: values that say which element they are, so that a value out of place names where it came from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradtruth.errors import InvalidProblem
from gradtruth.verify.suite.noise import stream

__all__ = ["read_tags", "tags"]

_BITS = 24  # what an fp32 in [-1, 1) holds in steps of 2^-23
_COUNT = 1 << _BITS
_APART = _COUNT >> 8  # neighbours differ by 2^-7 or more: twice bf16's step below 1
_NEAR = 8  # so many places in each direction are neighbours
_FIRST = 0x9E3779  # of the factors that are tried: odd, near 2^24 / golden ratio


def tags(
    role: str, shape: tuple[int, ...], seed: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Every element another multiple of 2^-23 in [-1, 1).

    In fp32 and fp64 ``read_tags`` gives the index back. Elements up to 8 places apart in one dim, in any of the
    dims, stay different in bf16. With more than 2^24 elements tags repeat.

    Args:
        role: which tensor; each has other tags.
        shape: of the result.
        seed: any int.
        device: of the result; does not change its bits.

    Returns:
        fp64 of that shape.
    """
    flat = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
    code = (flat * _factor(shape) + _offset(role, seed)) % _COUNT
    return (code.double() * 2.0 ** (1 - _BITS) - 1.0).view(shape)


def read_tags(values: Tensor, role: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The index of the element that each value is.

    Args:
        values: fp32 or fp64, of any shape, tags or anything else.
        role: as in ``tags``; so are shape and seed.

    Returns:
        int64 [..., len(shape)]; -1 where a value is no tag of this tensor.

    Raises:
        InvalidProblem: a dtype that rounds tags, or more than 2^24 elements.
    """
    if values.dtype not in (torch.float32, torch.float64):
        raise InvalidProblem(f"values has dtype {values.dtype}, expected torch.float32 or float64")
    count = math.prod(shape)
    if count > _COUNT:
        raise InvalidProblem(f"shape is {shape}, expected at most 2^24 elements")
    code = (values.double() + 1.0) * 2.0 ** (_BITS - 1)
    whole = (code >= 0) & (code < _COUNT) & (code == code.floor())
    exact = torch.where(whole, code, 0.0).long()
    flat = (exact - _offset(role, seed)) * pow(_factor(shape), -1, _COUNT) % _COUNT
    known = whole & (flat < count)
    flat = torch.where(known, flat, 0)
    index = []
    for size in reversed(shape):
        index.append(flat % max(size, 1))
        flat = flat // max(size, 1)
    return torch.where(known[..., None], torch.stack(index[::-1], -1), -1)


def _offset(role: str, seed: int) -> int:
    return stream(role, seed) * 0x5851F42D % _COUNT


def _factor(shape: tuple[int, ...]) -> int:
    """An odd factor that keeps neighbours in every dim apart; the one with the most room where none does."""
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    near = {
        stride * step
        for stride, size in zip(strides, shape, strict=True)
        for step in range(1, min(_NEAR, size - 1) + 1)
    }
    best = (-1, _FIRST)
    for at in range(64):
        factor = (_FIRST + 0x2545F4 * at) % _COUNT | 1
        room = min((_distance(step * factor) for step in near), default=_COUNT)
        if room >= _APART:
            return factor
        best = max(best, (room, factor))
    return best[1]


def _distance(code: int) -> int:
    """How far two codes that differ by this are apart, around the circle too."""
    return min(code % _COUNT, -code % _COUNT)
