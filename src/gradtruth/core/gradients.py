"""Gradients: what a backward in plain torch reads per block of queries, and where it puts its results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.core.merge import sink_gradient
from gradtruth.core.problem import Problem
from gradtruth.core.scores import Scores, coordinates, heads_first, sink_logit
from gradtruth.core.sequences import Block, Sequence, Side
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["BackwardRows", "BiasGradient", "GradientStore", "Rows"]


@dataclass(frozen=True, slots=True)
class Rows:
    """What a backward knows of M queries, fp32 (fp64), R = H / G.

    Attributes:
        q, dout: [G, R * M, D] and [G, R * M, Dv].
        lse: [H, M].
        delta: [H, M], dout . out - dlse with the rounded out.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


class BackwardRows:
    """Reads ``Rows`` from the storage, in any layout; what is not valid is read as 0."""

    def __init__(
        self, problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor, dlse: Tensor | None
    ) -> None:
        layout = problem.spec.layout
        self._problem = problem
        self._q, self._out, self._dout = (
            canonical(x, layout) for x in (inputs.q, forward.out, dout)
        )
        self._lse = canonical_lse(forward.lse, layout).transpose(1, 2)
        self._dlse = None if dlse is None else canonical_lse(dlse, layout).transpose(1, 2)

    def take(self, queries: Side) -> Rows:
        """The rows of these queries."""
        groups, dtype = self._problem.num_gqa_groups, self._problem.accumulate_dtype
        q, out, dout = (
            heads_first(queries.take(x), groups, dtype) for x in (self._q, self._out, self._dout)
        )
        lse = queries.take(self._lse).t().to(dtype)
        delta = (dout * out).sum(-1).view(lse.shape)
        if self._dlse is not None:
            delta = delta - queries.take(self._dlse).t()
        return Rows(q, dout, lse, delta)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStore:
    """Fresh memory for the wanted gradients, zero at first; None where a gradient is not wanted."""

    problem: Problem
    sink: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: BiasGradient | None
    dsink: Tensor | None
    dsink_dtype: torch.dtype | None

    @staticmethod
    def of(problem: Problem, inputs: Inputs, wanted: Wanted) -> GradientStore:
        """dbias and dsoftmax_offset only where there is such an input."""
        bias, offset = inputs.bias, inputs.softmax_offset
        return GradientStore(
            problem=problem,
            sink=sink_logit(problem, inputs),
            dq=_zeros(inputs.q) if wanted.dq else None,
            dk=_zeros(inputs.k) if wanted.dk else None,
            dv=_zeros(inputs.v) if wanted.dv else None,
            dbias=BiasGradient(bias, problem.accumulate_dtype)
            if wanted.dbias and bias is not None
            else None,
            dsink=torch.zeros_like(offset, dtype=problem.accumulate_dtype)
            if wanted.dsoftmax_offset and problem.spec.sink and offset is not None
            else None,
            dsink_dtype=None if offset is None else offset.dtype,
        )

    @property
    def needs_ds(self) -> bool:
        """True when some wanted gradient is made from dS."""
        return not (self.dq is None and self.dk is None and self.dbias is None)

    def put_queries(self, queries: Side, dq: Tensor, blank: Tensor | None) -> None:
        """Store dq, [G, R * M, D]; rows that see no key are 0."""
        if self.dq is None:
            return
        dq = dq.view(self.problem.num_heads, len(queries), dq.shape[-1])
        if blank is not None:
            dq.masked_fill_(blank[..., None], 0)
        queries.put(canonical(self.dq, self.problem.spec.layout), dq.transpose(0, 1))

    def put_keys(self, sequence: Sequence, dk: Tensor, dv: Tensor) -> None:
        """Store dk, [G, T, D], and dv, [G, T, Dv]."""
        for stored, value in ((self.dk, dk), (self.dv, dv)):
            if stored is not None:
                sequence.kv.put(canonical(stored, self.problem.spec.layout), value.transpose(0, 1))

    def add_sink(self, rows: Rows, blank: Tensor | None) -> None:
        """Add what these rows give to dsink; rows that see no key give 0."""
        if self.dsink is None or self.sink is None:
            return
        seen = rows.lse.new_ones((1, 1), dtype=torch.bool) if blank is None else ~blank
        self.dsink.add_(sink_gradient(rows.lse[None], rows.delta[None], self.sink, seen[None]))

    def through_cap(self, block: Block, ds: Tensor, scored: Scores) -> Tensor:
        """From dS of the final scores, [H, M, T], to dS under the soft cap, in place; adds to dbias."""
        bias = self.problem.spec.bias
        if self.dbias is not None and bias == "post_scale":
            self.dbias.add(block, ds)
        if scored.slope is not None:
            ds.mul_(scored.slope)
        if self.dbias is not None and bias == "pre_scale":
            self.dbias.add(block, ds * self.problem.scale)
        return ds

    def grads(self) -> Grads:
        """What was stored."""
        return Grads(
            dq=self.dq,
            dk=self.dk,
            dv=self.dv,
            dbias=None if self.dbias is None else self.dbias.total(),
            dsoftmax_offset=None if self.dsink is None else self.dsink.to(self.dsink_dtype),
        )


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


class BiasGradient:
    """Sums dS of blocks into the bias's own broadcast shape, in fp32 (fp64), in the order of the calls."""

    def __init__(self, bias: Tensor, dtype: torch.dtype) -> None:
        self._like = bias
        # One more row and column take what lies outside the bias; nothing reads them.
        shape = (*bias.shape[:2], bias.shape[2] + 1, bias.shape[3] + 1)
        self._total = torch.zeros(shape, dtype=dtype, device=bias.device)

    def add(self, block: Block, ds: Tensor) -> None:
        """Add dS, [H, M, T], exactly 0 where hidden."""
        shape = self._like.shape
        kept = [1 if size == 1 else n for size, n in zip(shape[1:], ds.shape, strict=True)]
        value = ds.sum_to_size(kept)
        target = self._total[block.number if shape[0] > 1 else 0]
        rows = coordinates(block.queries, shape[2])
        columns = coordinates(block.keys, shape[3])
        if isinstance(rows, slice) and isinstance(columns, slice):
            target[:, rows, columns] += value
            return
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device=ds.device)
        if isinstance(columns, slice):
            columns = torch.arange(columns.start, columns.stop, device=ds.device)
        target[:, rows[:, None], columns] = target[:, rows[:, None], columns] + value

    def total(self) -> Tensor:
        """The gradient in the bias's shape and dtype, rounded once."""
        rows, columns = self._like.shape[2:]
        return self._total[:, :, :rows, :columns].to(self._like.dtype).contiguous()
