"""An edited case: some tensors and some fields of the Spec replaced, and the step written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case

__all__ = ["edited", "forbid_dropout", "forbid_tiles"]


def edited(
    case: Case,
    tensors: Mapping[str, Tensor | None],
    step: str,
    *,
    max_seqlen: tuple[int | None, int | None] | None = None,
    **spec: Any,
) -> Case:
    """The case with something replaced; q, k and v count as separate tensors from then on.

    Args:
        case: stays as it is.
        tensors: names of inputs, "dout" or "dlse" to their new tensors; None takes one away.
        step: what was done, for ``history``.
        max_seqlen: bounds on the lengths; the case's own by default.
        spec: fields of the new Spec.

    Raises:
        InvalidProblem: what comes out is no problem.
    """
    changed = dict(tensors)
    dout, dlse = changed.pop("dout", case.dout), changed.pop("dlse", case.dlse)
    problem = case.problem
    made = Case.of(
        replace(problem.spec, **({"packing": "separate"} | spec)),
        replace(case.inputs, **changed),
        case.dout if dout is None else dout,
        dlse,
        max_seqlen=max_seqlen or (problem.max_seqlen_q, problem.max_seqlen_kv),
        provenance=case.provenance,
    )
    return replace(made, history=(*case.history, step))


def forbid_dropout(case: Case, what: str) -> None:
    """Refuse an edit that gives other numbers to what dropout's keep mask goes by.

    Raises:
        InvalidProblem: the case has dropout that is neither 0 nor 1.
    """
    p = case.problem.spec.dropout_p
    if 0.0 < p < 1.0:
        raise InvalidProblem(f"dropout_p is {p}, expected 0 or 1: its keep mask goes by {what}")


def forbid_tiles(case: Case) -> None:
    """Refuse a tile, whose extents say where it was cut from.

    Raises:
        InvalidProblem: the case is a tile.
    """
    if case.problem.spec.lengths == "extents":
        raise InvalidProblem("lengths is 'extents', expected a case that is not a tile")
