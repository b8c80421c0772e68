"""Where in a tensor its errors are: a small picture of (sequence, head) by position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Inputs
from gradtruth.verify.findings import ErrorMap
from gradtruth.verify.truth.scoring import places

__all__ = ["error_map"]

_COLUMNS = 64
_ROWS = 64
_BY_QUERY = ("out", "dq", "lse")
_BY_KEY = ("dk", "dv")


def error_map(
    problem: Problem, inputs: Inputs, name: str, found: Tensor, expected: Tensor
) -> ErrorMap | None:
    """The picture of one tensor; None for tensors without positions.

    Args:
        problem: what was computed.
        inputs: say where the sequences lie.
        name: of the tensor: out, lse, dq, dk or dv.
        found, expected: in the problem's layout.
    """
    if name not in (*_BY_QUERY, *_BY_KEY) or not found.numel():
        return None
    where = places(problem, inputs)
    sides = [place.keys if name in _BY_KEY else place.queries for place in where]
    longest = max((side.stop - side.start for side in sides), default=0)
    if longest == 0:
        return None
    step = math.ceil(longest / _COLUMNS)
    rows: list[tuple[str, tuple[float, ...]]] = []
    got, want = (_by_head(problem, name, x) for x in (found, expected))
    size = float(want.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()) or 1.0
    error = torch.where(got == want, 0.0, got - want).abs().nan_to_num(math.inf, math.inf, math.inf)
    for n, side in enumerate(sides):
        row = error[0 if problem.layout == "thd" else n, :, side]
        for head, line in enumerate(row):
            parts = line.split(step)
            values = tuple(
                float(part.square().mean().sqrt()) / size for part in parts if part.numel()
            )
            rows.append((f"n{n},h{head}", values))
    kept = sorted(range(len(rows)), key=lambda at: -max(rows[at][1], default=0.0))[:_ROWS]
    shown = [rows[at] for at in sorted(kept)]
    return ErrorMap(
        labels=tuple(label for label, _ in shown),
        step=step,
        values=tuple(values for _, values in shown),
        left_out=len(rows) - len(shown),
    )


def _by_head(problem: Problem, name: str, tensor: Tensor) -> Tensor:
    """fp64 [B', heads, L, dims]."""
    if name == "lse":
        return canonical_lse(tensor, problem.layout).double().unsqueeze(-1)
    return canonical(tensor, problem.spec.layout).double().transpose(1, 2)
