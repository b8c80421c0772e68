"""Equal bit for bit: NaN equals itself, and 0 is not -0."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_integers", "same_bits"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Tensor) -> Tensor:
    """A tensor whose elements are equal where the bits are; of floating point a contiguous view as integers."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and bits."""
    return torch.equal(as_integers(a), as_integers(b))
