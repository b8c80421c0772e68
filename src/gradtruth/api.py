"""The functional form: attention() and its relatives. The work is in ``arguments``, ``calls`` and ``ops``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from gradtruth.arguments import Options, TensorArguments
from gradtruth.backends.select import Selection
from gradtruth.calls import Backends, Policy, run_backward, run_forward, select_for, use

__all__ = [
    "AttentionOptions",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_with_lse",
    "explain",
    "use",
]


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of ``attention``, where their meaning and defaults are."""

    qkv_format: str
    attn_mask_type: str
    window_size: tuple[int, int] | None
    bottom_right_diagonal: bool | None
    attention_mask: Tensor | tuple[Tensor, Tensor] | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    softmax_scale: float | None
    softcap: float | None
    bias: Tensor | None
    bias_type: str
    alibi_slopes: Tensor | None
    softmax_type: str
    softmax_offset: Tensor | None
    dropout_p: float
    dropout_seed: Tensor | int | None
    backend: Backends
    deterministic: bool
    batch_invariant: bool
    check_inputs: bool | None
    context_parallel: Any


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    qkv_format: str = "bshd",
    attn_mask_type: str = "no_mask",
    window_size: tuple[int, int] | None = None,
    bottom_right_diagonal: bool | None = None,
    attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    bias_type: str = "post_scale_bias",
    alibi_slopes: Tensor | None = None,
    softmax_type: str = "vanilla",
    softmax_offset: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    backend: Backends = "auto",
    deterministic: bool = True,
    batch_invariant: bool = False,
    check_inputs: bool | None = None,
    context_parallel: Any = None,
) -> Tensor:
    """Compute softmax(scale * q k^T + bias) v over the visible keys.

    Equivalent code for dense input without options:
        p = softmax(scale * q @ k.T + bias + mask);  out = p @ v

    Args:
        query: [B, S, H, D] (bshd), [S, B, H, D] (sbhd) or [tokens, H, D] (thd); fp16, bf16, fp32 or fp64. Any
            strides; a last dim that is not contiguous is copied.
        key: the same with T places and G heads, H a multiple of G; query head h reads head h // (H / G).
        value: like key, last dim Dv.
        qkv_format: "bshd", "sbhd" or "thd".
        attn_mask_type: "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
            "padding_causal_bottom_right", "arbitrary" or "arbitrary,<any of these>". thd takes padding masks.
        window_size: (left, right) in tokens, inclusive, counted from the diagonal; -1 is unlimited. Intersected
            with the mask.
        bottom_right_diagonal: the diagonal of a window or of ALiBi where the mask's name does not fix it: True
            (and None) ends at the last key, False starts at the first.
        attention_mask: bool, True = masked out. For padding masks without cu_seqlens [B, 1, 1, S] or [B, S], a pair
            of them when query and key differ; for arbitrary masks [1|B, 1|H, 1|S, 1|T], for thd
            [1|B, 1|H, 1|max_seqlen_q, 1|max_seqlen_kv].
        cu_seqlens_q: int32 [B + 1], cumulated lengths of the sequences' queries.
        cu_seqlens_kv: int32 [B + 1], of their keys.
        cu_seqlens_q_padded: int32 [B + 1], thd storage offsets of the queries; default cu_seqlens_q.
        cu_seqlens_kv_padded: int32 [B + 1], of the keys.
        max_seqlen_q: a bound on the lengths, only a hint: larger changes nothing, smaller raises when inputs are
            checked and otherwise clamps the sequences.
        max_seqlen_kv: the same for keys.
        softmax_scale: multiplies q k^T; default 1 / sqrt(D).
        softcap: x becomes softcap * tanh(x / softcap), before post-scale bias and ALiBi.
        bias: [1|B, 1|H, 1|S, 1|T] in query's dtype or fp32, added to the scores; gets a gradient in its own shape.
        bias_type: "post_scale_bias", or "pre_scale_bias" to add it before the scale (and the softcap).
        alibi_slopes: fp32 [H] or [B, H]; subtracts slope * |i + diagonal - j|. No gradient.
        softmax_type: "vanilla"; "off-by-one" adds exp(0) to the denominator, "learnable" exp(softmax_offset).
        softmax_offset: fp32 [H] for "learnable"; gets a gradient.
        dropout_p: probability that a weight is dropped, in [0, 1].
        dropout_seed: int64 scalar tensor or int; default: drawn from PyTorch's generator of the device.
        backend: "auto", a backend's name (never replaced by another), or a pair (forward, backward).
        deterministic: False allows a faster variant whose bits may differ from run to run.
        batch_invariant: a sequence's bits must not depend on the rest of the batch.
        check_inputs: check the content of cu_seqlens too; default on the CPU only, on a GPU it waits for the device.
        context_parallel: not available in this release.

    Returns:
        [B, S, H, Dv] in query's layout and dtype, contiguous. Rows without a visible key are exactly 0.

    Raises:
        InvalidProblem: (a ValueError) the arguments contradict each other.
        UnsupportedProblem: (a NotImplementedError) the named backend, or every one, refuses; lists all reasons.

    Numerics: scores, softmax and sums in fp32 (fp64 for fp64 input); probabilities and their gradients are rounded
        to the input dtype only as operands of a matrix product.
    Determinism: the same bits every run unless ``deterministic=False``.
    Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2; Press et al., ALiBi, arXiv 2108.12409.
    """
    tensors = TensorArguments(
        query=query,
        key=key,
        value=value,
        attention_mask=attention_mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_kv_padded=cu_seqlens_kv_padded,
        bias=bias,
        alibi_slopes=alibi_slopes,
        softmax_offset=softmax_offset,
        dropout_seed=dropout_seed,
    )
    options = Options(
        qkv_format=qkv_format,
        attn_mask_type=attn_mask_type,
        window_size=window_size,
        bottom_right_diagonal=bottom_right_diagonal,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        softmax_scale=softmax_scale,
        softcap=softcap,
        bias_type=bias_type,
        softmax_type=softmax_type,
        dropout_p=dropout_p,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
    )
    return run_forward(tensors, options, Policy(backend, check_inputs, context_parallel))[0]


