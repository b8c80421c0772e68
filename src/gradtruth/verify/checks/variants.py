"""Variants of a case: the same tensors but for a few, or under another Spec."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from gradtruth.verify.cases.case import Case

__all__ = ["variant"]


def variant(
    case: Case,
    tensors: dict[str, Tensor | None] | None = None,
    max_seqlen: tuple[int | None, int | None] | None = None,
    **spec: Any,
) -> Case:
    """The case with some tensors and some fields of its Spec replaced.

    Args:
        case: stays as it is.
        tensors: names of inputs, "dout" or "dlse" to their new tensors; None takes one away.
        max_seqlen: bounds on the lengths; the case's own by default.
        spec: fields of the new Spec. q, k and v count as separate tensors.
    """
    tensors = dict(tensors or {})
    dout = tensors.pop("dout", case.dout)
    dlse = tensors.pop("dlse", case.dlse)
    problem = case.problem
    bounds = (problem.max_seqlen_q, problem.max_seqlen_kv) if max_seqlen is None else max_seqlen
    return Case.of(
        replace(problem.spec, **({"packing": "separate"} | spec)),
        replace(case.inputs, **tensors),
        case.dout if dout is None else dout,
        dlse,
        max_seqlen=bounds,
    )
