"""Filled memory: within a block, every fresh allocation holds one byte.

On CUDA a memory pool on an allocator of our own fills every segment; on the CPU glibc fills what malloc hands out, and
tensors that torch makes empty are filled as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradtruth.verify.memory.allocator import filling_pool

__all__ = ["Filled", "filled_memory"]

_M_PERTURB, _M_MMAP_THRESHOLD = -6, -3
_LARGEST_THRESHOLD = 32 << 20
_DEFAULT_THRESHOLD = 128 << 10
_EMPTY = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
)


@dataclass(slots=True)
class Filled:
    """How memory was filled.

    Attributes:
        words: the means, for reports.
        nothing: why nothing could be filled; "" where something was.
    """

    words: str = ""
    nothing: str = ""


@contextmanager
def filled_memory(device: torch.device, byte: int) -> Iterator[Filled]:
    """Fill every fresh allocation on a device with one byte, 0 to 255."""
    how = Filled()
    if device.type == "cuda":
        with _cuda(device, byte, how):
            yield how
        return
    with _malloc(byte, how), _EmptyFilled(byte):
        yield how


@contextmanager
def _cuda(device: torch.device, byte: int, how: Filled) -> Iterator[None]:
    pool = filling_pool(byte)
    if isinstance(pool, str):
        how.words = f"the weaker form, freed blocks only: {pool}"
        _fill_freed(device, byte)
        with _EmptyFilled(byte):
            yield
        return
    how.words = "every segment of a pool of its own, and every tensor made empty"
    torch.cuda.synchronize(device)
    with torch.cuda.use_mem_pool(pool, device), _EmptyFilled(byte):
        yield
        torch.cuda.synchronize(device)


def _fill_freed(device: torch.device, byte: int) -> None:
    """Leave filled blocks of many sizes in the caching allocator."""
    torch.cuda.empty_cache()
    blocks = [
        torch.full((size,), byte, dtype=torch.uint8, device=device)
        for power in range(9, 27)
        for size in (1 << power, 3 << (power - 1))
    ]
    del blocks


@contextmanager
def _malloc(byte: int, how: Filled) -> Iterator[None]:
    """Let glibc fill what it hands out; mallopt takes the complement of the byte, and 0 switches it off."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    how.words = "every tensor made empty"
    if mallopt is None:
        yield
        return
    how.words = "malloc and every tensor made empty"
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
    mallopt(_M_PERTURB, (~byte & 0xFF) or 1)
    try:
        yield
    finally:
        mallopt(_M_PERTURB, 0)
        mallopt(_M_MMAP_THRESHOLD, _DEFAULT_THRESHOLD)


class _EmptyFilled(TorchDispatchMode):
    """Fills what ``torch.empty`` and its like return."""

    def __init__(self, byte: int) -> None:
        super().__init__()
        self.byte = byte

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; fill its result where it is one of the empty ones."""
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _EMPTY and isinstance(found, torch.Tensor):
            _fill(found, self.byte)
        return found


def _fill(tensor: torch.Tensor, byte: int) -> None:
    if tensor.device.type in ("cpu", "cuda") and tensor.numel():
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        raw.set_(tensor.untyped_storage())
        raw.fill_(byte)
