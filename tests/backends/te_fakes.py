"""TransformerEngine 2.20.2 without a GPU: its signatures, rules and conventions over gradtruth's own arithmetic.

What differs between the two libraries is what TransformerEngine does: kernels take an address and a layout's name,
statistics are [tokens, H, 1] for thd with whatever was in memory outside every sequence, thd results are filled with
0 first, max_logit is in q's dtype, windows have two ends, the module has no argument for determinism.
"""

from __future__ import annotations

import enum
import logging
import sys
import types
from dataclasses import dataclass

import torch

from gradtruth.compat import transformer_engine as compat
from gradtruth.core.layout import PACKED_DIM

CALLS: list[tuple[str, dict]] = []
"""Name and arguments of every call since it was cleared."""
STATISTICS = {"ragged": True}
"""Whether thd statistics are [tokens, H, 1]."""

_PACKED = ("3hd", "h3d", "2hd", "h2d")


class FusedAttnBackend(enum.IntEnum):
    No_Backend = -1
    F16_arbitrary_seqlen = 1
    FP8 = 2


def _packing(qkv_layout):
    last = qkv_layout.rsplit("_", maxsplit=1)[-1]
    return next((name for name in _PACKED if last.endswith(name)), "separate")


def _form(qkv_layout):
    first = qkv_layout.split("_")[0]
    return "thd" if first.startswith("t") else "bshd" if first.startswith("bs") else "sbhd"


def _by_address(tensor, packed, count):
    """What a kernel sees that was told only where the tensor starts."""
    sizes, strides = list(tensor.shape), [1]
    if packed == "separate":
        dims = sizes
    else:
        at = len(sizes) + 1 + PACKED_DIM[packed]
        dims = [*sizes[:at], count, *sizes[at:]]
    for size in reversed(dims[1:]):
        strides.insert(0, strides[0] * size)
    if packed != "separate":
        del strides[at]
    return tensor.as_strided(sizes, strides, tensor.storage_offset())


def _seen(q, k, v, qkv_layout):
    packing = _packing(qkv_layout)
    three = packing in ("3hd", "h3d")
    count = 3 if three else 2
    return (
        _by_address(q, packing if three else "separate", count),
        _by_address(k, packing, count),
        _by_address(v, packing, count),
    )


def _check(cu_q, cu_kv, q, window_size, attn_mask_type, max_q, max_kv):
    assert q.dtype in (torch.float16, torch.bfloat16)
    for cu, longest in ((cu_q, max_q), (cu_kv, max_kv)):
        assert cu.dtype == torch.int32
        assert cu.dim() == 1
        assert type(longest) is int
        assert int(cu.diff().max()) <= longest
    check_set_window_size(attn_mask_type, window_size)


def check_set_window_size(attn_mask_type, window_size):
    """Of transformer_engine.pytorch.attention.dot_product_attention.utils; what it changes is an error here."""
    if "causal" in attn_mask_type:
        assert window_size == (-1, 0) or (window_size[0] >= 0 and window_size[1] == 0), window_size
    else:
        assert window_size == (-1, -1) or min(window_size) >= 0, window_size


def _inside(cu, padded, tokens):
    at = torch.arange(tokens)
    return ((at >= padded[:-1, None]) & (at < padded[:-1, None] + cu.diff()[:, None])).any(0)


def fused_attn_fwd(
    is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype,
    fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
    page_table_k=None, page_table_v=None, s_quantizer=None, o_quantizer=None, attn_scale=None, dropout=0.0,
    fast_zero_fill=True, qkv_layout="sbh3d", o_format="sbhd", qkv_scale_inv_format=None, attn_bias_type="no_bias",
    attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1), bottom_right_diagonal=None, rng_gen=None,
    softmax_offset=None, return_max_logit=False, cuda_graph=False,
):  # fmt: skip
    given = dict(locals())
    CALLS.append(("fused_attn_fwd", given))
    _check(cu_seqlens_q, cu_seqlens_kv, q, window_size, attn_mask_type, max_seqlen_q, max_seqlen_kv)
    assert is_training
    assert fused_attention_backend == FusedAttnBackend.F16_arbitrary_seqlen
    assert attn_bias is None or attn_bias.dtype == q.dtype
    assert (softmax_type == "vanilla") == (softmax_offset is None)
    assert softmax_offset is None or (
        softmax_offset.shape == (1, q.shape[-2], 1, 1) and softmax_offset.dtype == torch.float32
    )
    form = _form(qkv_layout)
    assert o_format == form
    seen = _seen(q, k, v, qkv_layout)
    thd = form == "thd"
    out, aux, *rest = compat.fused_attn_fwd(
        True, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, *seen, fake_dtype, "reference",
        attn_bias=attn_bias,
        cu_seqlens_q_padded=cu_seqlens_q_padded if thd else None,
        cu_seqlens_kv_padded=cu_seqlens_kv_padded if thd else None,
        attn_scale=attn_scale, qkv_layout=qkv_layout, o_format=o_format, attn_bias_type=attn_bias_type,
        attn_mask_type=attn_mask_type, softmax_type=softmax_type, window_size=window_size,
        bottom_right_diagonal=bottom_right_diagonal, softmax_offset=softmax_offset,
        return_max_logit=return_max_logit,
    )  # fmt: skip
    state = torch.zeros(2, dtype=torch.int64)
    if dropout:
        # Of the same function with the generator's own seed.
        state[0] = rng_gen.initial_seed()
        out = _dropped(given, seen, state[0], thd)
    stats = aux[0].clone()
    if thd:
        inside = _inside(cu_seqlens_q, cu_seqlens_q_padded, q.shape[0])
        stats[~inside] = torch.nan
        if not STATISTICS["ragged"]:
            stats = _by_sequence(stats, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q)
    aux = [stats, state, *(x for x in (attn_bias, softmax_offset) if x is not None)]
    return (out, aux, *(x.to(out.dtype) for x in rest))


