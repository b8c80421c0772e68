"""Stored tensors as the [B', H, S, D] views that torch's attention takes, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtruth.core.layout import empty_like_query, empty_lse
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Layout
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = [
    "empty_forward",
    "empty_grads",
    "from_heads_first",
    "from_lse",
    "has_no_elements",
    "heads_first",
    "to_lse",
]


def heads_first(tensor: Tensor, layout: Layout) -> Tensor:
    """View a stored q, k, v, out or dout as [B', H, S, D]; B' is 1 for thd."""
    if layout == "bshd":
        return tensor.transpose(1, 2)
    if layout == "sbhd":
        return tensor.permute(1, 2, 0, 3)
    return tensor.transpose(0, 1).unsqueeze(0)


def from_heads_first(tensor: Tensor, layout: Layout) -> Tensor:
    """The inverse of ``heads_first``, contiguous: a view where a kernel already stored it so."""
    if layout == "bshd":
        return tensor.transpose(1, 2).contiguous()
    if layout == "sbhd":
        return tensor.permute(2, 0, 1, 3).contiguous()
    return tensor.squeeze(0).transpose(0, 1).contiguous()


def from_lse(lse: Tensor, layout: Layout) -> Tensor:
    """lse [B', H, S] in its public form: contiguous, for thd [tokens, H] stored head-major."""
    lse = lse.contiguous()
    return lse.squeeze(0).t() if layout == "thd" else lse


def to_lse(lse: Tensor, layout: Layout) -> Tensor:
    """A public lse or dlse as [B', H, S]."""
    return lse.t().unsqueeze(0) if layout == "thd" else lse


def has_no_elements(problem: Problem, inputs: Inputs) -> bool:
    """True when no query or no key exists, so that there is nothing to compute."""
    return (
        problem.batch == 0
        or inputs.q.numel() == 0
        or inputs.k.numel() == 0
        or inputs.v.numel() == 0
    )


def empty_forward(problem: Problem, inputs: Inputs) -> Forward:
    """The result where no query sees a key because none exists: out 0, lse -inf."""
    out = empty_like_query(inputs.q, problem.head_dim_v).zero_()
    lse = empty_lse(inputs.q, problem.spec.layout).fill_(-torch.inf)
    max_logit = None
    if problem.spec.max_logit:
        max_logit = torch.full((problem.num_heads,), -torch.inf, device=out.device)
    return Forward(out=out, lse=lse, max_logit=max_logit)


def empty_grads(inputs: Inputs, wanted: Wanted) -> Grads:
    """The gradients of ``empty_forward``: zeros."""

    def zero(tensor: Tensor | None, want: bool) -> Tensor | None:  # noqa: FBT001 - a flag of Wanted
        if tensor is None or not want:
            return None
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    return Grads(
        dq=zero(inputs.q, wanted.dq),
        dk=zero(inputs.k, wanted.dk),
        dv=zero(inputs.v, wanted.dv),
        dbias=zero(inputs.bias, wanted.dbias),
        dsoftmax_offset=zero(inputs.softmax_offset, wanted.dsoftmax_offset),
    )
