"""The flash kernel of torch's SDPA on the CPU."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gradtruth.backends.peers.places import additive_mask, places_of, plain_mask
from gradtruth.backends.peers.refusals import missing_operators, unable
from gradtruth.backends.peers.views import from_heads_first, from_lse, heads_first, to_lse
from gradtruth.core.precision import full_precision
from gradtruth.core.problem import Problem
from gradtruth.core.support import DEFAULT_CLAIMS, Claims, Reason, ReasonCode
from gradtruth.core.tensors import Forward, Inputs

__all__ = ["FlashCpu"]

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
# Older kernels read k and v at the query head's index, past their end.
_GQA_SINCE = (2, 13)


class FlashCpu:
    """aten::_scaled_dot_product_flash_attention_for_cpu, which blocks over queries and keys.

    bf16 and fp16 inputs are widened to fp32 and the results rounded once. The half-precision kernel itself would
    break the contract: its backward adds each block of queries to dk and dv, each block of keys to dq and each
    head of a group to dk and dv in the input dtype, and its forward takes exp to 2^-14. Where the processor has no
    half-precision products it is also slower: its forward about as fast, its backward ten times slower.

    Masks other than top-left causal are passed as an additive S x T tensor.
    """

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Against everything but plain attention under any mask, and ALiBi."""
        del device
        found = missing_operators((_FORWARD, _BACKWARD))
        found += unable(problem, (ReasonCode.ALIBI,))
        if problem.head_dim_qk != problem.head_dim_v:
            text = f"head_dim_qk is {problem.head_dim_qk} and head_dim_v {problem.head_dim_v}, they must be equal"
            found.append(Reason(ReasonCode.HEAD_DIM, text))
        if problem.group_size > 1 and torch.__version__ < _GQA_SINCE:
            text = f"{problem.group_size} query heads share a KV head in torch {torch.__version__}, 2.13 is needed"
            found.append(Reason(ReasonCode.VERSION, text))
        return found

    def claims(self, problem: Problem) -> Claims:
        """The default set without a mask tensor. With one, not shielded: hidden NaN is added to, not selected."""
        if _builtin_mask(problem) is not None:
            return DEFAULT_CLAIMS
        return Claims(
            pure=True,
            exact_zeros=True,
            deterministic=True,
            global_dropout=True,
            foreign_lse=True,
            no_sync=True,
            graph_capturable=True,
        )

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """out and lse in their public form."""
        layout = problem.spec.layout
        q, k, v = _operands(problem, inputs)
        kind = _builtin_mask(problem)
        mask = None if kind else _mask(problem, inputs)
        with full_precision(problem, q.device):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, kind == "causal", attn_mask=mask, scale=problem.scale
            )
        if mask is not None:
            # The kernel's lse of a row without a visible key is 0.
            lse = torch.where((mask > -torch.inf).any(-1), lse, -torch.inf)
        return from_heads_first(out.to(inputs.q.dtype), layout), from_lse(lse, layout)

    def backward(
        self, problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the storage layout."""
        layout, dtype = problem.spec.layout, problem.accumulate_dtype
        q, k, v = _operands(problem, inputs)
        out, dout = (_for_products(heads_first(x, layout).to(dtype)) for x in (forward.out, dout))
        lse = to_lse(forward.lse, layout)
        kind = _builtin_mask(problem)
        mask = None
        if kind is None:
            mask = _mask(problem, inputs)
            # P of a row without a visible key is exp(-inf - lse) and must be 0, whatever was handed in.
            seen = (mask > -torch.inf).any(-1)
            lse = torch.where(seen, lse, 0.0)
            out, dout = (torch.where(seen[..., None], x, 0.0) for x in (out, dout))
        with full_precision(problem, q.device):
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, kind == "causal", attn_mask=mask, scale=problem.scale
            )
        dq, dk, dv = (from_heads_first(grad.to(inputs.q.dtype), layout) for grad in grads)
        return dq, dk, dv


def _builtin_mask(problem: Problem) -> Literal["none", "causal"] | None:
    """The mask that the kernel makes itself, None where a tensor is needed."""
    kind = plain_mask(problem)
    # The kernel hides by -inf before it multiplies by the scale.
    return None if kind == "causal" and problem.scale <= 0 else kind


def _operands(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [B', H, S, D] in the accumulation dtype, with strides that matrix products take."""
    layout, dtype = problem.spec.layout, problem.accumulate_dtype
    q, k, v = (
        _for_products(heads_first(x, layout).to(dtype)) for x in (inputs.q, inputs.k, inputs.v)
    )
    return q, k, v


def _for_products(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy when its rows are not contiguous or overlap."""
    row, element = tensor.stride()[2:]
    columns = tensor.shape[3]
    if (element == 1 or columns == 1) and row >= columns:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _mask(problem: Problem, inputs: Inputs) -> Tensor:
    """[B', 1|H, S, T], contiguous."""
    return additive_mask(problem, inputs, places_of(problem, inputs), None).contiguous()
