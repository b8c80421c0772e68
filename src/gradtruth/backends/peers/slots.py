"""Slots: lengths and storage offsets apart, the form of kernels that leave gaps between thd sequences alone.

TransformerEngine and cuDNN take it. What they leave undefined outside every sequence gets the contract's form here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradtruth.backends.peers.places import Places, places_of
from gradtruth.core.extents import resolve
from gradtruth.core.layout import canonical, stored
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Inputs

__all__ = ["Slots", "slots_of"]


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Where the sequences of a problem lie.

    Attributes:
        problem: whose sequences they are.
        places: its storage places, numbered.
        length_q, length_kv: int32 [B], actual lengths.
        offset_q, offset_kv: int32 [B + 1], thd storage offsets, the last one the end; all 0 for dense layouts.
        longest_q, longest_kv: no sequence is longer, at least 1: the storage of a dense layout; for thd the
            caller's max_seqlen or else the longest slot, which is read from the device.
    """

    problem: Problem
    places: Places
    length_q: Tensor
    length_kv: Tensor
    offset_q: Tensor
    offset_kv: Tensor
    longest_q: int
    longest_kv: int

    @property
    def cu_seqlens_q(self) -> Tensor:
        """int32 [B + 1], actual lengths cumulated."""
        return pad(self.length_q.cumsum(0), (1, 0)).int()

    @property
    def cu_seqlens_kv(self) -> Tensor:
        """int32 [B + 1], actual lengths cumulated."""
        return pad(self.length_kv.cumsum(0), (1, 0)).int()

    @cached_property
    def outside(self) -> Tensor:
        """bool [B', S], True at query places that belong to no sequence."""
        return self.places.sequence_q < 0

    def cleared(self, tensor: Tensor) -> Tensor:
        """A stored out with 0 outside every sequence, as a forward that fills its output first leaves it."""
        if not self.problem.spec.ragged:
            return tensor
        layout = self.problem.layout
        hidden = self.outside[:, :, None, None]
        return stored(canonical(tensor, layout).masked_fill(hidden, 0.0), layout).contiguous()

    def lse_of(self, stats: Tensor) -> Tensor:
        """The public lse of a kernel's statistics, -inf outside every sequence.

        Args:
            stats: fp32 [B, H, longest, 1], or for thd also [tokens, H, 1].
        """
        rows = self.rows_of(stats)
        rows = torch.where(self.outside[:, None], -torch.inf, rows)
        return rows.squeeze(0).t() if self.problem.layout == "thd" else rows

    def rows_of(self, stats: Tensor) -> Tensor:
        """A kernel's statistics as [B', H, S], contiguous: whatever it left there outside every sequence."""
        rows = stats.squeeze(-1)
        if self.problem.layout != "thd":
            return rows.contiguous()
        if rows.dim() == 2:
            return rows.t().contiguous().unsqueeze(0)
        sequence, at = self._indices()
        return rows[sequence, :, at].t().contiguous().unsqueeze(0)

    def stats_of(self, lse: Tensor, *, by_sequence: bool = False) -> Tensor:
        """The inverse of ``lse_of``; 0 outside every sequence, where nothing may look.

        Args:
            lse: a public one, made here or elsewhere.
            by_sequence: for thd the form [B, H, longest, 1].

        Returns:
            fp32, contiguous: [B, H, S, 1], or [tokens, H, 1] for thd.
        """
        if self.problem.layout != "thd":
            return torch.where(self.outside[:, None], 0.0, lse).float().contiguous().unsqueeze(-1)
        rows = torch.where(self.outside.t(), 0.0, lse).float().contiguous()
        if not by_sequence:
            return rows.unsqueeze(-1)
        problem = self.problem
        stats = rows.new_zeros(problem.batch, problem.num_heads, self.longest_q)
        inside = ~self.outside[0]
        sequence, at = self._indices()
        stats[sequence[inside], :, at[inside]] = rows[inside]
        return stats.unsqueeze(-1)

    def _indices(self) -> tuple[Tensor, Tensor]:
        """Sequence and place in it of every token; any legal ones outside."""
        sequence, at = self.places.sequence_q[0], self.places.i[0]
        return sequence.clamp(min=0), torch.where(self.outside[0], 0, at)


def slots_of(problem: Problem, inputs: Inputs) -> Slots:
    """Find where the sequences of a problem with elements lie."""
    extents = resolve(problem, inputs)
    offset_q, longest_q = _storage(problem, inputs, "q", extents.start_q)
    offset_kv, longest_kv = _storage(problem, inputs, "kv", extents.start_kv)
    return Slots(
        problem=problem,
        places=places_of(problem, inputs),
        length_q=extents.length_q.int(),
        length_kv=extents.length_kv.int(),
        offset_q=offset_q,
        offset_kv=offset_kv,
        longest_q=longest_q,
        longest_kv=longest_kv,
    )


def _storage(problem: Problem, inputs: Inputs, side: str, start: Tensor) -> tuple[Tensor, int]:
    """Offsets and the longest slot of one side."""
    places: int = getattr(problem, f"seqlen_{side}")
    if problem.layout != "thd":
        return pad(torch.zeros_like(start), (0, 1)).int(), max(1, places)
    padded = getattr(inputs, f"cu_seqlens_{side}_padded")
    end = (getattr(inputs, f"cu_seqlens_{side}") if padded is None else padded)[-1:]
    offset = torch.cat([start, end.clamp(0, places)]).int()
    bound: int | None = getattr(problem, f"max_seqlen_{side}")
    longest = int(offset.diff().max()) if bound is None else min(bound, places)
    return offset, max(1, longest)
