"""What the kernels of one call share: places, pointers, strides, constants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradtruth.backends.triton.compiled import Kernel
from gradtruth.backends.triton.kernels.sequences import sequences
from gradtruth.backends.triton.kernels.spans import spans
from gradtruth.backends.triton.schedule import (
    Parts,
    Schedule,
    Tile,
    padded,
    parts_of,
    processors,
    schedule,
)
from gradtruth.core.dropout import threshold
from gradtruth.core.extents import resolve
from gradtruth.core.problem import Problem
from gradtruth.core.recent import Recent
from gradtruth.core.spec import Layout
from gradtruth.core.tensors import Inputs

__all__ = ["ALONE", "FORWARD", "KEYS", "QUERIES", "WIDEST", "Call", "lse_strides", "strides_of"]

FORWARD, QUERIES, KEYS, ALONE = range(4)  # indices into Schedule.blocks

_LOG2E = 1.4426950408889634
_UNLIMITED = 2**30
_INT32 = 2**31
WIDEST = 1024  # rows of a tile, and padded head dims, at most
_BIAS = {"none": 0, "pre_scale": 1, "post_scale": 2}
_CACHE_SIZE = 1024
_RANKED = 1024  # sequences that are put in order of length; more of them fill a GPU in any order


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from the problem and the device alone.

    Attributes:
        problem, schedule: the key, and its schedule.
        shape: D, DV, BLOCK_D, BLOCK_DV.
        features: the other constants that the attention kernels share.
        lengths: length_q, length_kv, diagonal (of full sequences), left, right.
        factors: scale, factor, softcap, threshold, inverse_keep.
        constants: complete sets of constants, by kernel and what else they depend on.
    """

    problem: Problem
    schedule: Schedule
    shape: dict[str, int]
    features: dict[str, Any]
    lengths: tuple[int, int, int, int, int]
    factors: tuple[float, float, float, int, float]
    constants: dict[tuple[Any, ...], Any] = field(default_factory=dict)


_sequences = Kernel(sequences)
_spans = Kernel(spans)
_plans: Recent[Plan] = Recent(_CACHE_SIZE)


def _plan(problem: Problem, device: torch.device) -> Plan:
    """By identity of the problem: hashing it takes longer than the rest, and callers keep theirs."""
    key = (id(problem), device)
    found = _plans.get(key)
    if found is None or found.problem is not problem:
        found = _planned(problem, device)
        _plans.put(key, found)
    return found


def _planned(problem: Problem, device: torch.device) -> Plan:
    spec, p, scale = problem.spec, problem.spec.dropout_p, problem.scale
    dims = (problem.head_dim_qk, problem.head_dim_v)
    bound = threshold(p) % 2**32
    full_q = _clamped(problem.seqlen_q, problem.max_seqlen_q)
    full_kv = _clamped(problem.seqlen_kv, problem.max_seqlen_kv)
    single = problem.dtype == "float32"
    chained = spec.bias != "none" or spec.alibi or spec.softcap is not None
    features = {
        "RAGGED": spec.ragged,
        "PACKED": spec.layout == "thd",
        "PLAIN": not chained and scale > 0,
        # Two loops double the code, which three passes of wide fp32 products have made long already.
        "SPLIT": not (
            spec.bias != "none" or spec.arbitrary or p > 0 or (single and max(dims) > 64)
        ),
        "BIAS": _BIAS[spec.bias],
        "ARBITRARY": spec.arbitrary,
        "ALIBI": spec.alibi,
        "SOFTCAP": spec.softcap is not None,
        "DROPOUT": p > 0,
        "QUADS": spec.lengths != "extents",
        "PRECISION": "tf32x3" if single and not spec.allow_tf32 else "tf32",
    }
    names = ("D", "DV", "BLOCK_D", "BLOCK_DV")
    return Plan(
        problem=problem,
        schedule=schedule(problem, device),
        shape=dict(zip(names, (*dims, *map(padded, dims)), strict=True)),
        features=features,
        lengths=(
            full_q,
            full_kv,
            full_kv - full_q if spec.alignment == "bottom_right" else 0,
            _UNLIMITED if spec.left is None else spec.left,
            _UNLIMITED if spec.right is None else spec.right,
        ),
        factors=(
            scale,
            scale * _LOG2E,
            1.0 if spec.softcap is None else spec.softcap,
            bound - 2**32 if bound >= _INT32 else bound,
            0.0 if p == 1.0 else 1.0 / (1.0 - p),
        ),
    )


def _clamped(places: int, bound: int | None) -> int:
    return places if bound is None else min(places, bound)


def strides_of(tensor: Tensor, layout: Layout) -> tuple[int, int, int, int]:
    """Strides of batch, place, head and last dim of a stored q, k, v, out or gradient."""
    if layout == "thd":
        return (0, *tensor.stride())  # type: ignore[return-value]
    a, b, head, last = tensor.stride()
    return (a, b, head, last) if layout == "bshd" else (b, a, head, last)


