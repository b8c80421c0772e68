"""Spots: where a probe looks, and what an attention returned there."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gradtruth.core.problem import Problem
from gradtruth.errors import InvalidProblem
from gradtruth.verify.truth.scoring import Place

__all__ = ["Found", "Spot", "spots", "whole"]


@dataclass(frozen=True, slots=True)
class Spot:
    """Where to look.

    Attributes:
        sequence, group: the sequence and the KV head.
        rows: indices i of queries within the sequence, for out, lse and dq.
        columns: indices j of keys within the sequence, for dk and dv.
    """

    sequence: int
    group: int
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an attention returned, in its problem's layout; None where it is not known.

    Attributes:
        out, lse: of the forward.
        dq, dk, dv: of the backward.
        coarse: it keeps scores and sums in the dtype of its inputs, which the contract does not allow and eager
            attention does.
    """

    out: Tensor | None = None
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    coarse: bool = False

    @staticmethod
    def of(tensors: Mapping[str, Tensor], *, coarse: bool = False) -> Found:
        """From tensors by name; other names are passed over."""
        known = ("out", "lse", "dq", "dk", "dv")
        return Found(**{n: x for n, x in tensors.items() if n in known}, coarse=coarse)


def spots(
    problem: Problem,
    where: Sequence[Place],
    *,
    rows: int,
    columns: int,
    heads: int | None = None,
    seed: int | str = 0,
) -> list[Spot]:
    """Places drawn at random, one row of each of ``rows`` equal stretches of a sequence; columns likewise.

    Args:
        problem: what was computed.
        where: of its sequences, from ``truth.scoring.places``.
        rows, columns: how many per (sequence, KV head).
        heads: how many (sequence, KV head) of those with a query or a key; None is all.
        seed: of the drawing.

    Raises:
        InvalidProblem: a number is negative.
    """
    for name, value in (("rows", rows), ("columns", columns), ("heads", heads)):
        if value is not None and value < 0:
            raise InvalidProblem(f"{name} is {value}, expected 0 or more")
    drawing = random.Random(seed)
    pairs = [
        (n, g)
        for n, place in enumerate(where)
        if place.length_q or place.length_kv
        for g in range(problem.num_gqa_groups)
    ]
    if heads is not None and heads < len(pairs):
        pairs = sorted(drawing.sample(pairs, heads))
    return [
        Spot(n, g, _drawn(drawing, where[n].length_q, rows), _drawn(drawing, where[n].length_kv, columns))
        for n, g in pairs
    ]  # fmt: skip


def whole(where: Sequence[Place], sequence: int, group: int) -> Spot:
    """All rows and columns of one (sequence, KV head)."""
    place = where[sequence]
    return Spot(sequence, group, tuple(range(place.length_q)), tuple(range(place.length_kv)))


def _drawn(drawing: random.Random, length: int, count: int) -> tuple[int, ...]:
    count = min(count, length)
    return tuple(
        drawing.randrange(n * length // count, (n + 1) * length // count) for n in range(count)
    )