def _dropped(given, seen, seed, thd):
    import gradtruth

    options = {
        "qkv_format": _form(given["qkv_layout"]),
        "attn_mask_type": given["attn_mask_type"],
        "window_size": given["window_size"],
        "bottom_right_diagonal": given["bottom_right_diagonal"],
        "softmax_scale": given["attn_scale"],
        "softmax_type": given["softmax_type"],
        "dropout_p": given["dropout"],
        "dropout_seed": seed,
        "backend": "reference",
    }
    if "padding" in given["attn_mask_type"]:
        options |= {name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    if thd:
        options |= {name: given[name] for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")}
    if given["attn_bias"] is not None:
        options |= {"bias": given["attn_bias"]}
    if given["softmax_type"] == "learnable":
        options["softmax_offset"] = given["softmax_offset"].reshape(-1)
    return gradtruth.attention(*seen, **options)


def _by_sequence(stats, cu, padded, longest):
    """[B, H, longest, 1]."""
    lengths = cu.diff().tolist()
    found = torch.full((len(lengths), stats.shape[1], longest, 1), torch.nan)
    for n, (start, length) in enumerate(zip(padded.tolist(), lengths, strict=False)):
        found[n, :, :length] = stats[start : start + length].transpose(0, 1)
    return found


def _by_token(stats, cu, padded, tokens):
    found = torch.full((tokens, stats.shape[1], 1), torch.nan)
    for n, length in enumerate(cu.diff().tolist()):
        start = int(padded[n])
        found[start : start + length] = stats[n, :, :length].transpose(0, 1)
    return found


def fused_attn_bwd(
    max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, aux_ctx_tensors,
    fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, s_quantizer=None,
    dp_quantizer=None, dqkv_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d",
    o_format="sbhd", do_format="sbhd", dqkv_layout="sbh3d", qkv_scale_inv_format=None, do_scale_inv_format=None,
    attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1),
    bottom_right_diagonal=None, deterministic=False, cuda_graph=False,
):  # fmt: skip
    CALLS.append(("fused_attn_bwd", dict(locals())))
    _check(cu_seqlens_q, cu_seqlens_kv, q, window_size, attn_mask_type, max_seqlen_q, max_seqlen_kv)
    assert fused_attention_backend == FusedAttnBackend.F16_arbitrary_seqlen
    assert not (deterministic and (softmax_type != "vanilla" or attn_bias_type != "no_bias"))
    form = _form(qkv_layout)
    thd = form == "thd"
    assert o_format == do_format == form == _form(dqkv_layout)
    assert o.is_contiguous()
    assert d_o.is_contiguous()
    stats, state, *rest = aux_ctx_tensors
    assert stats.dtype == torch.float32
    assert stats.is_contiguous()
    assert state.dtype == torch.int64
    if thd:
        # cuDNN reads whole tiles: what lies outside must at least be finite.
        assert bool(o.isfinite().all())
        assert not bool(stats.isnan().any())
        if not STATISTICS["ragged"]:
            assert stats.shape == (len(cu_seqlens_q) - 1, q.shape[1], max_seqlen_q, 1)
            stats = _by_token(stats, cu_seqlens_q, cu_seqlens_q_padded, q.shape[0])
    return compat.fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, *_seen(q, k, v, qkv_layout), o, d_o, fake_dtype,
        [stats, state, *rest], "reference",
        cu_seqlens_q_padded=cu_seqlens_q_padded if thd else None,
        cu_seqlens_kv_padded=cu_seqlens_kv_padded if thd else None,
        attn_scale=attn_scale, dropout=dropout, qkv_layout=qkv_layout, o_format=o_format, do_format=do_format,
        dqkv_layout=dqkv_layout, attn_bias_type=attn_bias_type, attn_mask_type=attn_mask_type,
        softmax_type=softmax_type, window_size=window_size, bottom_right_diagonal=bottom_right_diagonal,
        deterministic=deterministic,
    )  # fmt: skip


