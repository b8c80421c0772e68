"""Fewer channels: the first ones of queries and keys, and of values."""

from __future__ import annotations

from torch import Tensor

from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.edits.edited import edited

__all__ = ["channels"]


def channels(case: Case, head_dim_qk: int | None = None, head_dim_v: int | None = None) -> Case:
    """The first channels of q and k, and of v and dout.

    Scores lose the terms of the others; the scale stays what it was, so it is written into the Spec. Where q and k
    keep all channels, lse stays, and so do the remaining channels of out and dv.

    Args:
        case: any.
        head_dim_qk: how many of D; None is all.
        head_dim_v: how many of Dv; None is all.

    Raises:
        InvalidProblem: a number outside [1, D] or [1, Dv].
    """
    problem, inputs = case.problem, case.inputs
    taken: dict[str, Tensor | None] = {}
    for name, count, size, roles in (
        ("head_dim_qk", head_dim_qk, problem.head_dim_qk, ("q", "k")),
        ("head_dim_v", head_dim_v, problem.head_dim_v, ("v", "dout")),
    ):
        if count is None:
            continue
        if not 1 <= count <= size:
            raise InvalidProblem(f"{name} is {count}, expected a number in [1, {size}]")
        for role in roles:
            tensor = case.dout if role == "dout" else getattr(inputs, role)
            taken[role] = tensor[..., :count].contiguous()
    step = f"channels {head_dim_qk or problem.head_dim_qk}/{head_dim_v or problem.head_dim_v}"
    fewer = head_dim_qk is not None and head_dim_qk < problem.head_dim_qk
    scale = problem.scale if fewer else problem.spec.scale
    return edited(case, taken, step, scale=scale)
