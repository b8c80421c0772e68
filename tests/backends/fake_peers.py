"""Stand-ins for peers that need a GPU: their signatures and conventions, computed by the reference backend.

Signatures and conventions (corner of the diagonal, layout of lse, what rows without a key get) are those of
flash-attn 2.8.3, its hopper/ interface of the same day, flash-attn-4 4.0.0b36, xformers 0.0.35, fla-core 0.6.0 and
the operators of torch 2.13.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, replace

import torch

import gradtruth

CALLS: list[str] = []
"""The functions called since a test cleared the list."""


def tokens_attend(
    q, k, v, cu_q, cu_k, *, corner="bottom_right", window=(-1, -1), dlse=True, **more
):
    """out and lse [tokens, H] by definition; window None is unlimited."""
    left, right = (-1 if w is None else w for w in window)
    mask = "padding"
    if right == 0:
        mask = "padding_causal" + ("_bottom_right" if corner == "bottom_right" else "")
        right = -1
    options = {
        "qkv_format": "thd",
        "attn_mask_type": mask,
        "cu_seqlens_q": cu_q.int(),
        "cu_seqlens_kv": cu_k.int(),
        "backend": "reference",
        **more,
    }
    if (left, right) != (-1, -1):
        options["window_size"] = (left, right)
    if "causal" not in mask and corner == "top_left":
        options["bottom_right_diagonal"] = False
    out, lse = gradtruth.attention_with_lse(q, k, v, **options)
    return out, lse if dlse else lse.detach()


def dense_attend(q, k, v, **options):
    """The same for [B, S, H, D], lse [B, H, S]."""
    cu = [torch.arange(x.shape[0] + 1) * x.shape[1] for x in (q, k)]
    flat = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = tokens_attend(*flat, *cu, **options)
    return out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2]).transpose(1, 2)


def _plus_inf(lse):
    return torch.where(lse == -torch.inf, torch.inf, lse)


def _checked_halves(*tensors):
    for x in tensors:
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert x.stride(-1) == 1


def _lengths(cu_q, cu_k, max_q, max_k):
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert type(max_q) is type(max_k) is int
    assert max_q >= int(cu_q.diff().max())
    assert max_k >= int(cu_k.diff().max())


# ---------------------------------------------------------------- flash-attn 2


def _flash2_shift(lse, slopes, at):
    """A causal kernel with ALiBi adds slope * j: its lse lies slope * (i + off) above the definition's."""
    return lse + slopes * at


def _flash2_options(dropout_p, scale, causal, window, softcap, slopes):
    assert dropout_p == 0.0
    window = (window[0], 0) if causal else window
    options = {"softmax_scale": scale, "window": window, "dlse": False}
    if softcap:
        options["softcap"] = softcap
    if slopes is not None:
        assert slopes.dtype == torch.float32
        options["alibi_slopes"] = slopes
    return options


def flash2_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    CALLS.append("flash2 dense")
    _checked_halves(q, k, v)
    options = _flash2_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    out, lse = dense_attend(q, k, v, **options)
    left, right = options["window"]
    if alibi_slopes is not None and right == 0 and not 0 <= left < k.shape[1]:
        at = torch.arange(q.shape[1]) + k.shape[1] - q.shape[1]
        lse = _flash2_shift(lse, alibi_slopes.expand(q.shape[0], -1)[:, :, None], at)
    return (out, _plus_inf(lse), None) if return_attn_probs else out


def flash2_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None,
):  # fmt: skip
    CALLS.append("flash2 varlen")
    _checked_halves(q, k, v)
    _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = _flash2_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    out, lse = tokens_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    left, right = options["window"]
    if alibi_slopes is not None and right == 0 and not 0 <= left < max_seqlen_k:
        rows = []
        for n, slopes in enumerate(alibi_slopes.expand(len(cu_seqlens_q) - 1, -1)):
            lq, lk = (int(cu[n + 1] - cu[n]) for cu in (cu_seqlens_q, cu_seqlens_k))
            rows.append(slopes[None] * (torch.arange(lq) + lk - lq)[:, None])
        lse = lse + torch.cat(rows)
    return (out, _plus_inf(lse).t().contiguous(), None) if return_attn_probs else out


