"""Exact probes: a few query rows and key columns of one (sequence, KV head), computed in fp64 and compared.

A query row (out, lse, dq) costs O(T D). A key column (dk, dv) costs O(S D) where out and lse of the whole are known;
without an lse the rows that it is summed over must be computed too, O(S T D) for this one head. So both can be had
during training, where the whole oracle cannot.

The verdict is that of ``truth.budget`` on these rows: the oracle's own bound and spread with the same four tests,
without a yardstick, and with ``part._TOLERANCE`` times the rounding that they predict instead. ``docs/watch.md`` says
how much of this healthy attention uses.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Inputs
from gradtruth.verify.cases.case import Case
from gradtruth.verify.probes.part import Part
from gradtruth.verify.probes.spots import Found, Spot, spots, whole
from gradtruth.verify.suite.inputs import Sample
from gradtruth.verify.truth.budget import Row
from gradtruth.verify.truth.scoring import places

__all__ = ["Found", "Spot", "probe", "probe_spot", "spots", "whole"]


def probe(
    case: Case | Sample,
    tensors: Mapping[str, Tensor],
    *,
    rows: int = 8,
    columns: int = 8,
    heads: int | None = None,
    seed: int = 0,
) -> tuple[Row, ...]:
    """Probe one forward and backward.

    Args:
        case: what was computed, with dout and dlse.
        tensors: out, lse, dq, dk, dv by name, as far as there are any, in the problem's layout.
        rows, columns: how many queries and keys per (sequence, KV head).
        heads: how many (sequence, KV head), drawn at random; None is all.
        seed: of the drawing; the global generators are left alone.

    Returns:
        One row per tensor and head that was looked at. Wrong are those with ``passed`` False.

    Raises:
        InvalidProblem: rows, columns or heads is negative.
    """
    problem, inputs = case.problem, case.inputs
    where = places(problem, inputs)
    drawn = spots(problem, where, rows=rows, columns=columns, heads=heads, seed=seed)
    found = Found.of(tensors)
    return tuple(
        row
        for spot in drawn
        for row in probe_spot(problem, inputs, found, (case.dout, case.dlse), spot)
    )


def probe_spot(
    problem: Problem,
    inputs: Inputs,
    found: Found,
    upstream: tuple[Tensor | None, Tensor | None],
    spot: Spot,
) -> list[Row]:
    """Compare the rows and columns of one spot.

    Args:
        problem, inputs: the call's; with dropout its mask must be the library's own.
        found: what it computed.
        upstream: dout and dlse; with neither, only the forward is looked at.
        spot: where.

    Returns:
        One row per (tensor, query head of the KV head), of dk and dv one; heads are numbered as in the problem.
    """
    with torch.no_grad():
        part = Part(problem, inputs, found, upstream, spot)
        judged = part.judged({**part.rows(), **part.columns()})
        if any(not row.passed for name in ("out", "lse") for row in judged.get(name, ())):
            judged |= part.from_a_wrong_out(judged.get("dq", []))
        return [row for rows in judged.values() for row in rows]
