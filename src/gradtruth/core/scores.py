"""Scores: the chain from q . k to the softmax and its derivative, for one block of rows and columns.

Backends written in plain torch share this file unchanged. Heads stand first: q and out of a block are
[G, R * M, D] with R = H / G query heads per KV head, so that no key or value is repeated, and the same memory
seen per head, [H, M, T], is what the chain works on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from gradtruth.core.dropout import philox, threshold
from gradtruth.core.mask import Band
from gradtruth.core.problem import Problem
from gradtruth.core.sequences import Block, Side
from gradtruth.core.tensors import Inputs
from gradtruth.errors import InvalidProblem

__all__ = [
    "Scores",
    "Softmax",
    "coordinates",
    "dropout_keep",
    "dropout_scale",
    "heads_first",
    "scores",
    "sink_logit",
    "softmax",
    "weights",
]


def heads_first(taken: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[M, H, D] as a fresh contiguous [G, R * M, D] in ``dtype``.

    Always a copy: the bits of a product then never depend on the strides or the address of an input.
    """
    places, heads, dim = taken.shape
    split = taken.view(places, groups, heads // groups, dim).permute(1, 2, 0, 3)
    fresh = torch.empty(split.shape, dtype=dtype, device=taken.device).copy_(split)
    return fresh.view(groups, heads // groups * places, dim)


@dataclass(frozen=True, slots=True)
class Scores:
    """The final scores of a block.

    Attributes:
        x: [H, M, T], -inf where hidden.
        hidden: bool, broadcastable to x; None when nothing is hidden.
        slope: the derivative of the soft cap, 0 where hidden; None without a soft cap or when not asked for.
    """

    x: Tensor
    hidden: Tensor | None
    slope: Tensor | None

    def blank(self) -> Tensor | None:
        """bool [1|H, M], rows that see no key; None when every row sees one."""
        if self.hidden is not None:
            return self.hidden.expand(-1, *self.x.shape[1:]).all(-1)
        return None if self.x.shape[2] else self.x.new_ones((1, self.x.shape[1]), dtype=torch.bool)


def scores(
    problem: Problem, inputs: Inputs, block: Block, raw: Tensor, *, derivative: bool
) -> Scores:
    """Turn q . k into the final scores.

    Args:
        problem, inputs: the whole problem.
        block: which queries and keys.
        raw: [H, M, T], fp32 or fp64, q . k; overwritten.
        derivative: whether ``Scores.slope`` is wanted.
    """
    spec = problem.spec
    bias = None if inputs.bias is None else _window(inputs.bias, block)
    hidden = _hidden(spec.band, inputs, block)
    x, slope = raw, None
    if bias is not None and spec.bias == "pre_scale":
        x.add_(bias)
    x.mul_(problem.scale)
    if spec.softcap is not None:
        x.div_(spec.softcap)
        slope = _tanh_slope(x) if derivative else None
        x.tanh_().mul_(spec.softcap)
    if bias is not None and spec.bias == "post_scale":
        x.add_(bias)
        hidden.append(bias == -torch.inf)
    if inputs.alibi_slopes is not None:
        x.sub_(_alibi(inputs.alibi_slopes.to(x.dtype), block))
    if not hidden:
        return Scores(x, None, slope)
    union = reduce(torch.logical_or, hidden)
    x.masked_fill_(union, -torch.inf)
    if slope is not None:
        slope.masked_fill_(union, 0)
    return Scores(x, union, slope)


def _hidden(band: Band, inputs: Inputs, block: Block) -> list[Tensor]:
    """The masks whose union hides, each broadcastable to [H, M, T] with three dims."""
    queries, keys, found = block.queries, block.keys, []
    if block.banded:
        visible = band.visible(queries.at[:, None], keys.at, block.diagonal)
        found.append(visible.logical_not_()[None])
    if queries.valid is not None:
        found.append(~queries.valid[None, :, None])
    if keys.valid is not None:
        found.append(~keys.valid[None, None])
    if inputs.attention_mask is not None:
        found.append(_window(inputs.attention_mask, block))
    return found


def _tanh_slope(x: Tensor) -> Tensor:
    """1 - tanh(x)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|): the difference cancels where tanh saturates."""
    e = torch.exp(x.abs().mul_(-2))
    return (4 * e).div_((1 + e).square_())


def _alibi(slopes: Tensor, block: Block) -> Tensor:
    """slope_h * |i + diagonal - j|, [H, M, T] in the dtype of the slopes."""
    of_heads = slopes[block.number] if slopes.dim() == 2 else slopes
    distance = (block.queries.at[:, None] + block.diagonal - block.keys.at).abs()
    return of_heads[:, None, None] * distance


# ---------------------------------------------------------------- bias and attention_mask


def coordinates(side: Side, size: int) -> slice | Tensor:
    """Where a side lies in a dim of bias or attention_mask; ``size`` stands for what lies outside."""
    if size == 1:
        return slice(0, 1)
    if side.first is not None and isinstance(side.index, int):
        start = side.index + side.first
        if start >= 0 and start + len(side) <= size:
            return slice(start, start + len(side))
    at = side.at + side.index
    outside = (at < 0) | (at >= size)
    if side.valid is not None:
        outside = outside | ~side.valid
    return at.masked_fill(outside, size)


def _window(tensor: Tensor, block: Block) -> Tensor:
    """The part [1|H, 1|M, 1|T] of bias or attention_mask that a block reads; anything where not valid."""
    part = tensor[block.number if tensor.shape[0] > 1 else 0]
    for dim, side in ((1, block.queries), (2, block.keys)):
        found = coordinates(side, part.shape[dim])
        if isinstance(found, slice):
            part = part.narrow(dim, found.start, found.stop - found.start)
        else:
            part = part.index_select(dim, found.clamp(max=part.shape[dim] - 1))
    return part


# ---------------------------------------------------------------- softmax


@dataclass(frozen=True, slots=True)
class Softmax:
    """The softmax of a block, with its denominator apart.

    Attributes:
        numerator: [H, M, T], exp(x - top); exactly 0 where hidden.
        denominator: [H, M], 1 for a row without any weight.
        lse: [H, M], the sink included; -inf for a row without any weight.
        top: [H, M], the largest score, -inf for a row without a visible key.
    """

    numerator: Tensor
    denominator: Tensor
    lse: Tensor
    top: Tensor


def sink_logit(problem: Problem, inputs: Inputs) -> Tensor | None:
    """The logit of the sink, [H] in the dtype of the scores; None when there is none."""
    if not problem.spec.sink:
        return None
    if inputs.softmax_offset is None:
        return torch.zeros(
            problem.num_heads, dtype=problem.accumulate_dtype, device=inputs.q.device
        )
    return inputs.softmax_offset.to(problem.accumulate_dtype)


def softmax(x: Tensor, sink: Tensor | None) -> Softmax:
    """The softmax over the keys of a block, guarded where a row sees none.

    Args:
        x: [H, M, T], overwritten.
        sink: [H] or None.
    """
    top = x.amax(-1) if x.shape[2] else x.new_full(x.shape[:2], -torch.inf)
    base = top if sink is None else torch.maximum(top, sink[:, None])
    base = base.masked_fill(base == -torch.inf, 0)
    numerator = x.sub_(base[..., None]).exp_()
    total = numerator.sum(-1)
    if sink is not None:
        total += torch.exp(sink[:, None] - base)
    return Softmax(numerator, total.masked_fill(total == 0, 1), base + total.log(), top)


def weights(x: Tensor, lse: Tensor) -> Tensor:
    """P = exp(x - lse), [H, M, T] in place of x; exactly 0 where x or lse is -inf."""
    return x.sub_(lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp_()


# ---------------------------------------------------------------- dropout


def dropout_scale(p: float) -> float:
    """What kept weights are multiplied by; 0 when none is kept."""
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def dropout_keep(problem: Problem, inputs: Inputs, block: Block) -> Tensor | None:
    """The weights of a block that dropout keeps, bool [H, M, T]; None without dropout.

    The mask of ``core.dropout.keep_mask``, at a quarter of its cost: one counter serves four keys.
    """
    seed, p = inputs.dropout_seed, problem.spec.dropout_p
    keys, device = block.keys, inputs.q.device
    if p == 0.0 or not len(keys):
        return None
    if seed is None:
        raise InvalidProblem(f"dropout_seed is None, expected an int64 scalar for dropout_p = {p}")
    j = keys.at + keys.origin
    quads = torch.arange(len(keys) // 4 + 2, device=device)
    first = j[:1] >> 2
    i = (block.queries.at + block.queries.origin)[:, None]
    h = torch.arange(problem.num_heads, device=device)[:, None, None] + block.head
    counter = (quads + first, i, h, block.sequence)
    words = torch.stack(philox(counter, seed.long()), dim=-1).flatten(-2)
    return words.index_select(-1, j - 4 * first) >= threshold(p)
