"""Reasons that several peers share, each with the value that was asked for and the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from gradtruth.core.problem import Problem
from gradtruth.core.support import Reason, ReasonCode

__all__ = ["missing_operators", "unable"]

_Text = Callable[[Problem], str | None]


def _dropout(problem: Problem) -> str | None:
    p = problem.spec.dropout_p
    return (
        f"dropout_p is {p:g}, and its keep mask is not the stateless Philox one; only 0"
        if p
        else None
    )


def _softcap(problem: Problem) -> str | None:
    cap = problem.spec.softcap
    return None if cap is None else f"softcap is {cap:g}, and it has none"


def _softmax(problem: Problem) -> str | None:
    softmax = problem.spec.softmax
    return (
        f"softmax_type is {softmax}, and it has no sink; only vanilla"
        if softmax != "vanilla"
        else None
    )


def _bias(problem: Problem) -> str | None:
    if problem.spec.bias == "none":
        return None
    return f"bias is {problem.spec.bias} {list(problem.bias_shape or ())}, and it returns no bias gradient"


def _alibi(problem: Problem) -> str | None:
    return "alibi_slopes are given, and it takes no bias" if problem.spec.alibi else None


def _max_logit(problem: Problem) -> str | None:
    return "max_logit is asked for, and it does not return one" if problem.spec.max_logit else None


def _lse_grad(problem: Problem) -> str | None:
    return (
        "lse may receive a gradient, and its backward takes none" if problem.spec.lse_grad else None
    )


_CHECKS: dict[ReasonCode, _Text] = {
    ReasonCode.DROPOUT: _dropout,
    ReasonCode.SOFTCAP: _softcap,
    ReasonCode.SOFTMAX: _softmax,
    ReasonCode.BIAS: _bias,
    ReasonCode.ALIBI: _alibi,
    ReasonCode.MAX_LOGIT: _max_logit,
    ReasonCode.LSE_GRAD: _lse_grad,
}


def unable(problem: Problem, able: Iterable[ReasonCode] = ()) -> list[Reason]:
    """A reason for every feature that the problem asks for and a peer does not have.

    Args:
        problem: what is to be computed.
        able: the features that the peer has.
    """
    skipped = set(able)
    return [
        Reason(code, text)
        for code, check in _CHECKS.items()
        if code not in skipped and (text := check(problem)) is not None
    ]


def missing_operators(names: Iterable[str]) -> list[Reason]:
    """A reason for every aten operator that this torch does not have."""
    return [
        Reason(ReasonCode.VERSION, f"torch {torch.__version__} has no aten::{name}")
        for name in names
        if not hasattr(torch.ops.aten, name)
    ]
