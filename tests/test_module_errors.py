"""What DotProductAttention refuses: each error names the argument, its value and what was expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.module_cases import DV, B, D, G, H, S, cu, lengths, made, module, stored

from gradtruth import InvalidProblem

CONSTRUCTOR: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_attention_heads": 0}, ValueError, "num_attention_heads is 0, expected a positive int"),
    (
        {"num_attention_heads": 4.0},
        ValueError,
        "num_attention_heads is 4.0, expected a positive int",
    ),
    ({"num_gqa_groups": 0}, ValueError, "num_gqa_groups is 0, expected a positive int"),
    (
        {"num_gqa_groups": 3},
        ValueError,
        "num_attention_heads is 4, expected a multiple of num_gqa_groups, 3",
    ),
    ({"kv_channels": 0}, ValueError, "kv_channels is 0, expected a positive int or a pair"),
    (
        {"kv_channels": (4, 4, 4)},
        ValueError,
        r"kv_channels is (4, 4, 4), expected a positive int or a pair",
    ),
    ({"kv_channels": 4.0}, ValueError, "kv_channels is 4.0, expected a positive int or a pair"),
    ({"tp_size": 4}, ValueError, "tp_size is 4, expected a divisor of 4 heads and 2 groups"),
    ({"tp_size": 0}, ValueError, "tp_size is 0, expected a positive int"),
    (
        {"attention_dropout": 1.5},
        ValueError,
        "attention_dropout is 1.5, expected a number in [0, 1]",
    ),
    (
        {"attention_dropout": None},
        ValueError,
        "attention_dropout is None, expected a number in [0, 1]",
    ),
    (
        {"attention_dropout": float("nan")},
        ValueError,
        "attention_dropout is nan, expected a number in",
    ),
    (
        {"qkv_format": "bhsd"},
        ValueError,
        "qkv_format is 'bhsd', expected one of 'sbhd', 'bshd', 'thd'",
    ),
    (
        {"attn_mask_type": "diagonal"},
        ValueError,
        "attn_mask_type is 'diagonal', expected one of 'no_mask'",
    ),
    (
        {"attention_type": "mixed"},
        ValueError,
        "attention_type is 'mixed', expected 'self' or 'cross'",
    ),
    (
        {"softmax_type": "sink"},
        ValueError,
        "softmax_type is 'sink', expected one of 'vanilla', 'off-by-one'",
    ),
    (
        {"cp_group": "ring"},
        NotImplementedError,
        "cp_group is 'ring' (cp_comm_type 'p2p'), expected None",
    ),
]


@pytest.mark.parametrize(
    ("options", "error", "text"), CONSTRUCTOR, ids=[str(c[0]) for c in CONSTRUCTOR]
)
def test_constructor(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        module(**options)
    assert text in str(caught.value)


Q, K, V, DOUT = made()
PADDING = torch.zeros(B, 1, 1, S, dtype=torch.bool)
PAIRS = torch.zeros(B, 1, S, S, dtype=torch.bool)
BIAS = torch.zeros(1, H, S, S, dtype=torch.float64)
QKV = torch.zeros(B, S, 3, H, D)
KV = torch.zeros(B, S, 2, G, D)
POST = {"core_attention_bias_type": "post_scale_bias"}
PADDED = {"attn_mask_type": "padding"}

# constructor, call (query_layer and the others are there unless the call says otherwise), error, text
FORWARD: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    (
        {},
        {"inference_params": "cache"},
        NotImplementedError,
        "inference_params is 'cache': not honoured",
    ),
    ({}, {"fp8_output": True}, NotImplementedError, "fp8_output is True: not honoured"),
    ({}, {"bf16_backward": True}, NotImplementedError, "bf16_backward is True: not honoured"),
    ({}, {"num_splits": 2}, NotImplementedError, "num_splits is 2: not honoured"),
    ({}, {"score_mod": "f"}, NotImplementedError, "score_mod is 'f': not honoured"),
    ({}, {"score_mod_bprop": "f"}, NotImplementedError, "score_mod_bprop is 'f': not honoured"),
    ({}, {"score_mod_tensors": {}}, NotImplementedError, "score_mod_tensors is {}: not honoured"),
    (
        {},
        {"score_mod_bprop_tensors": {}},
        NotImplementedError,
        "score_mod_bprop_tensors is {}: not honoured",
    ),
    ({}, {"query_layer": None}, ValueError, "query_layer is NoneType, expected a tensor"),
    ({}, {"value_layer": [1.0]}, ValueError, "value_layer is list, expected a tensor"),
    (
        {},
        {"query_layer": Q[:, :, :2]},
        ValueError,
        "query_layer has 2 heads of dim 6, expected 4 of 6",
    ),
    ({}, {"key_layer": K[..., :5]}, ValueError, "key_layer has 2 heads of dim 5, expected 2 of 6"),
    (
        {},
        {"value_layer": V[..., :2]},
        ValueError,
        "value_layer has 2 heads of dim 2, expected 2 of 3",
    ),
    ({}, {"query_layer": Q[0]}, ValueError, "query has shape [5, 4, 6], expected 4 dims"),
    (
        {},
        {"key_layer": K.float()},
        ValueError,
        "key has dtype torch.float32, expected query's dtype",
    ),
    (
        {},
        {"key_layer": K[:1], "value_layer": V[:1]},
        ValueError,
        "key has batch 1, expected query's batch, 2",
    ),
    (
        {},
        {"value_layer": V[:, :3]},
        ValueError,
        "value has shape [2, 3, 2, 3], expected [2, 5, 2] + [Dv]",
    ),
    ({}, {"qkv_format": "sbdh"}, ValueError, "qkv_format is 'sbdh', expected one of"),
    (
        {},
        {"attn_mask_type": "causal_left"},
        ValueError,
        "attn_mask_type is 'causal_left', expected one of",
    ),
    (
        {},
        {"window_size": (-2, 0)},
        ValueError,
        "window_size is (-2, 0), expected two ints of at least -1",
    ),
    ({}, {"window_size": 4}, ValueError, "window_size is 4, expected (left, right) or None"),
    (
        {},
        {"bottom_right_diagonal": True},
        ValueError,
        "bottom_right_diagonal is True, but attn_mask_type 'causal'",
    ),
    (
        {"softmax_scale": float("inf")},
        {},
        ValueError,
        "softmax_scale is inf, expected a finite number",
    ),
    ({"softcap": -1.0}, {}, ValueError, "softcap is -1.0, expected a positive number"),
    ({"backend": "magic"}, {}, ValueError, "backend is 'magic', expected 'auto' or one of"),
    ({"backend": 3}, {}, ValueError, "backend is 3, expected 'auto', a backend's name"),
    ({"check_inputs": 1}, {}, ValueError, "check_inputs is 1, expected True, False or None"),
    ({"deterministic": None}, {}, ValueError, "deterministic is None, expected True or False"),
    (
        {},
        {"core_attention_bias_type": "mid"},
        ValueError,
        "core_attention_bias_type is 'mid', expected one of",
    ),
    (
        {},
        {"core_attention_bias": BIAS},
        ValueError,
        "core_attention_bias is given with core_attention_bias_type 'no_bias'",
    ),
    (
        {},
        POST,
        ValueError,
        "core_attention_bias is None with core_attention_bias_type 'post_scale_bias'",
    ),
    (
        {},
        {**POST, "core_attention_bias": BIAS[..., :2]},
        ValueError,
        "bias has shape [1, 4, 5, 2], expected",
    ),
    (
        {},
        {"alibi_slopes": torch.ones(H)},
        ValueError,
        "alibi_slopes is given with core_attention_bias_type 'no_bias'",
    ),
    (
        {},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(H - 1)},
        ValueError,
        "alibi_slopes has shape [3], expected [4] or [2, 4]",
    ),
    (
        {},
        {"cu_seqlens_q": cu(5, 5)},
        ValueError,
        "cu_seqlens_q is given with attn_mask_type 'causal'",
    ),
    ({}, PADDED, ValueError, "attn_mask_type is 'padding' but there are no lengths"),
    (
        {},
        {**PADDED, "cu_seqlens_q": cu(5, 5)},
        ValueError,
        "cu_seqlens_kv is None, expected int32 [B + 1]",
    ),
    (
        {},
        {**PADDED, "cu_seqlens_q": cu(5, 6), "cu_seqlens_kv": cu(5, 5)},
        ValueError,
        "cu_seqlens_q is [0, 5, 11]: a sequence of 6, expected at most 5",
    ),
    (
        {},
        {**PADDED, "attention_mask": PADDING, "cu_seqlens_q": cu(5, 5), "cu_seqlens_kv": cu(5, 5)},
        ValueError,
        "attention_mask and cu_seqlens are both given",
    ),
    (
        {},
        {**PADDED, "attention_mask": PADDING.int()},
        ValueError,
        "attention_mask has dtype torch.int32, expected torch.bool",
    ),
    (
        {},
        {**PADDED, "attention_mask": PAIRS},
        ValueError,
        "attention_mask has shape [2, 1, 5, 5], expected [2, 1, 1, 5]",
    ),
    (
        {},
        {"attn_mask_type": "arbitrary"},
        ValueError,
        "attention_mask is None, expected a bool tensor",
    ),
    (
        {},
        {"attn_mask_type": "arbitrary", "attention_mask": PAIRS[..., :3]},
        ValueError,
        "attention_mask has shape [2, 1, 5, 3]",
    ),
    (
        {},
        {"cu_seqlens_q_padded": cu(5, 5)},
        ValueError,
        "cu_seqlens_q_padded is given, expected it only with",
    ),
    (
        {},
        {"max_seqlen_q": 4},
        ValueError,
        "max_seqlen_q is 4, expected at least the sequence length, 5",
    ),
    ({}, {"qkv_layer": QKV}, ValueError, "query_layer is given beside qkv_layer, expected None"),
    ({}, {"kv_layer": KV}, ValueError, "key_layer is given beside kv_layer, expected None"),
    ({}, {"qkv_layer": QKV, "kv_layer": KV}, ValueError, "qkv_layer and kv_layer are both given"),
]


@pytest.mark.parametrize(
    ("options", "call", "error", "text"), FORWARD, ids=[c[3][:50] for c in FORWARD]
)
def test_forward(
    options: dict[str, Any], call: dict[str, Any], error: type[Exception], text: str
) -> None:
    attention = module(qkv_format="bshd", **options)
    with pytest.raises(error) as caught:
        attention(**{"query_layer": Q, "key_layer": K, "value_layer": V, **call})
    assert text in str(caught.value)


PACKED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"kv_layer": KV}, "query_layer is None beside kv_layer, expected the query"),
    ({}, {"qkv_layer": QKV}, "qkv_layer is given with 2 groups for 4 heads"),
    ({"num_gqa_groups": H, "kv_channels": (D, DV)}, {"qkv_layer": QKV}, "head dims 6 and 3, expected them to be equal"),
    ({"kv_channels": (D, DV)}, {"query_layer": Q, "kv_layer": KV}, "kv_layer is given with head dims 6 and 3"),
    ({"num_gqa_groups": H}, {"qkv_layer": QKV, "qkv_interleave_dim": -1}, "qkv_interleave_dim is -1, expected -3 or"),
    ({"num_gqa_groups": H}, {"qkv_layer": QKV, "qkv_interleave_dim": -2}, "qkv_layer is [2, 5, 3, 4, 6], expected 5"),
    ({"num_gqa_groups": H}, {"qkv_layer": QKV[0, 0]}, "qkv_layer is [3, 4, 6], expected 5 dims"),
    ({"num_gqa_groups": H}, {"qkv_layer": "qkv"}, "qkv_layer is str, expected 5 dims"),
    ({"num_gqa_groups": H}, {"qkv_layer": QKV[..., :4]}, "qkv_layer has 4 heads of dim 4, expected 4 of 6"),
    ({"num_gqa_groups": H}, {"qkv_layer": QKV[0]}, "query has shape [5, 4, 6], expected 4 dims"),
    ({}, {"query_layer": Q, "kv_layer": torch.zeros(B, S, 2, H, D)}, "kv_layer has 4 heads of dim 6, expected 2 of 6"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "call", "text"), PACKED, ids=[c[2][:50] for c in PACKED])
def test_packed(options: dict[str, Any], call: dict[str, Any], text: str) -> None:
    attention = module(**{"kv_channels": D, "qkv_format": "bshd", **options})
    with pytest.raises(InvalidProblem) as caught:
        attention(**call)
    assert text in str(caught.value)


THD: list[tuple[dict[str, Any], str]] = [
    (
        {"attn_mask_type": "causal"},
        "attn_mask_type is 'causal' with qkv_format 'thd', expected a padding mask",
    ),
    ({"cu_seqlens_q": None, "cu_seqlens_kv": None}, "cu_seqlens_q and cu_seqlens_kv are None"),
    ({"cu_seqlens_q": cu(5, 5).long()}, "cu_seqlens_q has dtype torch.int64, expected torch.int32"),
    ({"cu_seqlens_kv": cu(5, 5, 0)}, "cu_seqlens_kv has shape [4], expected [3] (batch + 1)"),
    ({"cu_seqlens_kv": [0, 5, 10]}, "cu_seqlens_kv is list, expected an int32 tensor"),
    (
        {"cu_seqlens_q": cu(6, -1)},
        "cu_seqlens_q is [0, 6, 5], expected non-negative values that never decrease",
    ),
    (
        {"cu_seqlens_q": cu(5, 6)},
        "cu_seqlens_q ends at 11, expected at most the tensor's 10 tokens",
    ),
    (
        {"cu_seqlens_q_padded": cu(4, 6)},
        "cu_seqlens_q_padded gives sequence 0 4 places, expected at least its length",
    ),
    (
        {"max_seqlen_kv": 3},
        "max_seqlen_kv is 3, expected at least the longest sequence in cu_seqlens_kv, 5",
    ),
    ({"max_seqlen_kv": -3}, "max_seqlen_kv is -3, expected a non-negative int or None"),
    ({"query_layer": Q}, "query has shape [2, 5, 4, 6], expected 3 dims, [tokens, H, D]"),
]


@pytest.mark.parametrize(("call", "text"), THD, ids=[c[1][:50] for c in THD])
def test_thd(call: dict[str, Any], text: str) -> None:
    q, k, v = (stored(t, "thd") for t in (Q, K, V))
    attention = module(qkv_format="thd", attn_mask_type="padding_causal")
    given = {"query_layer": q, "key_layer": k, "value_layer": v, **lengths("thd"), **call}
    with pytest.raises(InvalidProblem) as caught:
        attention(**given)
    assert text in str(caught.value)


def test_slopes_get_no_gradient() -> None:
    slopes = torch.ones(H, requires_grad=True)
    with pytest.raises(
        InvalidProblem, match=r"alibi_slopes\.requires_grad is True, expected False"
    ):
        module(qkv_format="bshd")(Q, K, V, core_attention_bias_type="alibi", alibi_slopes=slopes)


def test_context_parallel_group_is_refused_later_too() -> None:
    attention = module()
    attention.set_context_parallel_group(None, None, None)
    with pytest.raises(NotImplementedError, match="cp_group is 'ring'"):
        attention.set_context_parallel_group("ring", [0, 1], None, "a2a")


def test_named_backend_that_refuses_says_why() -> None:
    with pytest.raises(NotImplementedError, match="sdpa_flash: "):
        module(qkv_format="bshd", backend="sdpa_flash", softcap=1.0)(Q, K, V)
