"""One sequence in fp64: its tensors, and its final scores block by block, written from the definition.

H query heads, G KV heads, S and T the lengths of the sequence, b queries of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradtruth.core.dropout import philox, threshold
from gradtruth.core.extents import resolve
from gradtruth.core.layout import canonical
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Inputs
from gradtruth.verify.truth.rounding import ScoreErrors, Weights, group_matmul, score_errors

__all__ = ["Place", "Scores", "Sequence", "places"]


class Place(NamedTuple):
    """The extents of one sequence as ints; see ``core.extents.Extents``."""

    start_q: int
    length_q: int
    start_kv: int
    length_kv: int
    diagonal: int
    index_q: int
    index_kv: int
    origin_q: int
    origin_kv: int
    sequence: int
    head: int

    @property
    def queries(self) -> slice:
        """Its storage places on the query side."""
        return slice(self.start_q, self.start_q + self.length_q)

    @property
    def keys(self) -> slice:
        """Its storage places on the key side."""
        return slice(self.start_kv, self.start_kv + self.length_kv)


def places(problem: Problem, inputs: Inputs) -> list[Place]:
    """Where every sequence lies, read on the host."""
    # In one piece: a device is waited for once. The fields are in the order of ``Extents``.
    return [Place(*column) for column in resolve(problem, inputs).pack().t().tolist()]


@dataclass(slots=True)
class Scores:
    """The scores of one block.

    Attributes:
        x: [H, b, T], final, -inf where the key is not visible.
        visible: bool [1|H, b, T].
        slope: [H, b, T], the softcap's derivative 1 - tanh^2; None without softcap.
        keep: [H, b, T], keep / (1 - p); None without dropout.
        errors: of x and slope.
    """

    x: Tensor
    visible: Tensor
    slope: Tensor | None
    keep: Tensor | None
    errors: ScoreErrors

    def softmax(self, sink: Tensor | None) -> tuple[Tensor, Weights]:
        """lse [H, b] and the weights; ``sink`` [H] is one more logit of the denominator."""
        x = self.x
        top = x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)
        if sink is not None:
            top = torch.maximum(top, sink.view(-1, 1))
        top = torch.where(top == -torch.inf, 0.0, top)
        numerator = torch.exp(x - top.unsqueeze(-1))
        denominator = numerator.sum(-1)
        if sink is not None:
            denominator = denominator + torch.exp(sink.view(-1, 1) - top)
        share = torch.where(denominator > 0, denominator, 1.0).unsqueeze(-1)
        return top + torch.log(denominator), self._weights(numerator / share)

    def weights(self, lse: Tensor) -> Weights:
        """P = exp(x - lse) for any lse [H, b]; 0 where lse is -inf."""
        lse = torch.where(lse == -torch.inf, torch.inf, lse)
        return self._weights(torch.exp(self.x - lse.unsqueeze(-1)))

    def _weights(self, p: Tensor) -> Weights:
        kept = p if self.keep is None else p * self.keep
        return Weights(p, kept, self.keep, self.errors, self.visible.sum(-1))


class Sequence:
    """Everything that one sequence reads, or that some of its queries and keys read.

    Args:
        problem, inputs: of the whole batch.
        n, place: its number in the batch, where it lies.
        device: where to compute.
        queries, keys: int64, the i and j of those that count, in any order; None is all. S and T are their numbers.

    Attributes:
        row: its storage row.
        i, j: int64 [S] and [T], which queries and keys.
        q, k, v: fp64 [H, S, D], [G, T, D], [G, T, Dv], 0 at hidden places whatever is stored there.
        shown_q, shown_kv: bool [S] and [T], places that are not hidden; None when all are shown.
        stored_q, stored_kv: where its results lie in their storage row; from 0 on for chosen queries or keys.
    """

    def __init__(
        self,
        problem: Problem,
        inputs: Inputs,
        n: int,
        place: Place,
        device: torch.device,
        *,
        queries: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> None:
        self.problem, self.n, self.place, self.device = problem, n, place, device
        self.row = 0 if problem.layout == "thd" else n
        self._queries, self._keys = queries, keys
        self.i = torch.arange(place.length_q, device=device) if queries is None else queries
        self.j = torch.arange(place.length_kv, device=device) if keys is None else keys
        self.stored_q = place.queries if queries is None else slice(0, len(queries))
        self.stored_kv = place.keys if keys is None else slice(0, len(keys))
        self.shown_q = self._shown(inputs.padding_mask_q, place.queries, queries)
        self.shown_kv = self._shown(inputs.padding_mask_kv, place.keys, keys)
        q, k, v = (canonical(x, problem.layout) for x in (inputs.q, inputs.k, inputs.v))
        self.q, self.k, self.v = self.take_q(q), self._take_kv(k), self._take_kv(v)
        self.bias, self.mask = self._own(inputs.bias), self._own(inputs.attention_mask)
        slopes = inputs.alibi_slopes
        if slopes is not None:
            slopes = (slopes[n] if slopes.dim() == 2 else slopes).to(device, torch.float64)
        self.slopes = slopes
        self.seed = inputs.dropout_seed

    def take_q(self, tensor: Tensor) -> Tensor:
        """The part [H, S, X] of a canonical [B', S', H, X] tensor, fp64, 0 at hidden places."""
        part = tensor[self.row, self.place.queries]
        return self._taken(part if self._queries is None else part[self.i], self.shown_q)

    def take_row(self, tensor: Tensor, hidden: float) -> Tensor:
        """The part [H, S] of a canonical [B', H, S'] tensor, fp64, ``hidden`` at hidden places."""
        part = tensor[self.row, :, self.place.queries].to(self.device, torch.float64)
        part = part if self._queries is None else part[:, self.i]
        return part if self.shown_q is None else part.masked_fill(~self.shown_q, hidden)

    def part_slices(self, tensor: Tensor, first: int, count: int) -> tuple:
        """Rows and columns of a [.., 1|s, 1|t] bias or mask that queries [first, first + count) read."""
        place, everything = self.place, slice(None)
        rows: slice | Tensor = slice(place.index_q + first, place.index_q + first + count)
        columns: slice | Tensor = slice(place.index_kv, place.index_kv + place.length_kv)
        if self._queries is not None:
            rows = place.index_q + self.i[first : first + count]
        if self._keys is not None:
            columns = place.index_kv + self.j
        rows = rows if tensor.shape[-2] > 1 else everything
        columns = columns if tensor.shape[-1] > 1 else everything
        if isinstance(rows, Tensor) and isinstance(columns, Tensor):
            rows = rows.unsqueeze(1)
        return rows, columns

    def scores(self, first: int, count: int) -> Scores:
        """Final scores of queries [first, first + count) and what their rounding may cost."""
        problem, spec = self.problem, self.problem.spec
        i, j = self.i[first : first + count].unsqueeze(1), self.j.unsqueeze(0)
        visible = self._visible(first, i, j)
        bias = None
        if self.bias is not None:
            bias = self.bias[(slice(None), *self.part_slices(self.bias, first, count))]
            bias = bias.to(self.device, torch.float64)
            if spec.bias == "post_scale":
                visible = visible & (bias != -torch.inf)
            bias = torch.where(visible, bias, 0.0)
        q, k = self.q[:, first : first + count], self.k
        x, size = group_matmul(q, k.mT), group_matmul(q.abs(), k.mT.abs())
        if spec.bias == "pre_scale" and bias is not None:
            x, size = x + bias, size + torch.where(bias.isinf(), 0.0, bias.abs())
        x, size = x * problem.scale, size * abs(problem.scale)
        tanh = slope = None
        if spec.softcap is not None:
            tanh = torch.tanh(x / spec.softcap)
            slope = torch.cosh(x / spec.softcap) ** -2  # 1 - tanh^2 cancels where tanh saturates
            x = spec.softcap * tanh
        # The scale itself is rounded, exp may be computed as exp2, and D partial sums are of this size.
        share = 2.0 + math.sqrt(problem.head_dim_qk / 12)
        chain = torch.where(x.isinf(), 0.0, share * x.abs())
        if spec.bias == "post_scale" and bias is not None:
            x, chain = x + bias, chain + bias.abs()
        if self.slopes is not None:
            slant = self.slopes.view(-1, 1, 1) * (i + self.place.diagonal - j).abs()
            x, chain = x - slant, chain + slant.abs()
        x = torch.where(visible, x, -torch.inf)
        errors = score_errors(size, chain, spec.softcap, tanh)
        return Scores(x, visible, slope, self._keep(first, count), errors)

    def _visible(self, first: int, i: Tensor, j: Tensor) -> Tensor:
        """bool [1|H, b, T] for i [b, 1] from the first on and j [1, T], from all that hides but the bias."""
        spec, place = self.problem.spec, self.place
        visible = (i >= 0) & (j >= 0)
        if self.shown_q is not None:
            visible &= self.shown_q[first : first + i.shape[0]].unsqueeze(1)
        if self.shown_kv is not None:
            visible &= self.shown_kv.unsqueeze(0)
        ahead = j - i - place.diagonal
        if spec.left is not None:
            visible &= ahead >= -spec.left
        if spec.right is not None:
            visible &= ahead <= spec.right
        visible = visible.unsqueeze(0)
        if self.mask is not None:
            slices = self.part_slices(self.mask, first, i.shape[0])
            visible = visible & ~self.mask[(slice(None), *slices)].to(self.device)
        return visible

    def _keep(self, first: int, count: int) -> Tensor | None:
        """[H, b, T]: 0 or 1 / (1 - p). One Philox call per four keys where all of them are there."""
        p, place, heads = self.problem.spec.dropout_p, self.place, self.problem.num_heads
        if p == 0.0:
            return None
        shape = (heads, count, len(self.j))
        if p == 1.0 or not len(self.j):
            return torch.zeros(shape, dtype=torch.float64, device=self.device)
        j0 = place.origin_kv
        quads = torch.arange(j0 // 4, (j0 + place.length_kv - 1) // 4 + 1, device=self.device)
        if self._keys is not None:
            quads = (j0 + self.j) // 4
        words = philox(
            (
                quads,
                (place.origin_q + self.i[first : first + count]).view(-1, 1),
                torch.arange(place.head, place.head + heads, device=self.device).view(-1, 1, 1),
                torch.tensor(place.sequence, device=self.device),
            ),
            self.seed.to(self.device),
        )
        drawn = torch.stack(words, -1)
        if self._keys is not None:
            word = ((j0 + self.j) % 4).view(-1, 1).expand(*drawn.shape[:-1], 1)
            drawn = drawn.gather(-1, word).squeeze(-1)
        else:
            drawn = drawn.flatten(-2)[..., j0 % 4 :][..., : place.length_kv]
        return (drawn >= threshold(p)).double() / (1.0 - p)

    def _shown(self, mask: Tensor | None, part: slice, chosen: Tensor | None) -> Tensor | None:
        used = self.problem.spec.lengths in ("padding_mask", "extents")
        if mask is None or not used or self.problem.layout == "thd":
            return None
        shown = ~mask[self.n, part].to(self.device)
        shown = shown if chosen is None else shown[chosen]
        return None if bool(shown.all()) else shown

    def _take_kv(self, tensor: Tensor) -> Tensor:
        part = tensor[self.row, self.place.keys]
        return self._taken(part if self._keys is None else part[self.j], self.shown_kv)

    def _taken(self, part: Tensor, shown: Tensor | None) -> Tensor:
        """[X, H, D] as fp64 [H, X, D]."""
        part = part.to(self.device, torch.float64)
        if shown is not None:
            part = torch.where(shown.view(-1, 1, 1), part, 0.0)
        return part.transpose(0, 1).contiguous()

    def _own(self, tensor: Tensor | None) -> Tensor | None:
        """The [1|H, 1|s, 1|t] of this sequence."""
        return None if tensor is None else tensor[self.n if tensor.shape[0] > 1 else 0]
