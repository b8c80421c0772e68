"""Equal bit for bit: NaN equals itself, and 0 is not -0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["all_same_bits", "as_integers", "on_host", "same_bits"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Tensor) -> Tensor:
    """A tensor whose elements are equal where the bits are; of floating point a contiguous view as integers."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and bits."""
    return torch.equal(as_integers(a), as_integers(b))


def all_same_bits(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[bool]:
    """``same_bits`` of each pair; on a GPU the host waits for all of them together, once."""
    found: list[bool | Tensor] = []
    for a, b in pairs:
        if a.device.type == "cpu" or a.shape != b.shape:
            found.append(same_bits(a, b))
        else:
            found.append((as_integers(a) == as_integers(b)).all())
    known = iter(on_host([flag for flag in found if isinstance(flag, Tensor)]))
    return [flag if isinstance(flag, bool) else next(known) for flag in found]


def on_host(flags: Sequence[Tensor]) -> list[bool]:
    """Bools of one device, for which the host waits once."""
    return torch.stack(list(flags)).tolist() if flags else []
