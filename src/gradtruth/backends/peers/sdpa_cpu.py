"""The flash kernel of torch's SDPA on the CPU."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

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
_HALVES = ("bfloat16", "float16")
_LARGE = 1 << 15  # elements: 128 KiB, from which glibc asks the system for memory
_AS_IT_IS = nullcontext()
# Kernels of some older releases read k and v at the query head's index, past their end; 2.13 was looked at.
_GQA_SINCE = (2, 13)


class FlashCpu:
    """aten::_scaled_dot_product_flash_attention_for_cpu, which blocks over queries and keys.

    bf16 and fp16 inputs are widened to fp32 and the results rounded once. The half-precision kernel itself would
    break the contract: its backward adds each block of queries to dk and dv, each block of keys to dq and each
    head of a group to dk and dv in the input dtype, and its forward takes exp to 2^-14. Where the processor has no
    half-precision products it is also slower: its forward about as fast, its backward ten times slower.

    In fp32 and fp64 the kernel gets a power of two as scale and q the rest of it, a copy unless head_dim is a
    power of four: the kernel multiplies by the scale after the product in its forward and within it in its
    backward, so that with another scale P of the backward is not quite P of the forward. Its scale is always
    positive, for it hides by -inf before it scales.

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
        if problem.group_size > 1 and torch.__version__ < _GQA_SINCE:  # type: ignore[operator]
            text = f"{problem.group_size} query heads share a KV head in torch {torch.__version__}, 2.13 is needed"
            found.append(Reason(ReasonCode.VERSION, text))
        return found

    def claims(self, problem: Problem) -> Claims:
        """The default set without a mask tensor. With one, not shielded: hidden NaN is added to, not selected."""
        if plain_mask(problem) is not None:
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
        factor, power = _split(problem)
        q, k, v = _operands(problem, inputs, factor)
        kind = plain_mask(problem)
        mask = None if kind else _mask(problem, inputs)
        with _precision(problem, q.device):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, kind == "causal", attn_mask=mask, scale=power
            )
        if mask is not None:
            # The kernel's lse of a row without a visible key is 0.
            lse = torch.where((mask > -torch.inf).any(-1), lse, -torch.inf)
        return from_heads_first(_as(out, inputs.q.dtype), layout), from_lse(lse, layout)

    def backward(
        self, problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the storage layout."""
        layout, given, wide = problem.spec.layout, inputs.q.dtype, problem.accumulate_dtype
        factor, power = _split(problem)
        q, k, v = _operands(problem, inputs, factor)
        out = _for_products(_as(heads_first(forward.out, layout), wide))
        dout = _for_products(_as(heads_first(dout, layout), wide))
        lse = to_lse(forward.lse, layout)
        kind = plain_mask(problem)
        mask = None
        if kind is None:
            mask = _mask(problem, inputs)
            # P of a row without a visible key is exp(-inf - lse) and must be 0, whatever was handed in.
            seen = (mask > -torch.inf).any(-1)
            lse = torch.where(seen, lse, 0.0)
            out, dout = (torch.where(seen[..., None], x, 0.0) for x in (out, dout))
        with _precision(problem, q.device):
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, kind == "causal", attn_mask=mask, scale=power
            )
        if factor != 1.0:
            dq = dq * factor
        return (
            from_heads_first(_as(dq, given), layout),
            from_heads_first(_as(dk, given), layout),
            from_heads_first(_as(dv, given), layout),
        )


def _precision(problem: Problem, device: torch.device) -> AbstractContextManager[None]:
    """full_precision, or nothing where it would change nothing: the operators do not know autocast."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    exact = matmul.fp32_precision in ("ieee", "none")
    return _AS_IT_IS if exact else full_precision(problem, device)


def _split(problem: Problem) -> tuple[float, float]:
    """The scale as a factor for q, which has the sign, and a positive scale for the kernel."""
    scale = problem.scale
    if problem.dtype in _HALVES:
        # Products of halves are exact in fp32, and would not be with a q that was rounded again.
        return (1.0, scale) if scale > 0 else (-1.0 if scale else 0.0, -scale or 1.0)
    mantissa, exponent = math.frexp(scale)
    return 2.0 * mantissa, 2.0 ** (exponent - 1)


def _operands(problem: Problem, inputs: Inputs, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """factor * q, k, v as [B', H, S, D] in the accumulation dtype, rows contiguous."""
    layout = problem.spec.layout
    q, k, v = inputs.q, inputs.k, inputs.v
    if problem.dtype in _HALVES:
        q, k, v = _widened(q, k, v)
    q, k, v = heads_first(q, layout), heads_first(k, layout), heads_first(v, layout)
    if factor != 1.0:
        q = q * factor
    return _for_products(q), _for_products(k), _for_products(v)


def _widened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 copies, in one piece of memory where they are large.

    In several pieces the allocator of the C library returns them to the system after every call, and to get them
    back page by page costs more than the copy.
    """
    sizes = [q.numel(), k.numel(), v.numel()]
    if max(sizes) < _LARGE:
        return q.float(), k.float(), v.float()
    memory = torch.empty(sum(sizes), dtype=torch.float32, device=q.device)
    places = memory.split(sizes)
    q, k, v = (place.view(x.shape).copy_(x) for place, x in zip(places, (q, k, v), strict=True))
    return q, k, v


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # tensor.to() takes longer to find that there is nothing to do.
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _for_products(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy when its rows are not contiguous, which the kernel takes for granted."""
    if tensor.stride(3) == 1 or tensor.shape[3] == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _mask(problem: Problem, inputs: Inputs) -> Tensor:
    """[B', 1|H, S, T], contiguous."""
    return additive_mask(problem, inputs, places_of(problem, inputs), None).contiguous()