# ---------------------------------------------------------------- flash-attn 3


def flash3_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    CALLS.append("flash3 dense")
    _checked_halves(q, k, v)
    options = _flash2_options(0.0, softmax_scale, causal, window_size, softcap, None)
    out, lse = dense_attend(q, k, v, **options)
    return (out, lse) if return_attn_probs else out


def flash3_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    CALLS.append("flash3 varlen")
    _checked_halves(q, k, v)
    _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = _flash2_options(0.0, softmax_scale, causal, window_size, softcap, None)
    out, lse = tokens_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    return (out, lse.t().contiguous()) if return_attn_probs else out


# ---------------------------------------------------------------- flash-attn 4


def _flash4_options(scale, causal, window, sink, softcap):
    window = (None, 0) if causal else window
    assert all(w is None or w >= 0 for w in window)
    options = {"softmax_scale": scale, "window": window}
    if softcap:
        options["softcap"] = softcap
    if sink is not None:
        assert sink.dtype in (torch.float16, torch.bfloat16, torch.float32)
        options |= {"softmax_type": "learnable", "softmax_offset": sink}
    return options


def flash4_func(
    q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
    learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
    score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,
    block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    CALLS.append("flash4 dense")
    _checked_halves(q, k, v)
    options = _flash4_options(softmax_scale, causal, window_size, learnable_sink, softcap)
    out, lse = dense_attend(q, k, v, **options)
    return out, lse if return_lse else None


def flash4_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
    block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None,
    seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):  # fmt: skip
    CALLS.append("flash4 varlen")
    _checked_halves(q, k, v)
    _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = _flash4_options(softmax_scale, causal, window_size, learnable_sink, softcap)
    out, lse = tokens_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    return out, lse.t().contiguous() if return_lse else None


# ---------------------------------------------------------------- torch's operators


def _flash_window(is_causal, left, right):
    return (left, 0) if is_causal else (left, right)


def aten_flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask=False,
    *, scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
    block_table=None, num_splits=None,
):  # fmt: skip
    CALLS.append("aten flash forward")
    _checked_halves(query, key, value)
    _lengths(cum_seq_q, cum_seq_k, max_q, max_k)
    assert dropout_p == 0.0
    window = _flash_window(is_causal, window_size_left, window_size_right)
    out, lse = tokens_attend(
        query, key, value, cum_seq_q, cum_seq_k, window=window, softmax_scale=scale
    )
    state = torch.zeros(2, dtype=torch.uint64)
    return out, _plus_inf(lse).t().contiguous(), state, torch.empty(0), torch.empty(0)


def _backward(dout, tensors, out, lse, lengths, window, scale, corner):
    assert not (lse == -torch.inf).any(), "exp(-inf - -inf) is NaN"
    lse = torch.where(lse == torch.inf, -torch.inf, lse)
    left, right = window
    mask = "padding_causal" if right == 0 else "padding"
    mask += "_bottom_right" if right == 0 and corner == "bottom_right" else ""
    right = -1 if mask != "padding" else right
    more = {} if (left, right) == (-1, -1) else {"window_size": (left, right)}
    grads = gradtruth.attention_backward(
        dout, *tensors, out, lse, qkv_format="thd", attn_mask_type=mask, cu_seqlens_q=lengths[0],
        cu_seqlens_kv=lengths[1], softmax_scale=scale, backend="reference", **more,
    )  # fmt: skip
    return grads[:3]


def aten_flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    CALLS.append("aten flash backward")
    _lengths(cum_seq_q, cum_seq_k, max_q, max_k)
    assert logsumexp.shape == (query.shape[1], query.shape[0])
    assert rng_state.dtype == torch.uint64
    window = _flash_window(is_causal, window_size_left, window_size_right)
    return _backward(
        grad_out, (query, key, value), out, logsumexp.t(), (cum_seq_q, cum_seq_k), window, scale,
        "bottom_right",
    )  # fmt: skip


