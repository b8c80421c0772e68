"""Compact: the tokens of all sequences one after the other, the form that kernels for variable lengths take.

Whatever says where sequences are (full tensors, cu_seqlens, thd offsets with gaps, padding masks), the valid tokens
are picked, as users of such kernels do, and results are put back with 0 (lse -inf) elsewhere. The lengths are read
on the host: kernels want their maximum as a number, and some masks are only right for equal lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtruth.backends.peers.places import places_of
from gradtruth.backends.peers.views import to_lse
from gradtruth.core.extents import resolve
from gradtruth.core.layout import canonical, stored
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Inputs

__all__ = ["Compact", "compact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """Where the tokens of a problem lie, by side.

    Attributes:
        problem: whose tokens they are.
        index_q, index_kv: int64 [tokens], their places in the flattened storage; None where these are all places.
        lengths_q, lengths_kv: tokens per sequence.
        cu_seqlens_q, cu_seqlens_kv: int32 [B + 1], the same cumulated, on the device.
        holes: some sequence has hidden places between its first and last token.
        sequence_q: int64 [tokens], the number of a query's sequence.
    """

    problem: Problem
    index_q: Tensor | None
    index_kv: Tensor | None
    lengths_q: tuple[int, ...]
    lengths_kv: tuple[int, ...]
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    holes: bool
    sequence_q: Tensor

    @property
    def tokens(self) -> tuple[int, int]:
        """Number of queries and of keys."""
        return sum(self.lengths_q), sum(self.lengths_kv)

    @property
    def at_q(self) -> Tensor:
        """int64 [tokens], a query's index among the tokens of its sequence."""
        at = torch.arange(self.sequence_q.shape[0], device=self.sequence_q.device)
        return at - self.cu_seqlens_q.long()[self.sequence_q]

    @property
    def longest(self) -> tuple[int, int]:
        """Length of the longest sequence on either side, at least 1."""
        return max((1, *self.lengths_q)), max((1, *self.lengths_kv))

    def queries(self, tensor: Tensor) -> Tensor:
        """A stored q, out or dout as [tokens, H, D]."""
        return _pick(tensor, self.problem, self.index_q)

    def keys(self, tensor: Tensor) -> Tensor:
        """A stored k or v as [tokens, G, D]."""
        return _pick(tensor, self.problem, self.index_kv)

    def rows(self, lse: Tensor) -> Tensor:
        """A public lse or dlse as [tokens, H]."""
        found = to_lse(lse, self.problem.layout).transpose(1, 2).flatten(0, 1)
        return found if self.index_q is None else found.index_select(0, self.index_q)

    def store_queries(self, tensor: Tensor) -> Tensor:
        """[tokens, H, D] in q's storage layout, contiguous, 0 outside every sequence."""
        return self._store(tensor, self.index_q, self.problem.seqlen_q)

    def store_keys(self, tensor: Tensor) -> Tensor:
        """[tokens, G, D] in k's storage layout, contiguous, 0 outside every sequence."""
        return self._store(tensor, self.index_kv, self.problem.seqlen_kv)

    def store_rows(self, rows: Tensor) -> Tensor:
        """[tokens, H] as [B', H, S], -inf outside every sequence."""
        count = self._rows * self.problem.seqlen_q
        found = _spread(rows, self.index_q, count, -torch.inf)
        return found.unflatten(0, (self._rows, -1)).transpose(1, 2)

    @property
    def _rows(self) -> int:
        return 1 if self.problem.layout == "thd" else self.problem.batch

    def _store(self, tensor: Tensor, index: Tensor | None, places: int) -> Tensor:
        found = _spread(tensor, index, self._rows * places, 0.0)
        return stored(found.unflatten(0, (self._rows, places)), self.problem.layout).contiguous()


def compact(problem: Problem, inputs: Inputs) -> Compact:
    """Find the tokens of a problem that has some places; waits for the device."""
    places = places_of(problem, inputs)
    extents = resolve(problem, inputs)
    index, lengths = {}, {}
    for side in ("q", "kv"):
        owner = getattr(places, f"sequence_{side}").flatten()
        found = (owner >= 0).nonzero().squeeze(1)
        lengths[side] = torch.bincount(owner[found], minlength=problem.batch)
        index[side] = None if found.numel() == owner.numel() else found
    counted = torch.stack([lengths["q"], lengths["kv"]]).tolist()
    spanned = torch.stack([extents.length_q, extents.length_kv]).tolist()
    sequence = places.sequence_q.flatten()
    return Compact(
        problem=problem,
        index_q=index["q"],
        index_kv=index["kv"],
        lengths_q=tuple(counted[0]),
        lengths_kv=tuple(counted[1]),
        cu_seqlens_q=_cumulated(lengths["q"]),
        cu_seqlens_kv=_cumulated(lengths["kv"]),
        holes=counted != spanned,
        sequence_q=sequence if index["q"] is None else sequence[index["q"]],
    )


def _cumulated(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _pick(tensor: Tensor, problem: Problem, index: Tensor | None) -> Tensor:
    found = canonical(tensor, problem.layout).flatten(0, 1)
    return found if index is None else found.index_select(0, index)


def _spread(tensor: Tensor, index: Tensor | None, count: int, fill: float) -> Tensor:
    if index is None:
        return tensor
    return tensor.new_full((count, *tensor.shape[1:]), fill).index_copy(0, index, tensor)
