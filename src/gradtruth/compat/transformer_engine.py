"""TransformerEngine's names: DotProductAttention, fused_attn_fwd, fused_attn_bwd and what calls to them need.

Code moves over by its imports alone: this module stands in for ``transformer_engine_torch`` (the enums), for
``transformer_engine.pytorch`` (the module), and for ``transformer_engine.pytorch.cpp_extensions.fused_attn``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from gradtruth.api import AttentionOptions, attention_backward, attention_forward
from gradtruth.compat.fused_arguments import (
    BACKWARD_NAMES,
    FORWARD_NAMES,
    Follows,
    alignment_of,
    arrangement,
    backend_of,
    bias_of,
    check_dtype,
    check_format,
    check_packable,
    lengths_of,
    named,
    packed,
    read_aux,
    refuse,
    seed_of,
    sink_of,
    without_unit,
)
from gradtruth.errors import UnsupportedProblem
from gradtruth.module import DotProductAttention

__all__ = [
    "DType",
    "DotProductAttention",
    "FusedAttnBackend",
    "NVTE_Fused_Attn_Backend",
    "TE_DType",
    "fused_attn_bwd",
    "fused_attn_fwd",
]

# ---------------------------------------------------------------- enums


class DType(Enum):
    """The members of ``transformer_engine_torch.DType`` that attention can be computed in."""

    kFloat32 = "float32"  # noqa: N815
    kFloat16 = "float16"  # noqa: N815
    kBFloat16 = "bfloat16"  # noqa: N815


class NVTE_Fused_Attn_Backend(Enum):  # noqa: N801 - TransformerEngine's spelling
    """TransformerEngine's names of cuDNN's kernels. The F16 ones mean ``backend="auto"`` here."""

    NVTE_No_Backend = -1
    NVTE_F16_max512_seqlen = 0
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


TE_DType = {
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
}
FusedAttnBackend = {member.name.removeprefix("NVTE_"): member for member in NVTE_Fused_Attn_Backend}

# What is left alone follows qkv_layout.
_SBHD = Follows("sbhd")
_SBH3D = Follows("sbh3d")

# ---------------------------------------------------------------- the forward


def fused_attn_fwd(
    is_training: bool,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fake_dtype: Any,
    fused_attention_backend: Any,
    attn_bias: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    page_table_k: Tensor | None = None,
    page_table_v: Tensor | None = None,
    s_quantizer: Any = None,
    o_quantizer: Any = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    fast_zero_fill: bool = True,
    qkv_layout: str = "sbh3d",
    o_format: str = _SBHD,
    qkv_scale_inv_format: str | None = None,
    attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding",
    softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1),
    bottom_right_diagonal: bool | None = None,
    rng_gen: torch.Generator | None = None,
    softmax_offset: Tensor | None = None,
    return_max_logit: bool = False,
    cuda_graph: bool = False,
) -> tuple[Tensor, list[Tensor]] | tuple[Tensor, list[Tensor], Tensor]:
    """Attention's forward under TransformerEngine's name, argument order and defaults; without autograd.

    Args:
        is_training: False switches dropout off; nothing else depends on it.
        max_seqlen_q, max_seqlen_kv: bounds on the lengths, only hints.
        cu_seqlens_q, cu_seqlens_kv: int32 [B + 1], actual lengths cumulated; read with padding masks. Others
            attend whole tensors: on the CPU lengths that say otherwise are an error.
        q, k, v: tensors of any strides in the format of ``qkv_layout``, [..., H, D], [..., G, D], [..., G, Dv].
        fake_dtype: q's dtype, as torch's or TransformerEngine's name of it.
        fused_attention_backend: a backend's name or pair of names as in ``gradtruth.attention``; None and
            TransformerEngine's F16 members (its own or those of this module, or their names) mean "auto".
        attn_bias: [1|B, 1|H, 1|S, 1|T] with attn_bias_type "pre_scale_bias" or "post_scale_bias".
        cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 [B + 1], thd storage offsets.
        page_table_k, page_table_v, s_quantizer, o_quantizer, qkv_scale_inv_format: refused.
        attn_scale: multiplies q k^T; default 1 / sqrt(D).
        dropout: probability that a weight is dropped.
        fast_zero_fill: without effect: padding is always exactly 0.
        qkv_layout: names the format; q, k and v carry their own strides. Formats that differ are refused.
        o_format: the format of ``qkv_layout``, which it is by default.
        attn_bias_type: "no_bias", "pre_scale_bias", "post_scale_bias", or "alibi" with the paper's slopes.
        attn_mask_type: any mask that takes no tensor.
        softmax_type: "vanilla", "off-by-one" or "learnable".
        window_size: (left, right), -1 is unlimited.
        bottom_right_diagonal: alignment of a window or ALiBi; None is True for the names that end in
            "bottom_right" and False for all others. (``DotProductAttention`` has another default.)
        rng_gen: generator of the dropout seed; default PyTorch's of the device.
        softmax_offset: fp32 [1, H, 1, 1] or [H], the learnable sink's logit. "off-by-one" takes zeros.
        return_max_logit: also return the largest score per head.
        cuda_graph: without effect: no call waits for the device.

    Returns:
        (O, aux) or (O, aux, max_logit). O is [..., H, Dv] in q's format and dtype; aux is what
        ``fused_attn_bwd`` takes: lse fp32 ([B, H, S, 1], thd [tokens, H, 1]; natural log, sink included),
        rng_state int64 [2] (the seed and 0), then the bias and softmax_offset where there are any. max_logit
        is fp32 [H].

    Raises:
        InvalidProblem: (a ValueError) the arguments contradict each other.
        UnsupportedProblem: (a NotImplementedError) an argument is not honoured, or no backend can.
    """
    refuse(
        page_table_k=page_table_k,
        page_table_v=page_table_v,
        s_quantizer=s_quantizer,
        o_quantizer=o_quantizer,
        qkv_scale_inv_format=qkv_scale_inv_format,
    )
    form, _ = arrangement("qkv_layout", qkv_layout)
    check_format("o_format", o_format, qkv_layout, form)
    check_dtype("fake_dtype", fake_dtype, q)
    sink = sink_of("softmax_offset", softmax_type, softmax_offset)
    chosen: AttentionOptions = {
        **lengths_of(form, attn_mask_type, (q, k), (cu_seqlens_q, cu_seqlens_kv)),
        **alignment_of(attn_mask_type, window_size, bottom_right_diagonal),
        **bias_of("attn_bias", attn_bias_type, attn_bias, q),
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
        "softmax_scale": attn_scale,
        "softmax_type": softmax_type,
        "softmax_offset": sink,
        "backend": backend_of(fused_attention_backend),
    }
    dropout = dropout if is_training else 0.0
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if dropout:
        chosen["dropout_p"] = dropout
        chosen["dropout_seed"] = rng_state[0].random_(-(2**63), None, generator=rng_gen)
    with named(FORWARD_NAMES):
        out, lse, max_logit = attention_forward(
            q, k, v, return_max_logit=return_max_logit, **chosen
        )
    aux = [lse.unsqueeze(-1), rng_state]
    aux += [kept for kept in (attn_bias, softmax_offset) if kept is not None]
    return (out, aux) if max_logit is None else (out, aux, max_logit)


# ---------------------------------------------------------------- the backward


def _takes_older_order(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Let calls in the argument order of earlier releases through.

    It has dqkv_dtype between fake_dtype and aux_ctx_tensors; only the latter is a list, so there is no doubt.
    """
    place = 10

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> list[Any]:
        given = [kwargs.pop("dqkv_dtype")] if "dqkv_dtype" in kwargs else []
        if (
            not given
            and len(args) > place
            and not isinstance(args[place], list | tuple)
            and isinstance((*args[place + 1 :], kwargs.get("aux_ctx_tensors"))[0], list | tuple)
        ):
            given, args = [args[place]], (*args[:place], *args[place + 1 :])
        for dtype in given:
            check_dtype("dqkv_dtype", dtype, args[4] if len(args) > 4 else kwargs.get("q"))
        return function(*args, **kwargs)

    return call


