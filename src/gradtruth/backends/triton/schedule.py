"""Tile sizes: a pure function of the problem and the device. README.md says why each number is what it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradtruth.core.problem import Problem

__all__ = ["Parts", "Schedule", "Tile", "padded", "parts_of", "processors", "schedule", "tiles_for"]

# Bytes a block may use: Hopper and data-centre Blackwell have 227 KB, others 99 to 163 KB.
_LARGE_SHARED = 220 * 1024
_ROWS = 64
# Sharing out: programs per processor that are aimed at, least blocks of a part, bytes of all partial results.
_WAVES = 2
_LEAST_BLOCKS = 4
_PARTS_SCRATCH = 256 << 20
_NARROW = 256  # head dims that the tuned tables reach to
_LONGEST = 2**30  # sums of two places stay in int32


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
    """A tile for every kernel; uses no number of sequences, so that bits do not depend on the batch.

    Attributes:
        forward, keys, queries, bias: of the kernels.
        keys_alone: where dk and dv are computed in a launch each, the tile of both; else None.
        rows: rows of a tile of the kernel before the backward.
    """

    forward: Tile
    keys: Tile
    queries: Tile
    bias: Tile
    keys_alone: Tile | None = None
    rows: int = _ROWS

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """Rows of a tile of the forward, queries, keys and keys_alone."""
        alone = self.keys if self.keys_alone is None else self.keys_alone
        return self.forward.block_m, self.queries.block_m, self.keys.block_n, alone.block_n


@dataclass(frozen=True, slots=True)
class Parts:
    """How the work of every program is shared out among several, whose results are added in a fixed order.

    Attributes:
        count: of parts; 1 is no sharing.
        chunk: places of the other side that a part walks over, whole blocks.
        shares: parts that the heads of a group go to; ``count`` is a multiple.
    """

    count: int = 1
    chunk: int = 0
    shares: int = 1


def padded(dim: int) -> int:
    """The head dim that a kernel computes with: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def _of(
    forward: Tile,
    keys: Tile,
    queries: Tile,
    keys_alone: Tile | None = None,
    bias: Tile | None = None,
) -> Schedule:
    if bias is None:  # that kernel holds a tile of dS beside those of the queries' kernel
        bias = Tile(min(queries.block_m, 64), min(queries.block_n, 64), 4, 1)
    return Schedule(forward=forward, keys=keys, queries=queries, bias=bias, keys_alone=keys_alone)


# By padded head dim, for 16-bit inputs and a shared memory of 227 KB.
_PLAIN = {
    64: _of(Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3)),
    128: _of(Tile(64, 64, 4, 3), Tile(32, 64, 4, 3), Tile(128, 64, 8, 3)),
    256: _of(
        Tile(128, 64, 8, 2), Tile(32, 64, 8, 2), Tile(128, 32, 8, 2), keys_alone=Tile(32, 128, 8, 2)
    ),
}
# The same where scores are more than q . k and a band: more registers, and tiles of bias and masks.
_CHAINED = {
    64: _of(Tile(64, 64, 4, 2), Tile(64, 64, 4, 1), Tile(64, 64, 4, 2)),
    128: _of(Tile(64, 64, 4, 2), Tile(32, 64, 4, 1), Tile(64, 64, 4, 1)),
    256: _of(Tile(64, 32, 4, 1), Tile(32, 64, 8, 1), Tile(64, 32, 4, 1)),
}
# 16-bit inputs and a shared memory of 99 KB and more.
_SMALL = {
    64: _of(Tile(64, 64, 4, 2), Tile(32, 64, 4, 1), Tile(64, 64, 4, 1)),
    128: _of(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: _of(Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)),
}
# fp32 inputs: every product has three passes, and operands are twice as large.
_SINGLE = {
    64: _of(Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
    128: _of(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(64, 32, 8, 1)),
    256: _of(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 16, 8, 1), bias=Tile(16, 32, 4, 1)),
}
_SINGLE_SMALL = {
    64: _of(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    128: _of(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)),
    256: _of(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}
# Head dims over 256 (MLA: 576 and 512): what fits the shared memory, with dk and dv apart.
_WIDE = {
    512: _of(Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    1024: _of(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
_INTERPRETED = _of(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))


def schedule(problem: Problem, device: torch.device) -> Schedule:
    """The schedule of a problem on a device."""
    if device.type != "cuda":
        return _INTERPRETED
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return tiles_for(problem, large=shared >= _LARGE_SHARED)


def tiles_for(problem: Problem, *, large: bool) -> Schedule:
    """The schedule of a problem on a GPU.

    Args:
        problem: what is computed.
        large: a block may use 220 KB of shared memory.
    """
    spec = problem.spec
    widest = max(64, padded(problem.head_dim_qk), padded(problem.head_dim_v))
    if widest > _NARROW:
        return _WIDE[widest]
    if problem.dtype == "float32":
        return (_SINGLE if large else _SINGLE_SMALL)[widest]
    if not large:
        return _SMALL[widest]
    loads = spec.bias != "none" or spec.arbitrary or spec.lengths in ("padding_mask", "extents")
    chained = loads or spec.dropout_p > 0 or spec.softcap is not None or spec.alibi
    return (_CHAINED if chained else _PLAIN)[widest]


def processors(device: torch.device) -> int:
    """Streaming multiprocessors; 0 where filling them is no aim."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def parts_of(
    problem: Problem, processors: int, programs: int, block: int, length: int, *, by_heads: bool
) -> Parts:
    """How a kernel with a small grid is shared out; never where bits must not depend on the batch.

    Args:
        problem: what is computed.
        processors: of the GPU.
        programs: of the kernel.
        block: places of the other side in a block.
        length: of the other side, the most that a sequence can have.
        by_heads: a program walks over the query heads of a group, which are shared out first.
    """
    spec = problem.spec
    if spec.batch_invariant or not (0 < programs < processors and 0 < length < _LONGEST):
        return Parts()
    wanted = _WAVES * processors // programs
    shares = min(wanted, problem.group_size) if by_heads else 1
    expected = length
    if spec.layout == "thd":
        expected = -(-length // max(1, problem.batch))
    chunks = max(1, min(wanted // shares, expected // (_LEAST_BLOCKS * block)))
    if shares * chunks == 1:
        return Parts()
    size = -(-expected // chunks)
    chunk = -(-size // block) * block if chunks > 1 else -(-length // block) * block
    chunks = -(-length // chunk)
    rows = problem.batch if spec.layout != "thd" else 1
    places, heads = problem.seqlen_q, problem.num_heads
    if by_heads:
        places, heads = problem.seqlen_kv, problem.num_gqa_groups
    results = rows * places * heads
    widest = problem.head_dim_qk + problem.head_dim_v
    if 4 * shares * chunks * results * widest > _PARTS_SCRATCH:
        return Parts()
    return Parts(shares * chunks, chunk, shares)
