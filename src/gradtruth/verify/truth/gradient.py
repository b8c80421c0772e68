"""The gradients of one sequence in fp64 with their magnitudes, added up block by block.

H query heads, G KV heads, b queries of a block, T keys of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gradtruth.verify.truth.rounding import (
    Magnitude,
    Rounding,
    RowErrors,
    WeightGradient,
    Weights,
    group_matmul,
    group_sum,
    rounding_of,
    summing,
)
from gradtruth.verify.truth.scoring import Scores, Sequence

__all__ = ["Block", "SequenceGradients", "Sum"]


class Sum:
    """A result and its magnitudes while blocks are added; squares are squared spreads."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        made = (torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(3))
        self.value, self.bound, self.square = made
        self.count: Tensor | None = None

    def add(self, at: tuple, value: Tensor, bound: Tensor, square: Tensor) -> None:
        """Add to the elements ``at``."""
        self.value[at] += value
        self.bound[at] += bound
        self.square[at] += square

    def add_count(self, at: tuple, count: Tensor) -> None:
        """Add to the number of terms of the elements ``at``."""
        if self.count is None:
            self.count = torch.zeros_like(self.value)
        self.count[at] += count

    def add_summing(self, rounding: Rounding) -> None:
        """Count the rounding of the partial sums of as many terms as were counted."""
        if self.count is not None:
            self.square += summing(self.value, self.count, rounding)

    def add_rounding(self, share: float, least: float) -> None:
        """Count the rounding of the result itself: ``share`` eps, ``least`` for an underflow."""
        size = share * self.value.abs().nan_to_num(0.0, 0.0, 0.0) + least * (self.bound > 0)
        self.bound += size
        self.square += size.square()

    def magnitude(self) -> Magnitude:
        """Bound and spread."""
        return Magnitude(self.bound, self.square.sqrt())


@dataclass(slots=True)
class Block:
    """One block of b queries.

    Attributes:
        first: i of its first query.
        scores, weights: [H, b, T].
        out, lse: [H, b, Dv] and [H, b].
        rows: errors of out and lse.
    """

    first: int
    scores: Scores
    weights: Weights
    out: Tensor
    lse: Tensor
    rows: RowErrors


