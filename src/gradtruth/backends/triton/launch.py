"""From a problem and its tensors to launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gradtruth.backends.triton.kernels.backward_bias import backward_bias
from gradtruth.backends.triton.kernels.backward_keys import backward_keys
from gradtruth.backends.triton.kernels.backward_queries import backward_queries
from gradtruth.backends.triton.kernels.forward import forward as forward_kernel
from gradtruth.backends.triton.kernels.rows import rows
from gradtruth.backends.triton.schedule import Schedule, Tile, padded, schedule
from gradtruth.core.dropout import threshold
from gradtruth.core.extents import resolve
from gradtruth.core.layout import empty_like_query, empty_lse
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Layout
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["attend", "differentiate"]

_LOG2E = 1.4426950408889634
_UNLIMITED = 2**30
_INT32 = 2**31
_BIAS = {"none": 0, "pre_scale": 1, "post_scale": 2}
_SINK = {"vanilla": 0, "off-by-one": 1, "learnable": 2}
_BIAS_PROGRAMS = 512  # the reduced dims of a bias are split until there are about as many programs
_BIAS_SCRATCH = 64 << 20  # bytes of partial sums, at most, where they are split


@dataclass(frozen=True, slots=True)
class _Plan:
    """What follows from the problem and the device alone.

    Attributes:
        sizes: D, DV, BLOCK_D, BLOCK_DV.
        flags: constants of all attention kernels, by name.
        numbers: scale, factor, softcap, threshold, inverse_keep.
        lengths: length_q, length_kv, diagonal (of full sequences), left, right.
    """

    schedule: Schedule
    sizes: dict[str, int]
    flags: dict[str, Any]
    numbers: tuple[float, float, float, int, float]
    lengths: tuple[int, int, int, int, int]


@lru_cache(maxsize=4096)
def _plan(problem: Problem, device: torch.device) -> _Plan:
    spec = problem.spec
    dims = (problem.head_dim_qk, problem.head_dim_v)
    bound = threshold(spec.dropout_p) % 2**32
    p, scale = spec.dropout_p, problem.scale
    full_q = _clamped(problem.seqlen_q, problem.max_seqlen_q)
    full_kv = _clamped(problem.seqlen_kv, problem.max_seqlen_kv)
    precise = "tf32" if spec.allow_tf32 else "tf32x3"
    return _Plan(
        schedule=schedule(problem, device),
        sizes=dict(zip(("D", "DV", "BLOCK_D", "BLOCK_DV"), (*dims, *map(padded, dims)), strict=True)),
        flags={
            "RAGGED": spec.ragged,
            "PACKED": spec.layout == "thd",
            "BIAS": _BIAS[spec.bias],
            "ARBITRARY": spec.arbitrary,
            "ALIBI": spec.alibi,
            "SOFTCAP": spec.softcap is not None,
            "DROPOUT": p > 0,
            "QUADS": spec.lengths != "extents",
            "PRECISION": precise if problem.dtype == "float32" else "tf32",
        },
        numbers=(
            scale,
            scale * _LOG2E,
            1.0 if spec.softcap is None else spec.softcap,
            bound - 2**32 if bound >= _INT32 else bound,
            0.0 if p == 1.0 else 1.0 / (1.0 - p),
        ),
        lengths=(
            full_q,
            full_kv,
            full_kv - full_q if spec.alignment == "bottom_right" else 0,
            _UNLIMITED if spec.left is None else spec.left,
            _UNLIMITED if spec.right is None else spec.right,
        ),
    )


def _clamped(places: int, bound: int | None) -> int:
    return places if bound is None else min(places, bound)


def _strides(tensor: Tensor, layout: Layout) -> tuple[int, int, int, int]:
    """Strides of batch, place, head and last dim of a stored q, k, v, out or gradient."""
    if layout == "thd":
        return (0, *tensor.stride())  # type: ignore[return-value]
    a, b, head, last = tensor.stride()
    return (a, b, head, last) if layout == "bshd" else (b, a, head, last)


def _lse_strides(lse: Tensor, layout: Layout) -> tuple[int, int, int]:
    """Strides of batch, head and place of lse."""
    return (0, lse.stride(1), lse.stride(0)) if layout == "thd" else lse.stride()  # type: ignore[return-value]


def _broadcast(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Strides with 0 where the size is 1, and the sizes that indices must stay under."""
    strides = tuple(
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    rows, columns = (_INT32 - 1 if size == 1 else size for size in tensor.shape[2:])
    return strides, (rows, columns)


class _Call:
    """One call: the arguments that its kernels share."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self.problem, self.inputs = problem, inputs
        self.device = inputs.q.device
        self.plan = _plan(problem, self.device)
        layout = problem.spec.layout
        self.qkv = (inputs.q, inputs.k, inputs.v)
        self.qkv_strides = tuple(s for x in self.qkv for s in _strides(x, layout))
        self.where: Tensor | None = None
        self.lengths: tuple[Tensor, Tensor] | None = None
        if problem.spec.ragged:
            extents = resolve(problem, inputs)
            self.where = extents.pack()
            self.lengths = (self.where[1], self.where[3])
        self.flags = dict(self.plan.flags)
        self._masks()
        spec = problem.spec
        chained = spec.bias != "none" or spec.alibi or spec.softcap is not None
        self.flags["PLAIN"] = not chained and problem.scale > 0
        # The second loop doubles the code, which three passes of wide fp32 products have made long already.
        long = problem.dtype == "float32" and max(problem.head_dim_qk, problem.head_dim_v) > 64
        masked = spec.bias != "none" or spec.arbitrary or spec.dropout_p > 0 or self.holes > 0
        self.flags["SPLIT"] = not (masked or long)
        self.wide = any(256 * stride >= _INT32 for stride in self.qkv_strides)

    def _masks(self) -> None:
        """Pointers, strides and sizes of everything that changes scores; q stands for what is not there."""
        given, none = self.inputs, self.inputs.q
        self.holes = 0
        hidden: list[Tensor] = []
        hidden_strides: list[int] = []
        reads = self.problem.spec.lengths in ("padding_mask", "extents")
        reads = reads and self.problem.layout != "thd"
        for bit, mask in ((1, given.padding_mask_q), (2, given.padding_mask_kv)):
            used = reads and mask is not None
            hidden.append(mask.view(torch.uint8) if used else none)
            hidden_strides += mask.stride() if used else (0, 0)
            self.holes += bit * used
        self.flags["HOLES"] = self.holes
        bias, mask, slopes = given.bias, given.attention_mask, given.alibi_slopes
        terms: list[int] = []
        for tensor in (bias, mask):
            strides, sizes = ((0, 0, 0, 0), (0, 0)) if tensor is None else _broadcast(tensor)
            terms += (*strides, *sizes)
        slope_strides = (0, 0)
        if slopes is not None:
            slope_strides = slopes.stride() if slopes.dim() == 2 else (0, slopes.stride(0))
        self.terms = (
            none if bias is None else bias,
            none if mask is None else mask.view(torch.uint8),
            *hidden,
            none if slopes is None else slopes,
        )
        self.term_strides = (*terms, *hidden_strides, *slope_strides)
        self.seed = none if given.dropout_seed is None else given.dropout_seed
        self.sink = none if given.softmax_offset is None else given.softmax_offset

    def tiles(self, side: int, block: int) -> tuple[int, Tensor]:
        """Tiles of queries (0) or keys (1) per (sequence, head), for thd of all sequences; and their counts."""
        problem = self.problem
        places = problem.seqlen_kv if side else problem.seqlen_q
        tiles = -(-places // block)
        if problem.layout == "thd":
            ends = ((self.lengths[side] + (block - 1)) // block).cumsum(0, dtype=torch.int32)
            return tiles + problem.batch, ends
        # A sequence that starts within the storage has its tiles counted from there.
        shifted = problem.spec.lengths in ("padding_mask", "extents")
        return tiles + shifted, self.inputs.q

    def programs(self, tiles: int, heads: int) -> int:
        """The grid."""
        return tiles * heads * (1 if self.problem.layout == "thd" else self.problem.batch)

    def constants(self, tile: Tile, **more: object) -> dict[str, Any]:
        """Keyword arguments of an attention kernel."""
        return {
            **self.plan.sizes,
            **self.flags,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            **more,
        }

    @property
    def located(self) -> Tensor:
        """The packed extents; q where there are none."""
        return self.inputs.q if self.where is None else self.where

    def fresh(self, like: Tensor) -> Tensor:
        """Contiguous memory like a tensor; 0 for thd, where no kernel writes what lies outside every sequence."""
        make = torch.zeros if self.problem.layout == "thd" else torch.empty
        return make(like.shape, dtype=like.dtype, device=like.device)


def attend(problem: Problem, inputs: Inputs) -> Forward:
    """out, lse and, when asked for, max_logit."""
    call = _Call(problem, inputs)
    spec, heads, tile = problem.spec, problem.num_heads, call.plan.schedule.forward
    out, lse = empty_like_query(inputs.q, problem.head_dim_v), empty_lse(inputs.q, spec.layout)
    if spec.layout == "thd":
        out.zero_()
        lse.fill_(-torch.inf)
    tiles, ends = call.tiles(0, tile.block_m)
    programs = call.programs(tiles, heads)
    top = inputs.q
    if spec.max_logit:
        shape = (max(1, programs // heads), heads)
        top = torch.full(shape, -torch.inf, dtype=torch.float32, device=call.device)
    if programs and problem.batch:
        o = _strides(out, spec.layout)
        forward_kernel[(programs,)](
            *call.qkv, out, lse, call.located, ends, *call.terms, call.sink, call.seed, top,
            *call.qkv_strides, *o[:3], *_lse_strides(lse, spec.layout), *call.term_strides,
            problem.batch, heads, problem.group_size, tiles, problem.seqlen_q,
            *call.plan.lengths, *call.plan.numbers,
            **call.constants(
                tile, SINK=_SINK[spec.softmax], TOP=spec.max_logit, WIDE=call.wide
            ),
        )  # fmt: skip
    return Forward(out=out, lse=lse, max_logit=top.amax(0) if spec.max_logit else None)


def differentiate(
    problem: Problem,
    inputs: Inputs,
    forward: Forward,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Grads:
    """The wanted gradients, from any (out, lse)."""
    call = _Backward(problem, inputs, forward, dout, dlse)
    dk, dv = call.keys(wanted)
    dq, dsink = call.queries(wanted)
    return Grads(dq=dq, dk=dk, dv=dv, dbias=call.bias(wanted), dsoftmax_offset=dsink)


class _Backward(_Call):
    """A backward: level and delta are computed at once, the gradients when asked for."""

    def __init__(
        self, problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor, dlse: Tensor | None
    ) -> None:
        super().__init__(problem, inputs)
        layout, out = problem.spec.layout, forward.out
        lse = forward.lse
        more = lse if dlse is None else dlse
        stored_rows = 1 if layout == "thd" else problem.batch
        self.dout, self.dout_strides = dout, _strides(dout, layout)
        self.wide = self.wide or any(256 * stride >= _INT32 for stride in self.dout_strides)
        self.level, self.delta = torch.empty(
            (2, stored_rows, problem.num_heads, problem.seqlen_q), dtype=torch.float32, device=self.device
        ).unbind(0)
        block = self.plan.schedule.rows
        tiles = -(-problem.seqlen_q // block)
        programs = tiles * stored_rows * problem.num_heads
        if programs:
            rows[(programs,)](
                out, dout, lse, more, self.level, self.delta,
                *_strides(out, layout), *self.dout_strides,
                *_lse_strides(lse, layout), *_lse_strides(more, layout),
                problem.num_heads, tiles, problem.seqlen_q,
                DV=problem.head_dim_v, BLOCK_DV=padded(problem.head_dim_v), BLOCK_M=block,
                DLSE=dlse is not None, num_warps=4,
            )  # fmt: skip
        self.shared = (*self.qkv, dout, self.level, self.delta)
        self.shared_strides = (*self.qkv_strides, *self.dout_strides)

    def keys(self, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
        """dk and dv."""
        if not (wanted.dk or wanted.dv):
            return None, None
        problem, layout, tile = self.problem, self.problem.spec.layout, self.plan.schedule.keys
        dk = self.fresh(self.inputs.k) if wanted.dk else None
        dv = self.fresh(self.inputs.v) if wanted.dv else None
        tiles, ends = self.tiles(1, tile.block_n)
        programs = self.programs(tiles, problem.num_gqa_groups)
        to_k = self.inputs.k if dk is None else dk
        to_v = self.inputs.v if dv is None else dv
        if programs and problem.batch:
            backward_keys[(programs,)](
                *self.shared, to_k, to_v, self.located, ends, *self.terms, self.seed,
                *self.shared_strides, *_strides(to_k, layout)[:3], *_strides(to_v, layout)[:3],
                *self.term_strides, problem.batch, problem.num_heads, problem.num_gqa_groups, tiles,
                problem.seqlen_q, problem.seqlen_kv, *self.plan.lengths, *self.plan.numbers,
                **self.constants(tile, WANT_DK=wanted.dk, WANT_DV=wanted.dv, WIDE=self.wide),
            )  # fmt: skip
        return dk, dv

    def queries(self, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
        """dq and dsoftmax_offset."""
        problem, layout, tile = self.problem, self.problem.spec.layout, self.plan.schedule.queries
        sink = (
            wanted.dsoftmax_offset
            and problem.spec.sink
            and self.inputs.softmax_offset is not None
        )
        if not (wanted.dq or sink):
            return None, None
        tiles, ends = self.tiles(0, tile.block_m)
        programs = self.programs(tiles, problem.num_heads)
        dq = self.fresh(self.inputs.q) if wanted.dq else None
        share = self.level
        if sink:
            shape = (max(1, programs // problem.num_heads), problem.num_heads)
            share = torch.zeros(shape, dtype=torch.float32, device=self.device)
        to_q = self.inputs.q if dq is None else dq
        if programs and problem.batch:
            backward_queries[(programs,)](
                *self.shared, to_q, share, self.located, ends, *self.terms, self.sink, self.seed,
                *self.shared_strides, *_strides(to_q, layout)[:3], *self.term_strides,
                problem.batch, problem.num_heads, problem.group_size, tiles, problem.seqlen_q,
                *self.plan.lengths, *self.plan.numbers,
                **self.constants(tile, WANT_DQ=wanted.dq, SINK=bool(sink), WIDE=self.wide),
            )  # fmt: skip
        return dq, share.sum(0) if sink else None

    def bias(self, wanted: Wanted) -> Tensor | None:
        """dbias."""
        bias, problem = self.inputs.bias, self.problem
        if bias is None or not wanted.dbias:
            return None
        tile, shape = self.plan.schedule.bias, tuple(bias.shape)
        if not (bias.numel() and problem.batch):
            return torch.zeros_like(bias, memory_format=torch.contiguous_format)
        cut = _cut(problem, shape, tile)
        part = torch.empty((cut.parts, *shape), dtype=torch.float32, device=self.device)
        flags = {
            name: size == 1
            for name, size in zip(("ALL_B", "ALL_H", "ALL_I", "ALL_J"), shape, strict=True)
        }
        aligned = problem.spec.lengths != "padding_mask" or flags["ALL_J"]
        constants = self.constants(tile, WIDE=self.wide, **flags)
        constants["QUADS"] = constants["QUADS"] and aligned
        for name in ("PLAIN", "SPLIT"):
            del constants[name]
        backward_bias[(cut.parts * cut.tiles_i * cut.tiles_j * shape[0] * shape[1],)](
            *self.shared, part, self.located, *self.terms, self.seed,
            *self.shared_strides, *self.term_strides,
            problem.batch, problem.num_heads, problem.group_size, problem.seqlen_q,
            *self.plan.lengths, *self.plan.numbers,
            *shape, cut.tiles_i, cut.tiles_j, cut.chunks, cut.chunks_i,
            **constants,
        )  # fmt: skip
        return part.sum(0).to(bias.dtype)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the dbias kernel is cut: tiles of the bias, and chunks of what it is broadcast over."""

    tiles_i: int
    tiles_j: int
    chunks: int
    chunks_i: int

    @property
    def parts(self) -> int:
        """Partial sums of every element."""
        return self.chunks * self.chunks_i


def _cut(problem: Problem, shape: tuple[int, ...], tile: Tile) -> _Cut:
    """Split the reduced dims until there are enough programs or the scratch is full."""
    tiles_i = 1 if shape[2] == 1 else -(-shape[2] // tile.block_m)
    tiles_j = 1 if shape[3] == 1 else -(-shape[3] // tile.block_n)
    own = tiles_i * tiles_j * shape[0] * shape[1]
    numel = shape[0] * shape[1] * shape[2] * shape[3]
    room = max(1, min(_BIAS_PROGRAMS // own, _BIAS_SCRATCH // (4 * numel)))
    pairs = (problem.batch if shape[0] == 1 else 1) * (problem.num_heads if shape[1] == 1 else 1)
    chunks = max(1, min(room, pairs))
    rows_i = -(-problem.seqlen_q // tile.block_m) if shape[2] == 1 else 1
    return _Cut(tiles_i, tiles_j, chunks, max(1, min(room // chunks, rows_i)))
