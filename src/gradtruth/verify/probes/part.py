"""Part: one (sequence, KV head) of a call, its chosen rows and columns computed in fp64 and judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Layout
from gradtruth.core.tensors import Inputs
from gradtruth.core.tile import tile
from gradtruth.errors import InvalidProblem
from gradtruth.verify.probes.spots import Found, Spot
from gradtruth.verify.truth import scoring
from gradtruth.verify.truth.budget import Row, judge
from gradtruth.verify.truth.gradient import Block, SequenceGradients, Sum
from gradtruth.verify.truth.rounding import (
    Magnitude,
    Rounding,
    RowErrors,
    WeightGradient,
    Weights,
    group_matmul,
    rounding_of,
)
from gradtruth.verify.truth.scoring import Place, Scores

__all__ = ["Part"]

_TOLERANCE = 2.0
_TOLERANCE_FINE = (
    3.0  # where sums round as coarsely as results, so that rows err less independently
)
_LARGEST = 65504.0  # of fp16
_BLOCK = 1 << 18  # elements of one [R, block, T] tensor on a CPU: what its caches hold
_BLOCK_OF_A_DEVICE = 1 << 22  # there a block costs what its operators cost the host


class _Compared(NamedTuple):
    """What was computed beside what is right: fp64 [heads, rows, dims] each."""

    measured: Tensor
    exact: Tensor
    size: Magnitude


def _on_host(compared: Mapping[str, _Compared]) -> dict[str, _Compared]:
    """The same tensors on the host, in one copy."""
    flat = [x for each in compared.values() for x in (*each[:2], each.size.bound, each.size.spread)]
    if not flat or flat[0].device.type == "cpu":
        return dict(compared)
    pieces = torch.cat([x.reshape(-1) for x in flat]).cpu().split([x.numel() for x in flat])
    moved = iter([piece.view(x.shape) for piece, x in zip(pieces, flat, strict=True)])
    return {
        name: _Compared(next(moved), next(moved), Magnitude(next(moved), next(moved)))
        for name in compared
    }


class Part:
    """One (sequence, KV head) of a call."""

    def __init__(
        self,
        problem: Problem,
        inputs: Inputs,
        found: Found,
        upstream: tuple[Tensor | None, Tensor | None],
        spot: Spot,
    ) -> None:
        n, g = spot.sequence, spot.group
        self.layout: Layout = problem.layout
        self.spot, self.found = spot, found
        self.heads = slice(g * problem.group_size, (g + 1) * problem.group_size)
        self.problem, self.inputs = tile(problem, inputs, sequences=(n, n + 1), groups=(g, g + 1))
        packed = self.inputs.extents
        self.place = Place(*([] if packed is None else packed[:, 0].tolist()))
        self.device = inputs.q.device
        self.rounding: Rounding = rounding_of(self.problem)
        if found.coarse:
            self.rounding = replace(self.rounding, ratio=1.0)
        self.sink = None
        if problem.spec.sink:
            offset = inputs.softmax_offset
            zero = torch.zeros(problem.num_heads, dtype=torch.float64, device=self.device)
            self.sink = (zero if offset is None else offset.double())[self.heads]
        dout, dlse = upstream
        if dout is None and dlse is not None and found.out is not None:
            dout = torch.zeros_like(found.out)
        self.dout, self.dlse = dout, dlse

    # ------------------------------------------------------------ rows

    def rows(self) -> dict[str, _Compared]:
        """out, lse and dq of the chosen queries."""
        if not self.spot.rows:
            return {}
        exact = self._rows_of(self._queries, None)
        return {
            name: _Compared(self._measured(name), *exact[name])
            for name in ("out", "lse", "dq")
            if name in exact and getattr(self.found, name) is not None
        }

    def from_a_wrong_out(self, found: list[Row]) -> dict[str, list[Row]]:
        """dq again: from a wrong out, right is also what belongs to that out."""
        if self.found.out is None or all(row.passed for row in found):
            return {}
        exact = self._rows_of(self._queries, self.found.out)["dq"]
        other = self.judged({"dq": _Compared(self._measured("dq"), *exact)})["dq"]
        return {"dq": [min(x, key=lambda row: row.used) for x in zip(found, other, strict=True)]}

    @cached_property
    def _queries(self) -> scoring.Sequence:
        """The chosen queries, and all keys."""
        return self._sequence(queries=self._index(self.spot.rows))

    def _rows_of(
        self, chosen: scoring.Sequence, given: Tensor | None
    ) -> dict[str, tuple[Tensor, Magnitude]]:
        """The exact out, lse and dq with their magnitudes: [R, r, D], lse [R, r, 1]."""
        heads, count = self.problem.num_heads, len(self.spot.rows)
        sums = {"dq": Sum((1, count, heads, self.problem.head_dim_qk), self.device)}
        gradients = self._gradients(chosen, sums)
        out = Sum((heads, count, self.problem.head_dim_v), self.device)
        lse = Sum((heads, count, 1), self.device)
        for first, some in self._blocks(count, self.place.length_kv):
            block = self._attend(chosen, first, some)
            at = slice(None), slice(first, first + some)
            rows = block.rows
            out.add(at, block.out, rows.out_bound, rows.out_square)
            lse.add(at, *(x.unsqueeze(-1) for x in (block.lse, rows.lse_bound, rows.lse_square)))
            if self.dout is not None:
                if given is not None:
                    theirs = chosen.take_q(self._own(given))[at]
                    block = replace(block, out=theirs, rows=_rounded(theirs, block.lse))
                gradients.add(block, *self._upstream(chosen, at))
        found = {name: (x.value, x.magnitude()) for name, x in (("out", out), ("lse", lse))}
        if self.dout is not None:
            found["dq"] = self._finished(sums["dq"])
        return found

    # ------------------------------------------------------------ columns

    def columns(self) -> dict[str, _Compared]:
        """dk and dv of the chosen keys."""
        names = [name for name in ("dk", "dv") if getattr(self.found, name) is not None]
        if not self.spot.columns or not names or self.dout is None:
            return {}
        chosen = self._sequence(keys=self._index(self.spot.columns))
        dims = {"dk": self.problem.head_dim_qk, "dv": self.problem.head_dim_v}
        sums = {n: Sum((1, len(self.spot.columns), 1, dims[n]), self.device) for n in names}
        gradients = self._gradients(chosen, sums)
        known = self.found.lse is not None and self.found.out is not None
        every = chosen if known else self._sequence()
        for first, count in self._blocks(self.place.length_q, len(every.j)):
            at = slice(None), slice(first, first + count)
            dout, dlse = self._upstream(every, at)
            if known:
                block = self._given(chosen, first, count)
                gradients.add(block, dout, dlse)
                continue
            block, gradient = self._recomputed(every, self._attend(every, first, count), dout, dlse)
            gradients.add_gradient(block, gradient, dout)
        gradients.store()
        found = {}
        for name in names:
            tensor = canonical(getattr(self.found, name), self.layout)[self._row, self.place.keys]
            index = self._index(self.spot.columns)
            measured = tensor[index, self.spot.group].double().unsqueeze(0)
            found[name] = _Compared(measured, *self._finished(sums[name]))
        return found

    def _given(self, chosen: scoring.Sequence, first: int, count: int) -> Block:
        """A block of queries from out and lse as they were returned."""
        at = slice(None), slice(first, first + count)
        scores = chosen.scores(first, count)
        out, lse = self._out[at], self._lse[at]
        return Block(first, scores, scores.weights(lse), out, lse, _rounded(out, lse))

    def _recomputed(
        self, every: scoring.Sequence, block: Block, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Block, WeightGradient]:
        """A block of queries over all keys, then what of it belongs to the chosen ones."""
        weights, v = block.weights, every.v
        dp, size = group_matmul(dout, v.mT), group_matmul(dout.abs(), v.mT.abs())
        if weights.keep is not None:
            dp, size = dp * weights.keep, size * weights.keep
        dlse = torch.zeros_like(block.lse) if dlse is None else dlse
        full = WeightGradient.of(
            weights, block.rows, (dp, size), dout, block.out, dlse, self.rounding
        )
        index = self._index(self.spot.columns)
        scores = block.scores
        some = Scores(
            scores.x[..., index],
            scores.visible[..., index],
            None if scores.slope is None else scores.slope[..., index],
            None if scores.keep is None else scores.keep[..., index],
            type(scores.errors)(
                scores.errors.score[..., index],
                None if scores.errors.slope is None else scores.errors.slope[..., index],
            ),
        )
        kept = None if weights.keep is None else weights.keep[..., index]
        part = Weights(
            weights.p[..., index], weights.kept[..., index], kept, some.errors, weights.count
        )
        gradient = replace(full, weights=part, dp=dp[..., index], dp_bound=size[..., index])
        return replace(block, scores=some, weights=part), gradient

    @cached_property
    def _out(self) -> Tensor:
        """[R, S, Dv], as it was returned."""
        return self._sequence().take_q(self._own(self.found.out))

    @cached_property
    def _lse(self) -> Tensor:
        """[R, S], as it was returned."""
        return self._sequence().take_row(self._own_lse(self.found.lse), -torch.inf)

    # ------------------------------------------------------------ pieces

    @property
    def _row(self) -> int:
        """The storage row of the sequence."""
        return 0 if self.layout == "thd" else self.spot.sequence

    def _index(self, places: tuple[int, ...]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self.device)

    def _sequence(
        self, queries: Tensor | None = None, keys: Tensor | None = None
    ) -> scoring.Sequence:
        return scoring.Sequence(
            self.problem, self.inputs, 0, self.place, self.device, queries=queries, keys=keys
        )

    def _gradients(self, chosen: scoring.Sequence, sums: dict[str, Sum]) -> SequenceGradients:
        found = SequenceGradients(chosen, sums, self.sink)
        found.rounding = self.rounding
        return found

    def _blocks(self, queries: int, keys: int) -> Iterator[tuple[int, int]]:
        """(first, count) of blocks of queries."""
        most = _BLOCK if self.device.type == "cpu" else _BLOCK_OF_A_DEVICE
        step = max(1, most // max(1, self.problem.num_heads * keys))
        for first in range(0, queries, step):
            yield first, min(step, queries - first)

    def _attend(self, sequence: scoring.Sequence, first: int, count: int) -> Block:
        """The exact weights, out and lse of some queries."""
        scores = sequence.scores(first, count)
        lse, weights = scores.softmax(self.sink)
        if sequence.shown_q is not None:
            lse = lse.masked_fill(~sequence.shown_q[first : first + count], -torch.inf)
        out = group_matmul(weights.kept, sequence.v)
        rows = RowErrors.of(weights, sequence.v, out, lse, self.rounding)
        return Block(first, scores, weights, out, lse, rows)

    def _own(self, tensor: Tensor | None) -> Tensor:
        """A tensor of the call, canonical, with the storage row and the heads of this part."""
        if tensor is None:
            raise InvalidProblem("out is None, expected a tensor")
        found = canonical(tensor, self.layout)[:, :, self.heads]
        return found[self._row : self._row + 1]

    def _own_lse(self, tensor: Tensor | None) -> Tensor:
        """[1, R, S'] of an lse of the call."""
        if tensor is None:
            raise InvalidProblem("lse is None, expected a tensor")
        found = canonical_lse(tensor, self.layout)[:, self.heads]
        return found[self._row : self._row + 1]

    def _upstream(
        self, sequence: scoring.Sequence, at: tuple[slice, slice]
    ) -> tuple[Tensor, Tensor | None]:
        """dout [R, b, Dv] and dlse [R, b] of some queries."""
        dout = sequence.take_q(self._own(self.dout))[at]
        if self.dlse is None:
            return dout, None
        return dout, sequence.take_row(self._own_lse(self.dlse), 0.0)[at]

    def _measured(self, name: str) -> Tensor:
        """[R, r, D] of a result on the query side, as it is: hidden places are not made 0."""
        tensor, index = getattr(self.found, name), self._index(self.spot.rows)
        if name == "lse":
            own = self._own_lse(tensor)[0, :, self.place.queries]
            return own[:, index].double().unsqueeze(-1)
        return self._own(tensor)[0, self.place.queries][index].transpose(0, 1).double()

    def _finished(self, total: Sum) -> tuple[Tensor, Magnitude]:
        """[R, r, D] of a gradient [1, r, R, D], its own rounding counted."""
        own = torch.finfo(self.problem.torch_dtype).eps / self.rounding.unit
        total.add_rounding(own, self.rounding.least)
        size = total.magnitude()
        bound, spread = (x[0].transpose(0, 1) for x in (size.bound, size.spread))
        return total.value[0].transpose(0, 1), Magnitude(bound, spread)

    def judged(self, compared: Mapping[str, _Compared]) -> dict[str, list[Row]]:
        """Per tensor one row per head. On the host, and a device is waited for once: the tensors are small."""
        return {name: self._judged(name, each) for name, each in _on_host(compared).items()}

    def _judged(self, name: str, each: _Compared) -> list[Row]:
        many = each.measured.shape[1]
        if name == "lse":
            independent = 1
        elif name in ("dk", "dv"):
            independent = max(1, min(many, self.place.length_q * self.problem.num_heads))
        else:
            independent = many
        keep = self._numbers(each)
        times = _TOLERANCE if self.rounding.ratio < 1.0 else _TOLERANCE_FINE
        value, size = each.exact, each.size
        parts = [each.measured, value, value, times * size.bound, times * size.spread]
        base = self.spot.group if name in ("dk", "dv") else self.heads.start
        rows = judge(self.problem, name, parts, self.spot.sequence, independent)
        return [replace(row, head=base + (row.head or 0)) for row in rows if keep[row.head or 0]]

    def _numbers(self, each: _Compared) -> list[bool]:
        """Per head: not merely too large for fp16, as gradients are where a loss scale is too large."""
        lost = ~each.measured.isfinite()
        if self.problem.torch_dtype != torch.float16 or not bool(lost.any()):
            return [True] * lost.shape[0]
        lost &= (each.size.bound >= _LARGEST) | self._large_products
        return (~lost.flatten(1).any(1)).tolist()

    @cached_property
    def _large_products(self) -> bool:
        """dP or dS, which some round to the input's dtype, may be too large for fp16."""
        if self.dout is None:
            return False
        every = self._sequence()
        dout = every.take_q(self._own(self.dout)).abs()
        if not dout.numel() or not every.v.numel():
            return False
        return bool(4 * dout.sum(-1).max() * every.v.abs().max() >= _LARGEST)


def _rounded(out: Tensor, lse: Tensor) -> RowErrors:
    """What out [R, b, Dv] and lse [R, b] may differ from those that a backward used: by their own rounding."""
    size = torch.where(lse == -torch.inf, 0.0, lse.abs() + 1)
    return RowErrors(size, size.square(), out.abs(), out.square())
