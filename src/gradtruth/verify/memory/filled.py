"""Filled memory: within a block, every fresh allocation holds one byte.

On CUDA a memory pool on an allocator of our own fills every segment, and every freed block before the next operator;
on the CPU glibc fills what malloc hands out. Tensors that torch makes empty are filled in any case, so a workspace
that a backend takes from its adapter is too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from gradtruth.verify.memory.allocator import FillingPool, filling_pool
from gradtruth.verify.memory.operators import EmptyFilled

__all__ = ["Filled", "filled_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_PERTURB = -1, -3, -6
_LARGEST_THRESHOLD = 32 << 20  # glibc takes no larger one; blocks above it are 0


@dataclass(slots=True)
class Filled:
    """How memory was filled.

    Attributes:
        words: the means, for reports.
        nothing: why nothing could be filled; "" where something was.
        pool: keep it for as long as tensors live in it.
    """

    words: str = ""
    nothing: str = ""
    pool: FillingPool | None = None


@contextmanager
def filled_memory(device: torch.device, byte: int, *, operators: bool = True) -> Iterator[Filled]:
    """Fill every fresh allocation on a device with one byte.

    Args:
        device: CPU or CUDA; elsewhere only what torch makes empty can be filled, which says nothing of kernels.
        byte: 0 to 255.
        operators: also fill what torch makes empty. Needs a dispatch mode, under which some operators do not run.
    """
    how = Filled()
    if device.type == "cuda":
        with _cuda(device, byte, how, operators=operators):
            yield how
    elif device.type == "cpu":
        with _malloc(byte, how), EmptyFilled(byte) if operators else nullcontext():
            means = (how.words, "every tensor made empty" if operators else "")
            how.words = " and ".join(filter(None, means))
            how.nothing = "" if how.words else "malloc of this system cannot be told to fill"
            yield how
    else:
        how.nothing = f"memory of a {device.type} device cannot be filled"
        yield how


@contextmanager
def _cuda(device: torch.device, byte: int, how: Filled, *, operators: bool) -> Iterator[None]:
    made = filling_pool(byte)
    if isinstance(made, str):
        how.words = f"the weaker form, freed blocks only: {made}"
        _fill_freed(device, byte)
        with EmptyFilled(byte) if operators else nullcontext():
            yield
        return
    how.pool = made

    def refill() -> None:
        made.refill(device)

    how.words = "every segment of a pool of its own"
    if operators:
        how.words += ", every freed block and every tensor made empty"
    torch.cuda.synchronize(device)
    with torch.cuda.use_mem_pool(made.pool, device):
        with EmptyFilled(byte, refill) if operators else nullcontext():
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
    torch.cuda.synchronize(device)
    del blocks


@contextmanager
def _malloc(byte: int, how: Filled) -> Iterator[None]:
    """Let glibc fill what it hands out.

    mallopt takes the complement of the byte, and 0 switches it off, so 0xfe stands in for 0xff. The thresholds stay
    where glibc itself moves them after the first large block is freed; setting them only stops it from moving them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    how.words = "malloc"
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
    mallopt(_M_PERTURB, (~byte & 0xFF) or 1)
    try:
        yield
    finally:
        mallopt(_M_PERTURB, 0)