class SequenceGradients:
    """The gradients of one sequence; what is complete after a block goes to ``sums`` at once."""

    def __init__(self, sequence: Sequence, sums: dict[str, Sum], sink: Tensor | None) -> None:
        self.sequence, self.sums, self.sink = sequence, sums, sink
        self.rounding = rounding_of(sequence.problem)
        self.scale = sequence.problem.scale
        self.dk = Sum(tuple(sequence.k.shape), sequence.device)
        self.dv = Sum(tuple(sequence.v.shape), sequence.device)

    def add(self, block: Block, dout: Tensor, dlse: Tensor | None) -> None:
        """Add one block of queries with its dout [H, b, Dv] and dlse [H, b]."""
        weights, rounding, v = block.weights, self.rounding, self.sequence.v
        dlse = torch.zeros_like(block.lse) if dlse is None else dlse
        dp, dp_bound = group_matmul(dout, v.mT), group_matmul(dout.abs(), v.mT.abs())
        if weights.keep is not None:
            dp, dp_bound = dp * weights.keep, dp_bound * weights.keep
        products = dp, dp_bound
        gradient = WeightGradient.of(weights, block.rows, products, dout, block.out, dlse, rounding)
        self.add_gradient(block, gradient, dout)

    def add_gradient(self, block: Block, gradient: WeightGradient, dout: Tensor) -> None:
        """Add one block whose dP and delta are known; its weights may be those of some keys only."""
        weights, rounding, v = gradient.weights, self.rounding, self.sequence.v
        dx = weights.p * (gradient.dp - gradient.delta.unsqueeze(-1))
        each = block.scores.visible.sum(1).expand(dout.shape[0], -1)
        each = each.unflatten(0, (v.shape[0], -1)).sum(1).unsqueeze(-1)
        self.dk.add_count((), each)
        self.dv.add_count((), each)
        slope = block.scores.slope
        ds = dx if slope is None else dx * slope
        part = _Part(gradient, ds, slope, *gradient.errors(ds, slope, rounding))
        self._add_dq(block, part)
        self._add_dk(block, part)
        self._add_dv(block, dout)
        if "dbias" in self.sums:
            if self.sequence.problem.spec.bias == "pre_scale":
                self._add_dbias(block, part, self.scale)
            else:
                if slope is not None:
                    part = _Part(gradient, dx, None, *gradient.errors(dx, None, rounding))
                self._add_dbias(block, part, 1.0)
        if "dsoftmax_offset" in self.sums:
            self._add_dsink(block, gradient)

    def store(self) -> None:
        """Put dk and dv, which are complete after the last block, into their tensors."""
        at = self.sequence.row, self.sequence.stored_kv
        for name, total in (("dk", self.dk), ("dv", self.dv)):
            if name in self.sums:
                total.add_summing(self.rounding)
                parts = (x.transpose(0, 1) for x in (total.value, total.bound, total.square))
                self.sums[name].add(at, *parts)

    def _add_dq(self, block: Block, part: _Part) -> None:
        if "dq" not in self.sums:
            return
        k, scale, rows = self.sequence.k, self.scale, block.rows
        dq = scale * group_matmul(part.ds, k)
        bound = abs(scale) * group_matmul(part.bound, k.abs())
        pull = group_matmul(part.pull, k).square() * part.gradient.delta_square.unsqueeze(-1)
        square = scale**2 * (group_matmul(part.square, k.square()) + pull)
        square += summing(dq, block.weights.count.unsqueeze(-1), self.rounding)
        square += dq.square() * (self.rounding.ratio**2 * rows.lse_square).unsqueeze(-1)
        first = self.sequence.stored_q.start + block.first
        at = self.sequence.row, slice(first, first + dq.shape[1])
        self.sums["dq"].add(at, *(x.transpose(0, 1) for x in (dq, bound, square)))

    def _add_dk(self, block: Block, part: _Part) -> None:
        if "dk" not in self.sums:
            return
        groups = self.sequence.k.shape[0]
        q = self.sequence.q[:, block.first : block.first + part.ds.shape[1]]
        square = part.square + part.shared(self.rounding.ratio)
        self.dk.add(
            (),
            self.scale * group_sum(part.ds, q, groups),
            abs(self.scale) * group_sum(part.bound, q.abs(), groups),
            self.scale**2 * group_sum(square, q.square(), groups),
        )

    def _add_dv(self, block: Block, dout: Tensor) -> None:
        if "dv" not in self.sums:
            return
        groups, rho, rows = self.sequence.v.shape[0], self.rounding.ratio, block.rows
        size = block.weights.rounded(self.rounding.least)
        relative = block.weights.errors.score + 1
        bound = size * (1 + rho * (relative + rows.lse_bound.unsqueeze(-1)))
        shared = relative.square() + rows.lse_square.unsqueeze(-1)
        square = size.square() * (1 + rho**2 * shared)
        self.dv.add(
            (),
            group_sum(block.weights.kept, dout, groups),
            group_sum(bound, dout.abs(), groups),
            group_sum(square, dout.square(), groups),
        )

    def _add_dbias(self, block: Block, part: _Part, scale: float) -> None:
        """Sum dS over what the bias is broadcast over; ``scale`` is what a bias element is multiplied by."""
        total, bias = self.sums["dbias"], cast("Tensor", self.sequence.bias)
        shape = total.value.shape
        dims = [d for d in range(3) if shape[d + 1] == 1]
        if shape[3] == 1:
            # The error of delta and lse is one number per row, so over keys it adds up coherently.
            share = self.rounding.ratio**2 * block.rows.lse_square.unsqueeze(-1)
            shared = part.ds.sum(-1, keepdim=True).square() * share
            pull = part.pull.sum(-1, keepdim=True).square()
            shared += pull * part.gradient.delta_square.unsqueeze(-1)
            square = part.square.sum(-1, keepdim=True) + shared
        else:
            square = part.square + part.shared(self.rounding.ratio)
        n = self.sequence.n if shape[0] > 1 else 0
        at = n, slice(None), *self.sequence.part_slices(bias, block.first, part.ds.shape[1])
        parts = (scale * part.ds, abs(scale) * part.bound, scale**2 * square)
        total.add(at, *(x.sum(dims, keepdim=True) if dims else x for x in parts))
        visible = block.scores.visible.expand(part.ds.shape)
        total.add_count(at, visible.sum(dims, keepdim=True) if dims else visible)

    def _add_dsink(self, block: Block, gradient: WeightGradient) -> None:
        rho, delta, rows = self.rounding.ratio, gradient.delta, block.rows
        seen = block.scores.visible.any(-1)
        weight = torch.where(seen, torch.exp(self.sink.view(-1, 1) - block.lse), 0.0)
        chain = self.sink.view(-1, 1).abs() + 1
        bound = gradient.delta_bound + rho * delta.abs() * (rows.lse_bound + chain)
        square = gradient.delta_square
        square = square + rho**2 * delta.square() * (rows.lse_square + chain.square())
        self.sums["dsoftmax_offset"].add_count((), seen.expand(delta.shape).sum(-1))
        self.sums["dsoftmax_offset"].add(
            (),
            -(weight * delta).sum(-1),
            (weight * bound).sum(-1),
            (weight.square() * square).sum(-1),
        )


@dataclass(slots=True)
class _Part:
    """dS [H, b, T] of one block with its errors; ``slope`` is the softcap's derivative that is in it."""

    gradient: WeightGradient
    ds: Tensor
    slope: Tensor | None
    bound: Tensor
    square: Tensor

    @property
    def pull(self) -> Tensor:
        """How dS follows delta: -d(dS) / d(delta)."""
        p = self.gradient.weights.p
        return p if self.slope is None else p * self.slope

    def shared(self, rho: float) -> Tensor:
        """Squared errors that the weights of a row share, for sums over queries only."""
        lse_square = self.gradient.rows.lse_square.unsqueeze(-1)
        delta_square = self.gradient.delta_square.unsqueeze(-1)
        return self.pull.square() * delta_square + self.ds.square() * (rho**2 * lse_square)
