"""What fused_attn_fwd and fused_attn_bwd refuse: each error names the argument, its value and the expectation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compat.te_calls import BIAS, Foreign, backward, forward
from tests.module_cases import B, H, S, cu, made

import gradtruth.compat.transformer_engine as te
from gradtruth import InvalidProblem, UnsupportedProblem

Q, K, V, DOUT = made()
THD = {
    "qkv_layout": "thd_thd_thd",
    "q": Q.flatten(0, 1),
    "k": K.flatten(0, 1),
    "v": V.flatten(0, 1),
}

BOTH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"s_quantizer": "q"}, UnsupportedProblem, "s_quantizer is 'q', expected None"),
    ({"qkv_scale_inv_format": "bhsd"}, UnsupportedProblem, "qkv_scale_inv_format is 'bhsd', expected None"),
    ({"qkv_layout": "bhsd"}, InvalidProblem, "qkv_layout is 'bhsd', expected one of 'sb3hd', 'sbh3d'"),
    ({"qkv_layout": None}, InvalidProblem, "qkv_layout is None, expected one of"),
    ({"qkv_layout": "sbhd_bshd_bshd"}, UnsupportedProblem, "qkv_layout is 'sbhd_bshd_bshd': layouts of a KV cache"),
    ({"qkv_layout": "thd_bshd_bshd"}, UnsupportedProblem, "qkv_layout is 'thd_bshd_bshd': layouts of a KV cache"),
    (
        {"qkv_layout": "paged_kv_bshd_bshd_bshd"},
        UnsupportedProblem,
        "qkv_layout is 'paged_kv_bshd_bshd_bshd': layouts of a KV cache",
    ),
    ({"o_format": "sbhd"}, UnsupportedProblem, "o_format is 'sbhd' with qkv_layout 'bshd_bshd_bshd', expected"),
    ({"fake_dtype": torch.bfloat16}, InvalidProblem, "fake_dtype is torch.bfloat16, expected q's dtype, torch.float64"),
    ({"fake_dtype": te.DType.kFloat16}, InvalidProblem, "expected q's dtype, torch.float64"),
    ({"fake_dtype": "float64"}, InvalidProblem, "fake_dtype is 'float64', expected q's dtype"),
    ({"q": None, "fake_dtype": torch.float64}, InvalidProblem, "q is NoneType, expected a torch.Tensor"),
    ({"k": K[..., :3]}, InvalidProblem, "k has head dim 3, expected query's head dim, 6"),
    ({"v": V[:, :2]}, InvalidProblem, "v has shape [2, 2, 2, 3], expected [2, 5, 2] + [Dv]"),
    ({"attn_scale": "big"}, InvalidProblem, "attn_scale is 'big', expected a finite number"),
    ({"dropout": 1.5}, InvalidProblem, "dropout is 1.5, expected a number in [0, 1]"),
    ({"attn_mask_type": "arbitrary"}, InvalidProblem, "attn_mask_type is 'arbitrary', expected a mask that takes no"),
    ({"attn_mask_type": "upper"}, InvalidProblem, "attn_mask_type is 'upper', expected one of"),
    ({"attn_bias_type": "odd"}, InvalidProblem, "attn_bias_type is 'odd', expected one of 'no_bias'"),
    ({"attn_bias_type": "post_scale_bias"}, InvalidProblem, "bias"),
    ({"softmax_type": "odd"}, InvalidProblem, "softmax_type is 'odd', expected one of 'vanilla'"),
    ({"softmax_type": "learnable"}, InvalidProblem, "softmax_offset"),
    ({"window_size": (-2, 0)}, InvalidProblem, "window_size is (-2, 0), expected two ints"),
    ({"bottom_right_diagonal": True}, InvalidProblem, "bottom_right_diagonal is True, but attn_mask_type 'causal'"),
    ({"cu_seqlens_q": cu(3, 5)}, InvalidProblem, "cu_seqlens_q is [0, 3, 8] with attn_mask_type 'causal', which"),
    ({**THD, "attn_mask_type": "causal"}, InvalidProblem, "attn_mask_type is 'causal' with qkv_format 'thd'"),
    ({"max_seqlen_q": 4}, InvalidProblem, "max_seqlen_q is 4, expected at least the sequence length, 5"),
    ({"fused_attention_backend": "FP8"}, UnsupportedProblem, "fused_attention_backend is 'FP8'"),
    ({"fused_attention_backend": Foreign.NVTE_FP8}, UnsupportedProblem, "NVTE_FP8"),
    ({"fused_attention_backend": te.FusedAttnBackend["No_Backend"]}, UnsupportedProblem, "NVTE_No_Backend"),
    ({"fused_attention_backend": "magic"}, InvalidProblem, "fused_attention_backend is 'magic', expected 'auto' or"),
    ({"fused_attention_backend": Q}, InvalidProblem, "fused_attention_backend is Tensor, expected a backend's name"),
]  # fmt: skip


@pytest.mark.parametrize("function", ["fused_attn_fwd", "fused_attn_bwd"])
@pytest.mark.parametrize(("options", "error", "text"), BOTH, ids=[c[2][:50] for c in BOTH])
def test_errors_of_both(
    function: str, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    lse = torch.zeros(B, H, S, 1)
    rng = torch.zeros(2, dtype=torch.int64)
    given = {"q": Q, "k": K, "v": V, "fake_dtype": Q.dtype, **options}
    if function == "fused_attn_bwd":
        given |= {"o": DOUT, "d_o": DOUT, "aux": [lse, rng]}
    with pytest.raises(error) as caught:
        (forward if function == "fused_attn_fwd" else backward)(**given)
    assert text in str(caught.value)


FORWARD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"page_table_k": torch.zeros(1)}, UnsupportedProblem, "page_table_k is Tensor, expected None"),
    ({"page_table_v": torch.zeros(1)}, UnsupportedProblem, "page_table_v is Tensor, expected None"),
    ({"o_quantizer": "q"}, UnsupportedProblem, "o_quantizer is 'q', expected None"),
    ({"attn_bias": BIAS}, InvalidProblem, "attn_bias has a bias with attn_bias_type 'no_bias'"),
    (
        {"attn_bias": BIAS[..., :3], "attn_bias_type": "post_scale_bias"},
        InvalidProblem,
        "attn_bias has shape [1, 4, 5, 3], expected",
    ),
    (
        {"softmax_offset": torch.zeros(H)},
        InvalidProblem,
        "softmax_offset is given with softmax_type 'vanilla'",
    ),
    (
        {"softmax_offset": torch.ones(1, H, 1, 1), "softmax_type": "off-by-one"},
        InvalidProblem,
        "softmax_offset has a softmax_offset that is not 0",
    ),
    (
        {"softmax_offset": torch.zeros(1, 1, H, 1), "softmax_type": "learnable"},
        InvalidProblem,
        "softmax_offset has shape [1, 1, 4, 1], expected [4]",
    ),
]


@pytest.mark.parametrize(("options", "error", "text"), FORWARD, ids=[c[2][:50] for c in FORWARD])
def test_errors_of_the_forward(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        forward(Q, K, V, **options)
    assert text in str(caught.value)


LSE, RNG = torch.zeros(B, H, S, 1), torch.zeros(2, dtype=torch.int64)
BACKWARD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dp_quantizer": "q"}, UnsupportedProblem, "dp_quantizer is 'q', expected None"),
    ({"dqkv_quantizer": "q"}, UnsupportedProblem, "dqkv_quantizer is 'q', expected None"),
    ({"do_scale_inv_format": "bhsd"}, UnsupportedProblem, "do_scale_inv_format is 'bhsd', expected None"),
    ({"do_format": "sbhd"}, UnsupportedProblem, "do_format is 'sbhd' with qkv_layout"),
    ({"dqkv_layout": "sbhd_sbhd_sbhd"}, UnsupportedProblem, "dqkv_layout is 'sbhd_sbhd_sbhd' with qkv_layout"),
    ({"dqkv_layout": "four"}, InvalidProblem, "dqkv_layout is 'four', expected one of"),
    ({"dqkv_layout": "bs3hd"}, InvalidProblem, "packs tensors of different shapes: q [2, 5, 4, 6], k [2, 5, 2, 6]"),
    ({"aux": LSE}, InvalidProblem, "aux_ctx_tensors is Tensor, expected a list [lse, rng_state]"),
    ({"aux": [LSE]}, InvalidProblem, "aux_ctx_tensors has 1 tensors, expected 2: lse, rng_state"),
    ({"aux": [LSE, RNG, BIAS]}, InvalidProblem, "aux_ctx_tensors has 3 tensors, expected 2: lse, rng_state"),
    (
        {"aux": [LSE, RNG, BIAS[..., :2]], "attn_bias_type": "pre_scale_bias"},
        InvalidProblem,
        "aux_ctx_tensors[2] (bias) has shape [1, 4, 5, 2]",
    ),
    ({"aux": [LSE[:1], RNG]}, InvalidProblem, "aux_ctx_tensors[0] (lse) has shape [1, 4, 5], expected [2, 4, 5]"),
    ({"aux": [LSE.int(), RNG]}, InvalidProblem, "aux_ctx_tensors[0] (lse) has dtype torch.int32, expected"),
    ({"aux": [None, RNG]}, InvalidProblem, "aux_ctx_tensors[0] (lse) is NoneType, expected a tensor"),
    ({"aux": [LSE, RNG.half()], "dropout": 0.1}, InvalidProblem, "aux_ctx_tensors[1] (rng_state) is torch.float16 [2]"),
    ({"aux": [LSE, None], "dropout": 0.1}, InvalidProblem, "aux_ctx_tensors[1] (rng_state) is NoneType with dropout"),
    ({"o": DOUT[:1]}, InvalidProblem, "o has shape [1, 5, 4, 3], expected [2, 5, 4, 3]"),
    ({"d_o": DOUT.float()}, InvalidProblem, "d_o has dtype torch.float32, expected torch.float64"),
    ({"deterministic": 1}, InvalidProblem, "deterministic is 1, expected True or False"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "text"), BACKWARD, ids=[c[2][:50] for c in BACKWARD])
def test_errors_of_the_backward(options: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"q": Q, "k": K, "v": V, "o": DOUT, "d_o": DOUT, "aux": [LSE, RNG], **options}
    with pytest.raises(error) as caught:
        backward(**given)
    assert text in str(caught.value)