def lse_strides(lse: Tensor, layout: Layout) -> tuple[int, int, int]:
    """Strides of batch, head and place of lse."""
    if layout == "thd":
        return (0, lse.stride(1), lse.stride(0))
    return lse.stride()  # type: ignore[return-value]


def _broadcast(tensor: Tensor | None) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Strides with 0 where the size is 1, and the sizes that indices must stay under."""
    if tensor is None:
        return (0, 0, 0, 0), (0, 0)
    strides = tuple(
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    rows, columns = (_INT32 - 1 if size == 1 else size for size in tensor.shape[2:])
    return strides, (rows, columns)


class Call:
    """The arguments that all attention kernels of a call share; q stands for tensors that are not there.

    Attributes:
        problem, inputs, device, plan: what is computed.
        qkv, qkv_strides: q, k, v with 12 strides.
        where: packed extents, int32 [11, B], for thd followed by ends of tiles and orders; q for full sequences.
        terms, term_strides: bias, attention_mask, its spans, padding masks, slopes; and their strides.
        term_sizes: rows and columns of bias and attention_mask.
        sink, seed: the tensors.
        wide: offsets within a tile need 64 bits.
    """

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self.problem, self.inputs, self.device = problem, inputs, inputs.q.device
        self.plan = _plan(problem, self.device)
        q, layout = inputs.q, problem.spec.layout
        self.qkv = (q, inputs.k, inputs.v)
        self.qkv_strides = (
            *strides_of(q, layout), *strides_of(inputs.k, layout), *strides_of(inputs.v, layout),
        )  # fmt: skip
        self.wide = WIDEST * max(self.qkv_strides) >= _INT32
        self.where = self._located() if problem.spec.ragged else q
        sink, seed = inputs.softmax_offset, inputs.dropout_seed
        self.sink = q if sink is None else sink
        self.seed = q if seed is None else seed
        self.holes = 0
        self._read_terms(q)

    def _located(self) -> Tensor:
        """The packed extents; then the ends of the tiles of the four kernels, and the orders of queries and keys."""
        problem, inputs, plan = self.problem, self.inputs, self.plan
        blocks = plan.schedule.blocks
        if problem.spec.lengths != "cu_seqlens" or not problem.batch:
            packed = resolve(problem, inputs).pack()
            if problem.spec.layout != "thd":
                return packed
            length_q, length_kv = packed[1], packed[3]
            orders = [x.argsort(descending=True, stable=True) for x in (length_q, length_kv)]
            ends = [
                ((length[order] + (block - 1)) // block).cumsum(0, dtype=torch.int32)
                for length, order, block in zip(
                    (length_q, length_q, length_kv, length_kv),
                    (orders[0], orders[0], orders[1], orders[1]),
                    blocks,
                    strict=True,
                )
            ]
            return torch.cat((packed, torch.stack((*ends, *(x.int() for x in orders)))))
        cu = (inputs.cu_seqlens_q, inputs.cu_seqlens_kv)
        offsets = (
            cu[0] if inputs.cu_seqlens_q_padded is None else inputs.cu_seqlens_q_padded,
            cu[1] if inputs.cu_seqlens_kv_padded is None else inputs.cu_seqlens_kv_padded,
        )
        where = torch.empty((17, problem.batch), dtype=torch.int32, device=self.device)
        ranked = problem.spec.layout == "thd" and problem.batch <= _RANKED
        known = plan.constants.get(("sequences",))
        if known is None:
            known = plan.constants["sequences",] = {
                "PACKED": problem.spec.layout == "thd",
                "BOTTOM_RIGHT": problem.spec.alignment == "bottom_right",
                "BLOCK": 256,
                "STEP": 32,
                "RANKED": ranked,
                "num_warps": 4,
            }
        _sequences(
            1,
            (*cu, *offsets, where),  # type: ignore[arg-type]
            tuple(x.stride(0) for x in (*cu, *offsets)),
            (problem.batch, problem.seqlen_q, problem.seqlen_kv, *plan.lengths[:2], *blocks),
            known,
        )
        return where

    def _read_terms(self, none: Tensor) -> None:
        given, spec = self.inputs, self.problem.spec
        bias, mask, slopes = given.bias, given.attention_mask, given.alibi_slopes
        hidden, hidden_strides = [none, none], (0, 0, 0, 0)
        if spec.lengths in ("padding_mask", "extents") and spec.layout != "thd":
            strides: list[int] = []
            for at, one in enumerate((given.padding_mask_q, given.padding_mask_kv)):
                strides += (0, 0) if one is None else one.stride()
                if one is not None:
                    hidden[at] = one.view(torch.uint8)
                    self.holes += 1 << at
            hidden_strides = tuple(strides)
        slope_strides: tuple[int, ...] = (0, 0)
        if slopes is not None:
            slope_strides = slopes.stride() if slopes.dim() == 2 else (0, slopes.stride(0))
        bias_strides, bias_sizes = _broadcast(bias)
        mask_strides, mask_sizes = _broadcast(mask)
        self.terms = (
            none if bias is None else bias,
            none if mask is None else mask.view(torch.uint8),
            none,
            *hidden,
            none if slopes is None else slopes,
        )
        # Three for the spans of the mask, which are found for the kernels that use them.
        self.term_strides = (*bias_strides, *mask_strides, 0, 0, 0, *hidden_strides, *slope_strides)
        self.term_sizes = (*bias_sizes, *mask_sizes)

    def spanned(self, side: int) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """The terms and their strides with the spans of the mask's rows (side 2) or columns (3), if there is a mask."""
        mask = self.inputs.attention_mask
        if mask is None:
            return self.terms, self.term_strides
        own, other = mask.shape[side], mask.shape[5 - side]
        found = torch.empty((*mask.shape[:2], own, 2), dtype=torch.int32, device=self.device)
        strides, block = mask.stride(), 32 if side == 2 else 64
        known = self.plan.constants.get(key := ("spans", side, other == 1))
        if known is None:
            known = self.plan.constants[key] = {
                "BLOCK_OWN": block, "BLOCK_OTHER": 256 if side == 2 else 32, "BROADCAST": other == 1, "num_warps": 4,
            }  # fmt: skip
        tiles = -(-own // block)
        if programs := tiles * mask.shape[0] * mask.shape[1]:
            _spans(
                programs,
                (self.terms[1], found),
                (*strides[:2], strides[side], strides[5 - side]),
                (own, other, mask.shape[1], tiles),
                known,
            )
        to = (self.terms[0], self.terms[1], found, *self.terms[3:])
        steps = [
            0 if size == 1 else step
            for size, step in zip(found.shape[:3], found.stride(), strict=False)
        ]
        return to, (*self.term_strides[:8], *steps, *self.term_strides[11:])

    def tiles(self, kernel: int) -> tuple[int, tuple[Tensor, Tensor]]:
        """Tiles of a kernel (an index into ``Schedule.blocks``) per (sequence, head), for thd of all sequences.

        The number of thd tiles is a bound, for the host does not know the lengths; the tensors say how they add up,
        and in which order of the sequences.
        """
        problem, block = self.problem, self.plan.schedule.blocks[kernel]
        tiles = -(-(problem.seqlen_q if kernel < KEYS else problem.seqlen_kv) // block)
        if problem.spec.layout == "thd":
            where = self.where
            return tiles + problem.batch, (where[11 + kernel], where[15 if kernel < KEYS else 16])
        # A sequence that starts within its storage row has its tiles counted from there.
        shifted = problem.spec.lengths in ("padding_mask", "extents")
        return tiles + shifted, (self.inputs.q, self.inputs.q)

    def programs(self, tiles: int, heads: int) -> int:
        """The grid."""
        return tiles * heads * (1 if self.problem.spec.layout == "thd" else self.problem.batch)

    def parts(self, kernel: int, programs: int, block: int) -> Parts:
        """How the other side of a kernel is shared out where its grid is small."""
        key = ("parts", kernel)
        found = self.plan.constants.get(key)
        if found is None:
            limits = self.plan.lengths[:2]
            found = parts_of(
                self.problem, processors(self.device), programs, block,
                limits[1] if kernel < KEYS else limits[0], by_heads=kernel >= KEYS,
            )  # fmt: skip
            self.plan.constants[key] = found
        return found

    def constants(self, kernel: str, tile: Tile, **own: Any) -> dict[str, Any]:
        """The constants of an attention kernel, the same dict for the same arguments.

        Args:
            kernel: its name.
            tile: how it is cut.
            own: what only this kernel has.
        """
        known = self.plan.constants
        key = (kernel, tile, self.holes, self.wide, *own.values())
        found = known.get(key)
        if found is None:
            found = {**self.plan.shape, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
            found |= self.plan.features
            found |= {"HOLES": self.holes, "WIDE": self.wide, **own}
            found["SPLIT"] = found["SPLIT"] and not self.holes
            found |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            known[key] = found
        return found

    def fresh(self, like: Tensor, parts: int = 1) -> Tensor:
        """Contiguous memory like a tensor; 0 for thd, where no kernel writes what lies outside every sequence.

        Args:
            like: shape, dtype and device.
            parts: more than 1: so many, in fp32.
        """
        make = torch.zeros if self.problem.spec.layout == "thd" else torch.empty
        if parts > 1:
            return make((parts, *like.shape), dtype=torch.float32, device=self.device)
        return make(like.shape, dtype=like.dtype, device=self.device)
