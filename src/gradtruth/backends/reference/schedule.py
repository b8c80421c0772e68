"""How many queries the reference works on at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradtruth.core.problem import Problem

__all__ = ["Schedule", "schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What changes speed and memory, and nothing else but last bits.

    Attributes:
        rows: queries in a block, at most.
        scores: scores in a block, H * rows * T, at most (but for a single row).
    """

    rows: int
    scores: int

    def rows_for(self, heads: int, length_kv: int) -> int:
        """Queries in a block of a sequence with ``length_kv`` keys; the rest of the batch plays no part."""
        return max(1, min(self.rows, self.scores // max(1, heads * length_kv)))


def schedule(problem: Problem, device: torch.device) -> Schedule:
    """A pure function of its arguments; uses no number of sequences, so that bits do not depend on the batch."""
    if device.type == "cpu":
        return Schedule(rows=64, scores=1 << 23)
    return Schedule(rows=512, scores=1 << 27)