class DotProductAttention(compat.DotProductAttention):
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal", window_size=None, bottom_right_diagonal=None, softcap=0.0, sequence_parallel=False,
        tp_size=1, get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type="self", cp_group=None,
        cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_scale=None, softmax_type="vanilla",
        return_max_logit=False, name=None,
    ):  # fmt: skip
        CALLS.append(("DotProductAttention", dict(locals())))
        super().__init__(
            num_attention_heads, kv_channels, num_gqa_groups, attention_dropout, qkv_format, attn_mask_type,
            window_size, bottom_right_diagonal, attention_type=attention_type, softmax_scale=softmax_scale,
            softmax_type=softmax_type, return_max_logit=return_max_logit, softcap=softcap or None,
            backend="reference", deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        assert not (self.deterministic and softmax_type != "vanilla")

    def forward(
        self, query_layer=None, key_layer=None, value_layer=None, attention_mask=None, qkv_format=None,
        cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
        max_seqlen_kv=None, attn_mask_type=None, window_size=None, bottom_right_diagonal=None, softcap=None,
        checkpoint_core_attention=False, core_attention_bias_type="no_bias", core_attention_bias=None,
        alibi_slopes=None, **more,
    ):  # fmt: skip
        CALLS.append(("forward", {**locals(), "deterministic": self.deterministic}))
        assert not more
        check_set_window_size(
            attn_mask_type or self.attn_mask_type, window_size or self.window_size
        )
        assert (qkv_format or self.qkv_format) != "thd" or "padding" in attn_mask_type
        found = super().forward(
            query_layer, key_layer, value_layer, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, attn_mask_type=attn_mask_type,
            window_size=window_size, bottom_right_diagonal=bottom_right_diagonal,
            core_attention_bias_type=core_attention_bias_type, core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
        )  # fmt: skip
        if self.return_max_logit:
            return found[0], found[1].to(query_layer.dtype)
        return found


@dataclass
class AttentionParams:
    """The fields of 2.20.2, with its defaults."""

    qkv_type: object = torch.Tensor
    qkv_dtype: torch.dtype = torch.bfloat16
    nominal_dtype: object = None
    qkv_layout: str = "sbh3d"
    batch_size: int = 1
    num_heads: int = 16
    num_gqa_groups: int = 16
    max_seqlen_q: int = 128
    max_seqlen_kv: int = 128
    num_tokens_q: int = 0
    num_tokens_kv: int = 0
    head_dim_qk: int = 64
    head_dim_v: int = 64
    attn_mask_type: str = "no_mask"
    window_size: object = None
    bottom_right_diagonal: bool = True
    softcap: float = 0.0
    alibi_slopes_shape: object = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias_shape: object = None
    core_attention_bias_requires_grad: bool = True
    pad_between_seqs: bool = False
    attention_dropout: float = 0.0
    deterministic: bool = False
    is_training: bool = True
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    softmax_scale: float = 1.0


class AttentionLogging:
    _log_level = logging.WARNING


def get_attention_backend(attention_params):
    """Some of its rules, said the way it says them: at debug level, on a logger that it configures."""
    logger = logging.getLogger("DotProductAttention")
    logger.setLevel(AttentionLogging._log_level)
    p, fused = attention_params, True
    CALLS.append(("get_attention_backend", dict(vars(p))))
    logger.debug("Disabling FlashAttention as it is not installed")
    if p.softcap:
        logger.debug("Disabling FusedAttention as it does not support softcap")
        fused = False
    if p.deterministic and (p.softmax_type != "vanilla" or p.core_attention_bias_requires_grad):
        logger.debug("Disabling FusedAttention for determinism reasons")
        fused = False
    if p.head_dim_v == 72:
        logger.debug("Disabling FusedAttention: hidden_dim d_v is 72 (a refusal of cuDNN)")
        fused = False
    logger.debug("Selected backend = %s", fused)
    return False, None, fused, 1 if fused else None, not fused, [False, fused, True]


def install(monkeypatch):
    """Put the stand-ins where TransformerEngine's modules are looked for, and pretend there is a device."""
    from gradtruth.backends.peers import installed, te_fused, te_library

    base = "transformer_engine.pytorch"
    contents = {
        "transformer_engine": {},
        base: {"DotProductAttention": DotProductAttention},
        f"{base}.utils": {"get_cudnn_version": lambda: (9, 19, 0)},
        f"{base}.cpp_extensions": {},
        te_library.FUSED: {
            "fused_attn_fwd": fused_attn_fwd,
            "fused_attn_bwd": fused_attn_bwd,
            "FusedAttnBackend": FusedAttnBackend,
        },
        f"{base}.attention": {},
        f"{base}.attention.dot_product_attention": {},
        te_library._SELECTION: {
            "AttentionParams": AttentionParams,
            "AttentionLogging": AttentionLogging,
            "get_attention_backend": get_attention_backend,
        },
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(installed, "cuda_reasons", lambda *_: [])
    monkeypatch.setattr(te_fused, "ragged_statistics", lambda: STATISTICS["ragged"])
    monkeypatch.setitem(STATISTICS, "ragged", True)
    te_library._select.cache_clear()
    CALLS.clear()
