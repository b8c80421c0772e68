"""Probes: closed forms whose right results can be read off without a reference.

Their names and what is right for each are in docs/families.md. Roles that a probe says nothing about are noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gradtruth.verify.suite.noise import noise, stream

__all__ = ["NEGATIVE_LOGIT", "PROBES"]

Shape = tuple[int, int, int, int]
Device = torch.device | str

NEGATIVE_LOGIT = -120.0  # exp(0 - lse) overflows fp32 from -89 on


def _plain(role: str, shape: Shape, seed: int, device: Device) -> Tensor:
    return noise(stream(role, seed), *shape, device=device)


def _uniform(role: str, shape: Shape, seed: int, device: Device) -> Tensor:
    """q = 0: out is the mean of the visible values, lse the logarithm of their number."""
    values = _plain(role, shape, seed, device)
    return values.zero_() if role == "q" else values


def _mask_probe(role: str, shape: Shape, seed: int, device: Device) -> Tensor:
    """q = 0, v and dout the identity: out is the mask, each row divided by its sum, and dv is out transposed.

    Where there are more places than channels the identity starts again.
    """
    if role not in ("v", "dout"):
        return _uniform(role, shape, seed, device)
    place = torch.arange(shape[1], device=device)[:, None] % max(shape[3], 1)
    identity = (place == torch.arange(shape[3], device=device)).double()
    return identity[None, :, None].expand(shape).contiguous()


def _gqa_probe(role: str, shape: Shape, seed: int, device: Device) -> Tensor:
    """q = 0, dout of head h is h + 1: dv of a KV head is the integer sum over its query heads."""
    if role != "dout":
        return _uniform(role, shape, seed, device)
    heads = torch.arange(1, shape[2] + 1, dtype=torch.float64, device=device)
    return heads[None, None, :, None].expand(shape).contiguous()


def _one_key(role: str, shape: Shape, seed: int, device: Device) -> Tensor:
    """Three times the noise. Where the problem shows each row one key: out = v, dq = dk = 0, dv = sum of dout."""
    return 3.0 * _plain(role, shape, seed, device)


def _negative_logit(role: str, shape: Shape, seed: int, device: Device) -> Tensor:
    """Every score near -120: what a kernel computes for lanes that hold no key (0) is far above all of them."""
    values = 0.1 * _plain(role, shape, seed, device)
    if role == "q":
        values[..., 0] = 1.0
    elif role == "k":
        values[..., 0] = NEGATIVE_LOGIT * math.sqrt(shape[3])
    return values


def _large_logits(role: str, shape: Shape, seed: int, device: Device) -> Tensor:
    """Scores near +100 in some (sequence, KV head), near -100 in the others."""
    values = _plain(role, shape, seed, device)
    common = 10.0 * math.sqrt(math.sqrt(shape[3]))
    if role == "q":
        values[..., 0] = common
    elif role == "k":
        drawn = noise(stream(role, seed) + 17, shape[0], 1, shape[2], device=device)
        values[..., 0] = torch.where(drawn < 0, -common, common)
    return values


def _tail_dim(role: str, shape: Shape, seed: int, device: Device) -> Tensor:
    """The last columns of q and k (half of them; a column at least) hold all there is."""
    values = _plain(role, shape, seed, device)
    if role in ("q", "k"):
        values *= 2.0
        values[..., : shape[3] // 2] = 0.0
    return values


PROBES: dict[str, Callable[[str, Shape, int, Device], Tensor]] = {
    "uniform": _uniform,
    "maskprobe": _mask_probe,
    "dropprobe": _mask_probe,
    "gqaprobe": _gqa_probe,
    "onekey": _one_key,
    "neglogit": _negative_logit,
    "large_logits": _large_logits,
    "taildim": _tail_dim,
}
