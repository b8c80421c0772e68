"""xformers: memory_efficient_attention, with the mask objects that say where sequences are."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gradtruth.backends.peers.bands import (
    band_reasons,
    common_reasons,
    content_reasons,
    is_full,
)
from gradtruth.backends.peers.compact import Compact
from gradtruth.backends.peers.installed import library_on_cuda
from gradtruth.backends.peers.operands import aligned, finite_rows
from gradtruth.backends.peers.refusals import unable
from gradtruth.backends.peers.varlen import Varlen
from gradtruth.backends.protocol import Backend
from gradtruth.core.layout import canonical, stored
from gradtruth.core.problem import Problem
from gradtruth.core.support import Reason, ReasonCode
from gradtruth.core.tensors import Inputs

__all__ = ["create"]

_MODULE, _PROJECT = "xformers.ops.fmha", "xformers"
_FUNCTIONS = ("memory_efficient_attention", "memory_efficient_attention_forward_requires_grad")


def create(name: str) -> Backend:
    """The one backend of this module."""
    return Xformers(name)


class Xformers(Varlen):
    """memory_efficient_attention. xformers picks the kernel: FlashAttention or CUTLASS.

    Its masks have both corners, so the alignment is always asked for by name; a window is known below the diagonal
    of a causal mask. GQA is for inference only there.
    """

    native = None

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Against GQA, bias, windows beyond the diagonal, fp64."""
        found = library_on_cuda(device.type, (8, 0), _MODULE, _PROJECT, _FUNCTIONS)
        found += common_reasons(problem, "memory_efficient_attention")
        found += unable(problem)
        # Both corners have their masks, but the window of full tensors, which has the bottom right alone.
        corner = problem.spec.alignment
        if problem.spec.left is not None and is_full(problem):
            corner = "bottom_right"
        found += band_reasons(problem, corner, "causal windows")
        if problem.dtype == "float64":
            found.append(Reason(ReasonCode.DTYPE, "dtype is float64, up to float32 is taken"))
        step = 4 if problem.dtype == "float32" else 8
        for name in ("head_dim_qk", "head_dim_v"):
            value = getattr(problem, name)
            if value % step:
                text = f"{name} is {value}, a multiple of {step} is needed"
                found.append(Reason(ReasonCode.HEAD_DIM, text))
        if problem.group_size > 1:
            text = f"{problem.group_size} query heads share a KV head, only 1 where gradients are wanted"
            found.append(Reason(ReasonCode.HEADS, text))
        return found

    def content(self, tokens: Compact) -> list[Reason]:
        """Holes that shift the diagonal."""
        return content_reasons(tokens, tokens.problem.spec.alignment)

    def attend(self, problem: Problem, inputs: Inputs, tokens: Compact) -> tuple[Tensor, Tensor]:
        """One batch entry with all tokens and a block diagonal mask."""
        q, k, v = (
            aligned(x).unsqueeze(0)
            for x in (tokens.queries(inputs.q), tokens.keys(inputs.k), tokens.keys(inputs.v))
        )
        mask = _block_diagonal(problem, tokens, q.device)
        out, lse = _call(problem, (q, k, v), mask)
        if lse.shape[0] == 1 and lse.shape[-1] >= q.shape[1]:
            rows = lse[0, :, : q.shape[1]].t()
        else:  # [B, H, longest]: one row of storage per sequence
            rows = lse.transpose(1, 2)[tokens.sequence_q, tokens.at_q]
        return out.squeeze(0), finite_rows(rows)

    def attend_dense(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """[B, S, H, D]."""
        layout = problem.layout
        q, k, v = (aligned(canonical(x, layout)) for x in (inputs.q, inputs.k, inputs.v))
        out, lse = _call(problem, (q, k, v), _dense(problem))
        return stored(out, layout).contiguous(), finite_rows(lse[:, :, : problem.seqlen_q])


def _fmha() -> ModuleType:
    from xformers.ops import fmha

    return fmha


def _call(
    problem: Problem, tensors: tuple[Tensor, Tensor, Tensor], mask: Any
) -> tuple[Tensor, Tensor]:
    """out, recorded where gradients are wanted, and the lse that its forward computes for the backward."""
    fmha = _fmha()
    out = fmha.memory_efficient_attention(*tensors, attn_bias=mask, scale=problem.scale)
    with torch.no_grad():
        _, lse = fmha.memory_efficient_attention_forward_requires_grad(
            *(x.detach() for x in tensors), attn_bias=mask, scale=problem.scale
        )
    return out, lse


def _dense(problem: Problem) -> Any:
    """The mask object for full tensors."""
    masks, spec = _fmha().attn_bias, problem.spec
    if spec.band.open:
        return None
    if spec.left is not None:
        return masks.LowerTriangularFromBottomRightLocalAttentionMask(spec.left + 1)
    if spec.alignment == "top_left":
        return masks.LowerTriangularMask()
    return masks.LowerTriangularFromBottomRightMask()


def _block_diagonal(problem: Problem, tokens: Compact, device: torch.device) -> Any:
    """The mask object for tokens."""
    spec = problem.spec
    mask = _fmha().attn_bias.BlockDiagonalMask.from_seqlens(
        list(tokens.lengths_q), list(tokens.lengths_kv), device=device
    )
    top_left = spec.alignment == "top_left"
    if spec.band.open:
        return mask
    if spec.left is None:
        return mask.make_causal() if top_left else mask.make_causal_from_bottomright()
    if top_left:
        return mask.make_local_attention(spec.left + 1)
    return mask.make_local_attention_from_bottomright(spec.left + 1)
