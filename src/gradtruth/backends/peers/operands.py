"""What flash kernels want of their operands, and how their lse differs from the contract's."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtruth.core.problem import Problem
from gradtruth.core.support import Reason, ReasonCode

__all__ = ["aligned", "finite_rows", "halves_only", "head_dims", "infinite_rows"]

_HALVES = ("bfloat16", "float16")


def halves_only(problem: Problem) -> list[Reason]:
    """Against fp32 and fp64."""
    if problem.dtype in _HALVES:
        return []
    text = f"dtype is {problem.dtype}, only bfloat16 and float16 are taken"
    return [Reason(ReasonCode.DTYPE, text)]


def head_dims(problem: Problem, step: int, limit: int, *, equal: bool) -> list[Reason]:
    """Against head dims that are no multiple of a step, above a limit, or unequal where they must be equal."""
    found = []
    for name in ("head_dim_qk", "head_dim_v"):
        value = getattr(problem, name)
        if value % step or value > limit:
            text = f"{name} is {value}, a multiple of {step} up to {limit} is needed"
            found.append(Reason(ReasonCode.HEAD_DIM, text))
    if equal and problem.head_dim_qk != problem.head_dim_v:
        text = f"head_dim_qk is {problem.head_dim_qk} and head_dim_v {problem.head_dim_v}, they must be equal"
        found.append(Reason(ReasonCode.HEAD_DIM, text))
    return found


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where a row does not start at a multiple of 16 bytes.

    Vector loads take that for granted, and kernels check the last stride only.
    """
    item = tensor.element_size()
    outer = tensor.stride()[:-1]
    fits = tensor.data_ptr() % 16 == 0 and all(s and s * item % 16 == 0 for s in outer)
    if tensor.stride(-1) == 1 and fits:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def finite_rows(lse: Tensor) -> Tensor:
    """lse with -inf where FlashAttention 2 writes +inf: in rows without a visible key."""
    return torch.where(lse == torch.inf, -torch.inf, lse)


def infinite_rows(lse: Tensor) -> Tensor:
    """The inverse: exp(x - inf) is 0, where exp(-inf + inf) would be NaN."""
    return torch.where(lse == -torch.inf, torch.inf, lse)