@_takes_older_order
def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    fake_dtype: Any,
    aux_ctx_tensors: Sequence[Tensor],
    fused_attention_backend: Any,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    s_quantizer: Any = None,
    dp_quantizer: Any = None,
    dqkv_quantizer: Any = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    fast_zero_fill: bool = True,
    qkv_layout: str = "sbh3d",
    o_format: str = _SBHD,
    do_format: str = _SBHD,
    dqkv_layout: str = _SBH3D,
    qkv_scale_inv_format: str | None = None,
    do_scale_inv_format: str | None = None,
    attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding",
    softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1),
    bottom_right_diagonal: bool | None = None,
    deterministic: bool = False,
    cuda_graph: bool = False,
) -> list[Tensor | None]:
    """Attention's backward under TransformerEngine's name, argument order and defaults; without autograd.

    The gradients are those of P = exp(x - lse) and delta = d_o . o for the o and lse that are given, wherever
    they were made. Nothing is kept between calls.

    Args:
        o: from the forward, [..., H, Dv].
        d_o: its gradient; any strides.
        aux_ctx_tensors: lse (fp16, bf16, fp32 or fp64; [B, H, S, 1] or [B, H, S], thd [tokens, H, 1] or
            [tokens, H]), rng_state (int64, its first element the seed; with dropout 0 it may be anything), then the
            bias and softmax_offset where there are any.
        s_quantizer, dp_quantizer, dqkv_quantizer, qkv_scale_inv_format, do_scale_inv_format: refused.
        o_format, do_format: the format of ``qkv_layout``, which they are by default.
        dqkv_layout: which gradients share a buffer; by default as ``qkv_layout`` says, whose format it must have.
        deterministic: False allows a faster variant whose bits may differ from run to run.
        cuda_graph: without effect: no call waits for the device.
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, fused_attention_backend,
            cu_seqlens_q_padded, cu_seqlens_kv_padded, attn_scale, dropout, fast_zero_fill, qkv_layout,
            attn_bias_type, attn_mask_type, softmax_type, window_size, bottom_right_diagonal: as in
            ``fused_attn_fwd``. The older order, with dqkv_dtype after fake_dtype, is understood.

    Returns:
        [dQ, dK, dV, dBias, dSoftmaxOffset]. For packed layouts the gradients are views of one buffer. dBias is
        in the bias's shape and dtype, dSoftmaxOffset in softmax_offset's shape; None where there is none.

    Raises:
        InvalidProblem: (a ValueError) the arguments contradict each other.
        UnsupportedProblem: (a NotImplementedError) an argument is not honoured, or no backend can.
    """
    refuse(
        s_quantizer=s_quantizer,
        dp_quantizer=dp_quantizer,
        dqkv_quantizer=dqkv_quantizer,
        qkv_scale_inv_format=qkv_scale_inv_format,
        do_scale_inv_format=do_scale_inv_format,
    )
    form, packing = arrangement("qkv_layout", qkv_layout)
    check_format("o_format", o_format, qkv_layout, form)
    check_format("do_format", do_format, qkv_layout, form)
    if not isinstance(dqkv_layout, Follows):
        gradient_form, packing = arrangement("dqkv_layout", dqkv_layout)
        if gradient_form != form:
            raise UnsupportedProblem(
                f"dqkv_layout is {dqkv_layout!r} with qkv_layout {qkv_layout!r}, expected its format, {form!r}"
            )
    check_dtype("fake_dtype", fake_dtype, q)
    aux = read_aux(aux_ctx_tensors, attn_bias_type, softmax_type)
    check_packable(packing, q, k, v)
    chosen: AttentionOptions = {
        **lengths_of(form, attn_mask_type, (q, k), (cu_seqlens_q, cu_seqlens_kv)),
        **alignment_of(attn_mask_type, window_size, bottom_right_diagonal),
        **bias_of("aux_ctx_tensors", attn_bias_type, aux.bias, q),
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
        "softmax_scale": attn_scale,
        "softmax_type": softmax_type,
        "softmax_offset": sink_of("aux_ctx_tensors", softmax_type, aux.softmax_offset),
        "deterministic": deterministic,
        "backend": backend_of(fused_attention_backend),
    }
    if dropout:
        chosen["dropout_p"] = dropout
        chosen["dropout_seed"] = seed_of(aux.rng_state)
    with named(BACKWARD_NAMES):
        dq, dk, dv, dbias, doffset = attention_backward(
            d_o, q, k, v, o, without_unit(aux.lse, form), **chosen
        )
    if doffset is not None:
        doffset = doffset.view(aux.softmax_offset.shape)
    return [*packed(packing, dq, dk, dv), dbias, doffset]