def aten_cudnn_forward(
    query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp, dropout_p=0.0,
    is_causal=False, return_debug_mask=False, *, scale=None,
):  # fmt: skip
    CALLS.append("aten cudnn forward")
    _checked_halves(query, key, value)
    _lengths(cum_seq_q, cum_seq_k, max_q, max_k)
    assert all(x.is_contiguous() for x in (query, key, value))
    assert attn_bias is None
    window = (-1, 0) if is_causal else (-1, -1)
    out, lse = tokens_attend(
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        window=window,
        softmax_scale=scale,
        corner="top_left",
    )
    state = torch.zeros(())
    lse = lse.contiguous().unsqueeze(-1) if compute_log_sumexp else torch.empty(0)
    return out, lse, cum_seq_q, cum_seq_k, max_q, max_k, state, state, torch.empty(0)


def aten_cudnn_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
    max_q, max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    CALLS.append("aten cudnn backward")
    _lengths(cum_seq_q, cum_seq_k, max_q, max_k)
    assert all(x.is_contiguous() for x in (grad_out, query, key, value, out))
    assert logsumexp.shape == (*query.shape[:2], 1)
    window = (-1, 0) if is_causal else (-1, -1)
    return _backward(
        grad_out, (query, key, value), out, logsumexp[..., 0], (cum_seq_q, cum_seq_k), window, scale,
        "top_left",
    )  # fmt: skip


# ---------------------------------------------------------------- xformers


@dataclass
class LowerTriangularMask:
    device: object = None


@dataclass
class LowerTriangularFromBottomRightMask:
    pass


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    _window_size: int


@dataclass
class BlockDiagonalMask:
    q_seqlen: list[int]
    kv_seqlen: list[int]
    corner: str = ""
    window: int = 0

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        assert type(q_seqlen) is type(kv_seqlen) is list
        return cls(q_seqlen, kv_seqlen)

    def make_causal(self):
        return replace(self, corner="top_left")

    def make_causal_from_bottomright(self):
        return replace(self, corner="bottom_right")

    def make_local_attention(self, window_size):
        return replace(self, corner="top_left", window=window_size)

    def make_local_attention_from_bottomright(self, window_size):
        return replace(self, corner="bottom_right", window=window_size)


PACKED_LSE = [True]
"""FlashAttention's lse of a block diagonal mask is packed, CUTLASS' is padded per sequence."""


