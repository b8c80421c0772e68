"""Calls of fused_attn_fwd and fused_attn_bwd by name, on dense bshd tensors unless told otherwise."""

from __future__ import annotations

import enum
from typing import Any

import torch
from tests.module_cases import B, H, S, cu
from torch import Tensor

import gradtruth.compat.transformer_engine as te

BACKEND = te.FusedAttnBackend["F16_arbitrary_seqlen"]
BIAS = torch.linspace(-2, 2, H * S * S, dtype=torch.float64).sin().view(1, H, S, S)


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """fused_attn_fwd on dense bshd tensors, or what the options say."""
    options = {"qkv_layout": "bshd_bshd_bshd", "attn_mask_type": "causal", **options}
    given = {"cu_seqlens_q": cu(*[S] * B), "cu_seqlens_kv": cu(*[S] * B), "is_training": True}
    given |= {"max_seqlen_q": S, "max_seqlen_kv": S, "fused_attention_backend": BACKEND}
    given["fake_dtype"] = getattr(q, "dtype", None)
    return te.fused_attn_fwd(**{**given, "q": q, "k": k, "v": v, **options})


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, d_o: Tensor, aux: list, **options: Any
) -> list:
    options = {"qkv_layout": "bshd_bshd_bshd", "attn_mask_type": "causal", **options}
    given = {"cu_seqlens_q": cu(*[S] * B), "cu_seqlens_kv": cu(*[S] * B), "aux_ctx_tensors": aux}
    given |= {"max_seqlen_q": S, "max_seqlen_kv": S, "fused_attention_backend": BACKEND}
    given["fake_dtype"] = getattr(q, "dtype", None)
    return te.fused_attn_bwd(**{**given, "q": q, "k": k, "v": v, "o": o, "d_o": d_o, **options})


class Foreign(enum.IntEnum):
    """As TransformerEngine's enums look from outside."""

    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2
    kBFloat16 = 5  # noqa: N815
