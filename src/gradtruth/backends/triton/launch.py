"""From a problem and its tensors to launches and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtruth.backends.triton.arguments import (
    ALONE,
    FORWARD,
    KEYS,
    QUERIES,
    WIDEST,
    Call,
    lse_strides,
    strides_of,
)
from gradtruth.backends.triton.compiled import Kernel
from gradtruth.backends.triton.kernels.backward_bias import backward_bias
from gradtruth.backends.triton.kernels.backward_keys import backward_keys
from gradtruth.backends.triton.kernels.backward_queries import backward_queries
from gradtruth.backends.triton.kernels.forward import forward as forward_kernel
from gradtruth.backends.triton.kernels.merge import merge
from gradtruth.backends.triton.kernels.rows import rows
from gradtruth.backends.triton.schedule import Parts, Tile, padded
from gradtruth.core.layout import empty_like_query, empty_lse
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["attend", "differentiate"]

_SINK = {"vanilla": 0, "off-by-one": 1, "learnable": 2}
_BIAS_PROGRAMS = 512  # the reduced dims of a bias are split until there are about as many programs
_BIAS_SCRATCH = 64 << 20  # bytes of partial sums, at most, where they are split

_forward = Kernel(forward_kernel)
_merge = Kernel(merge)
_rows = Kernel(rows)
_keys = Kernel(backward_keys)
_queries = Kernel(backward_queries)
_bias = Kernel(backward_bias)
_rows_constants: dict[tuple[int, bool], dict[str, Any]] = {}


def attend(problem: Problem, inputs: Inputs) -> Forward:
    """out, lse and, when asked for, max_logit."""
    call = Call(problem, inputs)
    spec, heads, tile = problem.spec, problem.num_heads, call.plan.schedule.forward
    out, lse = empty_like_query(inputs.q, problem.head_dim_v), empty_lse(inputs.q, spec.layout)
    tiles, order = call.tiles(FORWARD)
    programs = call.programs(tiles, heads)
    parts = call.parts(FORWARD, programs, tile.block_n)
    to_out, to_lse = out, lse
    if parts.count > 1:
        to_out = torch.empty((parts.count, *out.shape), dtype=lse.dtype, device=call.device)
        # thd lse is stored head-major, so its parts are too.
        to_lse = torch.empty((parts.count, *_stored(lse, spec.layout)), device=call.device)
    if spec.layout == "thd":
        to_out.zero_()
        to_lse.fill_(-torch.inf)
    top = inputs.q
    if spec.max_logit:
        shape = (max(1, parts.count * programs // heads), heads)
        top = torch.full(shape, -torch.inf, dtype=torch.float32, device=call.device)
    one_out, one_lse = (to_out, to_lse) if parts.count == 1 else (to_out[0], to_lse[0])
    if parts.count > 1 and spec.layout == "thd":
        one_lse = one_lse.t()
    out_strides, lse_into = strides_of(one_out, spec.layout)[:3], lse_strides(one_lse, spec.layout)
    steps = (to_out.stride(0), to_lse.stride(0)) if parts.count > 1 else (0, 0)
    if programs and problem.batch:
        terms, term_strides = call.spanned(2)
        _forward(
            programs * parts.count,
            (*call.qkv, to_out, to_lse, call.where, *order, *terms, call.sink, call.seed, top),
            (*call.qkv_strides, *out_strides, *lse_into, *steps, *term_strides),
            (
                *call.term_sizes, problem.batch, heads, problem.group_size, tiles, problem.seqlen_q,
                *call.plan.lengths, *call.plan.factors, programs, parts.chunk,
            ),
            call.constants(
                "forward", tile, SINK=_SINK[spec.softmax], TOP=spec.max_logit, PARTS=parts.count > 1
            ),
        )  # fmt: skip
    if parts.count > 1:
        _merged(call, (to_out, to_lse), (*out_strides, steps[0], *lse_into, steps[1]), out, lse)
    return Forward(out=out, lse=lse, max_logit=top.amax(0) if spec.max_logit else None)


def _stored(lse: Tensor, layout: str) -> tuple[int, ...]:
    """The shape of lse as it lies in memory."""
    return tuple(lse.t().shape if layout == "thd" else lse.shape)


def _merged(
    call: Call,
    parts: tuple[Tensor, Tensor],
    strides: tuple[int, ...],
    out: Tensor,
    lse: Tensor,
) -> None:
    """out and lse from those of the parts."""
    problem, layout, block = call.problem, call.problem.spec.layout, call.plan.schedule.rows
    tiles = -(-problem.seqlen_q // block)
    known = call.plan.constants.setdefault(
        ("merge",),
        {
            "DV": problem.head_dim_v, "BLOCK_DV": padded(problem.head_dim_v), "BLOCK_M": block,
            "num_warps": 4,
        },
    )  # fmt: skip
    stored = 1 if layout == "thd" else problem.batch
    _merge(
        tiles * stored * problem.num_heads,
        (*parts, out, lse),
        (*strides, *strides_of(out, layout)[:3], *lse_strides(lse, layout)),
        (problem.num_heads, tiles, problem.seqlen_q, parts[0].shape[0]),
        known,
    )


def differentiate(
    problem: Problem,
    inputs: Inputs,
    forward: Forward,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Grads:
    """The wanted gradients, from any (out, lse)."""
    call = Backward(problem, inputs, forward, dout, dlse)
    dk, dv = call.keys(wanted)
    dq, dsink = call.queries(wanted)
    return Grads(dq=dq, dk=dk, dv=dv, dbias=call.bias(wanted), dsoftmax_offset=dsink)


class Backward(Call):
    """A backward: level and delta are computed at once, the gradients when asked for."""

    def __init__(
        self, problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor, dlse: Tensor | None
    ) -> None:
        super().__init__(problem, inputs)
        layout, out, lse = problem.spec.layout, forward.out, forward.lse
        more = lse if dlse is None else dlse
        dout_strides = strides_of(dout, layout)
        self.wide = self.wide or WIDEST * max(dout_strides) >= 2**31
        stored = 1 if layout == "thd" else problem.batch
        # Each begins at a multiple of 16 bytes whatever the lengths: kernels are compiled for that.
        rows = stored * problem.num_heads * problem.seqlen_q
        level, delta = torch.empty(
            (2, -(-rows // 4) * 4), dtype=torch.float32, device=self.device
        ).unbind(0)
        block, key = self.plan.schedule.rows, (problem.head_dim_v, dlse is not None)
        tiles = -(-problem.seqlen_q // block)
        programs = tiles * stored * problem.num_heads
        constants = _rows_constants.get(key)
        if constants is None:
            dim = problem.head_dim_v
            constants = {"DV": dim, "BLOCK_DV": padded(dim), "BLOCK_M": block, "DLSE": key[1]}
            _rows_constants[key] = constants | {"num_warps": 4}
            constants = _rows_constants[key]
        if programs:
            _rows(
                programs,
                (out, dout, lse, more, level, delta),
                (
                    *strides_of(out, layout), *dout_strides,
                    *lse_strides(lse, layout), *lse_strides(more, layout),
                ),
                (problem.num_heads, tiles, problem.seqlen_q),
                constants,
            )  # fmt: skip
        self.shared = (*self.qkv, dout, level, delta)
        self.shared_strides = (*self.qkv_strides, *dout_strides)

    def keys(self, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
        """dk and dv, in two launches where one would hold too much in registers."""
        schedule = self.plan.schedule
        if schedule.keys_alone is not None:
            # The same tile whichever is wanted: what else is wanted changes no bit.
            alone = schedule.keys_alone
            dk = self._keys(alone, dk=True, dv=False)[0] if wanted.dk else None
            dv = self._keys(alone, dk=False, dv=True)[1] if wanted.dv else None
            return dk, dv
        if not (wanted.dk or wanted.dv):
            return None, None
        return self._keys(schedule.keys, dk=wanted.dk, dv=wanted.dv)

    def _keys(self, tile: Tile, *, dk: bool, dv: bool) -> tuple[Tensor | None, Tensor | None]:
        problem, layout = self.problem, self.problem.spec.layout
        kernel = KEYS if tile is self.plan.schedule.keys else ALONE
        tiles, order = self.tiles(kernel)
        programs = self.programs(tiles, problem.num_gqa_groups)
        parts = self.parts(kernel, programs, tile.block_m)
        to_k = self.fresh(self.inputs.k, parts.count) if dk else self.inputs.k
        to_v = self.fresh(self.inputs.v, parts.count) if dv else self.inputs.v
        one_k, one_v, steps = to_k, to_v, [0, 0]
        if parts.count > 1:
            if dk:
                one_k, steps[0] = to_k[0], to_k.stride(0)
            if dv:
                one_v, steps[1] = to_v[0], to_v.stride(0)
        if programs and problem.batch:
            terms, term_strides = self.spanned(3)
            _keys(
                programs * parts.count,
                (*self.shared, to_k, to_v, self.where, *order, *terms, self.seed),
                (
                    *self.shared_strides, *strides_of(one_k, layout)[:3], *strides_of(one_v, layout)[:3],
                    *steps, *term_strides,
                ),
                (
                    *self.term_sizes, problem.batch, problem.num_heads, problem.num_gqa_groups, tiles,
                    problem.seqlen_q, problem.seqlen_kv, *self.plan.lengths, *self.plan.factors,
                    programs, parts.chunk, parts.shares,
                ),
                self.constants("keys", tile, WANT_DK=dk, WANT_DV=dv, PARTS=parts.count > 1),
            )  # fmt: skip
        given = self.inputs
        return _total(to_k, given.k) if dk else None, _total(to_v, given.v) if dv else None

    def queries(self, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
        """dq and dsoftmax_offset."""
        problem, layout, tile = self.problem, self.problem.spec.layout, self.plan.schedule.queries
        given = problem.spec.sink and self.inputs.softmax_offset is not None
        sink = wanted.dsoftmax_offset and given
        if not (wanted.dq or sink):
            return None, None
        tiles, order = self.tiles(QUERIES)
        programs = self.programs(tiles, problem.num_heads)
        # A sink's share needs all keys of a row in one program, and what is wanted changes no bit of dq.
        parts = Parts() if problem.spec.sink else self.parts(QUERIES, programs, tile.block_n)
        to_q, share = self.inputs.q, self.shared[4]
        if wanted.dq:
            to_q = self.fresh(to_q, parts.count)
        one_q, step = (to_q, 0) if parts.count == 1 else (to_q[0], to_q.stride(0))
        if sink:
            shape = (max(1, programs // problem.num_heads), problem.num_heads)
            share = torch.zeros(shape, dtype=torch.float32, device=self.device)
        if programs and problem.batch:
            terms, term_strides = self.spanned(2)
            _queries(
                programs * parts.count,
                (*self.shared, to_q, share, self.where, *order, *terms, self.sink, self.seed),
                (*self.shared_strides, *strides_of(one_q, layout)[:3], step, *term_strides),
                (
                    *self.term_sizes, problem.batch, problem.num_heads, problem.group_size, tiles,
                    problem.seqlen_q, *self.plan.lengths, *self.plan.factors, programs, parts.chunk,
                ),
                self.constants(
                    "queries", tile, SINK=sink, WANT_DQ=wanted.dq, PARTS=parts.count > 1
                ),
            )  # fmt: skip
        dq = _total(to_q, self.inputs.q) if wanted.dq else None
        return dq, share.sum(0) if sink else None

    def bias(self, wanted: Wanted) -> Tensor | None:
        """dbias."""
        bias, problem = self.inputs.bias, self.problem
        if bias is None or not wanted.dbias:
            return None
        tile, shape = self.plan.schedule.bias, tuple(bias.shape)
        if not (bias.numel() and problem.batch):
            return torch.zeros(shape, dtype=bias.dtype, device=self.device)
        cut = _cut(problem, shape, tile)
        part = torch.empty((cut.parts, *shape), dtype=torch.float32, device=self.device)
        _bias(
            cut.parts * cut.tiles_i * cut.tiles_j * shape[0] * shape[1],
            (*self.shared, part, self.where, *self.terms, self.seed),
            (*self.shared_strides, *self.term_strides),
            (
                *self.term_sizes, problem.batch, problem.num_heads, problem.group_size,
                problem.seqlen_q, *self.plan.lengths, *self.plan.factors,
                *shape, cut.tiles_i, cut.tiles_j, cut.chunks, cut.chunks_i,
            ),
            self.constants(
                "bias", tile, ALL_B=shape[0] == 1, ALL_H=shape[1] == 1, ALL_I=shape[2] == 1,
                ALL_J=shape[3] == 1, ALIGNED=problem.spec.lengths != "padding_mask",
            ),
        )  # fmt: skip
        return part.sum(0).to(bias.dtype)


def _total(parts: Tensor, like: Tensor) -> Tensor:
    """A gradient from its parts, which are added in order in fp32 and rounded once."""
    return parts if parts.dim() == like.dim() else parts.sum(0).to(like.dtype)


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