def _xformers(query, key, value, attn_bias=None, p=0.0, scale=None):
    assert p == 0.0
    options = {"softmax_scale": scale, "dlse": False}
    if isinstance(attn_bias, BlockDiagonalMask):
        CALLS.append("xformers varlen")
        assert query.shape[0] == key.shape[0] == 1
        cu = [
            torch.tensor([0, *x]).cumsum(0).int() for x in (attn_bias.q_seqlen, attn_bias.kv_seqlen)
        ]
        if attn_bias.corner:
            left = attn_bias.window - 1
            options |= {"corner": attn_bias.corner, "window": (left, 0)}
        out, lse = tokens_attend(query[0], key[0], value[0], *cu, **options)
        out, packed = out.unsqueeze(0), _plus_inf(lse).t().unsqueeze(0)
        if PACKED_LSE[0]:
            return out, packed
        longest = -(-max(attn_bias.q_seqlen) // 32) * 32
        found = torch.full((len(cu[0]) - 1, query.shape[2], longest), torch.inf)
        for n, length in enumerate(attn_bias.q_seqlen):
            found[n, :, :length] = packed[0, :, cu[0][n] : cu[0][n + 1]]
        return out, found
    CALLS.append("xformers dense")
    if isinstance(attn_bias, LowerTriangularMask):
        options |= {"corner": "top_left", "window": (-1, 0)}
    elif isinstance(attn_bias, LowerTriangularFromBottomRightLocalAttentionMask):
        options |= {"window": (attn_bias._window_size - 1, 0)}
    elif isinstance(attn_bias, LowerTriangularFromBottomRightMask):
        options |= {"window": (-1, 0)}
    else:
        assert attn_bias is None
    out, lse = dense_attend(query, key, value, **options)
    return out, torch.nn.functional.pad(_plus_inf(lse), (0, -lse.shape[2] % 32), value=torch.inf)


def memory_efficient_attention(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    return _xformers(query, key, value, attn_bias, p, scale)[0]


def memory_efficient_attention_forward_requires_grad(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    return _xformers(query, key, value, attn_bias, p, scale)


# ---------------------------------------------------------------- flash-linear-attention


def parallel_attn(
    q, k, v, g=None, scale=None, window_size=None, cu_seqlens=None, chunk_indices=None, *, sink_bias=None
):  # fmt: skip
    assert g is None
    assert q.shape[:2] == k.shape[:2]
    options = {
        "softmax_scale": scale,
        "window": (-1 if window_size is None else window_size - 1, 0),
        "corner": "top_left",
        "dlse": False,
    }
    if sink_bias is not None:
        options |= {"softmax_type": "learnable", "softmax_offset": sink_bias}
    if cu_seqlens is None:
        CALLS.append("fla dense")
        return dense_attend(q, k, v, **options)[0]
    CALLS.append("fla varlen")
    assert q.shape[0] == 1
    assert cu_seqlens.dtype == torch.int64
    return tokens_attend(q[0], k[0], v[0], cu_seqlens, cu_seqlens, **options)[0].unsqueeze(0)


# ---------------------------------------------------------------- where they are found


def _module(name, **attributes):
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    return module


def install(monkeypatch) -> None:
    """Put all of them where the adapters look."""
    import torch.nn.attention.varlen

    masks = _module(
        "xformers.ops.fmha.attn_bias",
        LowerTriangularMask=LowerTriangularMask,
        LowerTriangularFromBottomRightMask=LowerTriangularFromBottomRightMask,
        LowerTriangularFromBottomRightLocalAttentionMask=LowerTriangularFromBottomRightLocalAttentionMask,
        BlockDiagonalMask=BlockDiagonalMask,
    )
    fmha = _module(
        "xformers.ops.fmha",
        attn_bias=masks,
        memory_efficient_attention=memory_efficient_attention,
        memory_efficient_attention_forward_requires_grad=memory_efficient_attention_forward_requires_grad,
    )
    modules = {
        "flash_attn": _module("flash_attn"),
        "flash_attn.flash_attn_interface": _module(
            "flash_attn.flash_attn_interface",
            flash_attn_func=flash2_func,
            flash_attn_varlen_func=flash2_varlen_func,
        ),
        "flash_attn_interface": _module(
            "flash_attn_interface",
            flash_attn_func=flash3_func,
            flash_attn_varlen_func=flash3_varlen_func,
        ),
        "flash_attn.cute": _module(
            "flash_attn.cute",
            flash_attn_func=flash4_func,
            flash_attn_varlen_func=flash4_varlen_func,
        ),
        "xformers": _module("xformers"),
        "xformers.ops": _module("xformers.ops", fmha=fmha),
        "xformers.ops.fmha": fmha,
        "fla": _module("fla"),
        "fla.ops": _module("fla.ops"),
        "fla.ops.attn": _module("fla.ops.attn"),
        "fla.ops.attn.parallel": _module("fla.ops.attn.parallel", parallel_attn=parallel_attn),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name, function in {
        "_flash_attention_forward": aten_flash_forward,
        "_flash_attention_backward": aten_flash_backward,
        "_cudnn_attention_forward": aten_cudnn_forward,
        "_cudnn_attention_backward": aten_cudnn_backward,
    }.items():
        monkeypatch.setattr(torch.ops.aten, name, function)
    CALLS.clear()