def attention_with_lse(
    query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]:
    """``attention`` that returns (out, lse), both differentiable.

    Args:
        query: as in ``attention``; so are key, value and the options.

    Returns:
        out as ``attention`` returns it, and lse: fp32 (fp64 for fp64 input), natural log of the denominator,
        sink included: [B, H, S], for thd [tokens, H]; -inf at rows without a visible key and outside every
        sequence.
    """
    tensors, chosen, policy = _collect("attention_with_lse", query, key, value, options)
    out, lse, _ = run_forward(tensors, chosen._replace(lse_grad=True), policy)
    return out, lse


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_max_logit: bool = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The forward as a plain function on tensors, without autograd.

    Args:
        query: as in ``attention``; so are key, value and the options.
        return_max_logit: also return the largest score per head.

    Returns:
        (out, lse, max_logit): out and lse as ``attention_with_lse`` returns them; max_logit fp32 [H], the
        maximum of the final scores over all visible pairs of the batch, -inf when there is none; None when
        not asked for.
    """
    tensors, chosen, policy = _collect("attention_forward", query, key, value, options)
    with torch.no_grad():
        out, lse, max_logit = run_forward(
            tensors, chosen._replace(max_logit=return_max_logit), policy
        )
    return out, lse, max_logit if return_max_logit else None


def attention_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True, True, True),
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The backward as a plain function on tensors, without autograd.

    P = exp(x - lse) and delta = dout . out - dlse are computed from the out and lse that are given, wherever
    they were made: the gradients of a tile come from the out and lse of the whole.

    Args:
        dout: gradient of out, in out's shape and dtype; any strides, expanded included.
        query: as in ``attention``; so are key, value and the options. With dropout, dropout_seed must be the
            forward's.
        out: from ``attention_forward``.
        lse: from ``attention_forward``; any float dtype.
        dlse: gradient of lse, or None.
        output_mask: which of the five gradients to compute.

    Returns:
        (dq, dk, dv, dbias, dsoftmax_offset), None where not wanted or where there is no such input.
    """
    tensors, chosen, policy = _collect("attention_backward", query, key, value, options)
    chosen = chosen._replace(lse_grad=dlse is not None)
    return run_backward(tensors, chosen, policy, (dout, out, lse, dlse), output_mask)


def explain(
    query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]
) -> Selection:
    """Say which backend a call would use, which copies it makes, and why not each other backend.

    Nothing is computed.

    Args:
        query: as in ``attention``; so are key, value and the options.

    Returns:
        The selection; ``print`` shows it.
    """
    tensors, chosen, policy = _collect("explain", query, key, value, options)
    return select_for(tensors, chosen, policy)


def _collect(
    name: str, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> tuple[TensorArguments, Options, Policy]:
    """Sort the keyword arguments into tensors, options and policy."""
    known = AttentionOptions.__annotations__
    for given in options:
        if given not in known:
            raise TypeError(f"{name}() got an unexpected keyword argument {given!r}")

    def part(fields: tuple[str, ...]) -> dict[str, Any]:
        return {field: options[field] for field in fields if field in options}  # type: ignore[literal-required]

    tensors = TensorArguments(query=query, key=key, value=value, **part(TensorArguments._fields))
    return tensors, Options(**part(Options._fields)), Policy(**part(Policy._fields))
