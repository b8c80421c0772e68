"""Tile sizes: a pure function of the problem and the device. README.md says why each number is what it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from gradtruth.core.problem import Problem

__all__ = ["Schedule", "Tile", "padded", "schedule"]

_SMALL_SHARED = 160 * 1024  # bytes a block may use; consumer GPUs have about 100 KB


@dataclass(frozen=True, slots=True)
class Tile:
    """How one kernel is cut and compiled.

    Attributes:
        block_m, block_n: queries and keys of a tile.
        num_warps, num_stages: of Triton.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A tile for every kernel; uses no number of sequences, so that bits do not depend on the batch."""

    forward: Tile
    keys: Tile
    queries: Tile
    bias: Tile
    rows: int


def padded(dim: int) -> int:
    """The head dim that a kernel computes with: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


# By padded head dim, for 16-bit inputs and a shared memory of 164 KB and more.
_LARGE = {
    64: (Tile(128, 64, 4, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 3)),
    128: (Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
    256: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 1), Tile(128, 32, 8, 2)),
}
# The same for about 100 KB.
_SMALL = {
    64: (Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: (Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 32, 4, 2)),
    256: (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}
# fp32 inputs: every product has three passes, and operands are twice as large.
_SINGLE = {
    64: (Tile(64, 32, 4, 2), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
    128: (Tile(64, 32, 8, 1), Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)),
    256: (Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
_INTERPRETED = (Tile(64, 64, 4, 1), Tile(32, 64, 4, 1), Tile(64, 64, 4, 1))


@lru_cache(maxsize=4096)
def schedule(problem: Problem, device: torch.device) -> Schedule:
    """The schedule of a problem on a device."""
    widest = max(64, padded(problem.head_dim_qk), padded(problem.head_dim_v))
    if device.type != "cuda":
        tiles = _INTERPRETED
    elif problem.dtype == "float32":
        tiles = _SINGLE[widest]
    else:
        properties = torch.cuda.get_device_properties(device)
        large = properties.shared_memory_per_block_optin >= _SMALL_SHARED
        tiles = (_LARGE if large else _SMALL)[widest]
    forward, keys, queries = tiles
    return Schedule(forward=forward, keys=keys, queries=queries, bias=_bias(queries), rows=64)


def _bias(queries: Tile) -> Tile:
    """The bias kernel holds a tile of dS beside those of the queries' kernel."""
    return Tile(min(queries.block_m, 64), queries.block_n, 4, 1)
