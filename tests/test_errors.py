"""Contradictory calls: each raises, and the message names the argument, its value and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import gradtruth
from gradtruth import InvalidProblem

B, S, T, H, G, D = 2, 4, 6, 4, 2, 8
DENSE = {"query": (B, S, H, D), "key": (B, T, G, D), "value": (B, T, G, D)}
THD = {"query": (S, H, D), "key": (T, G, D), "value": (T, G, D)}


def cu(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def dense(**changes: Any) -> dict[str, Any]:
    return {**{n: torch.ones(s) for n, s in DENSE.items()}, **changes}


def thd(**changes: Any) -> dict[str, Any]:
    made = {n: torch.ones(s) for n, s in THD.items()}
    base = {
        "qkv_format": "thd",
        "attn_mask_type": "padding",
        "cu_seqlens_q": cu(0, 2, 4),
        "cu_seqlens_kv": cu(0, 3, 6),
    }
    return {**made, **base, **changes}


def padded(**changes: Any) -> dict[str, Any]:
    base = {"attn_mask_type": "padding", "cu_seqlens_q": cu(0, 2, 4), "cu_seqlens_kv": cu(0, 3, 6)}
    return {**dense(), **base, **changes}


class Wrong(NamedTuple):
    arguments: Callable[[], dict[str, Any]]
    words: tuple[str, ...]


WRONG = {
    # ranks, shapes, dtypes, devices of query, key, value
    "query_list": Wrong(lambda: dense(query=[1.0]), ("query", "list", "Tensor")),
    "query_none": Wrong(lambda: dense(query=None), ("query", "NoneType", "Tensor")),
    "key_none": Wrong(lambda: dense(key=None), ("key", "NoneType", "Tensor")),
    "value_numpy": Wrong(
        lambda: dense(value=torch.ones(DENSE["value"]).numpy()), ("value", "ndarray")
    ),
    "query_rank3": Wrong(
        lambda: dense(query=torch.ones(S, H, D)), ("query", "[4, 4, 8]", "4 dims")
    ),
    "thd_rank4": Wrong(
        lambda: thd(query=torch.ones(1, S, H, D)), ("query", "[1, 4, 4, 8]", "3 dims")
    ),
    "key_rank5": Wrong(lambda: dense(key=torch.ones(1, B, T, G, D)), ("key", "4 dims")),
    "int_query": Wrong(
        lambda: dense(query=torch.ones(DENSE["query"], dtype=torch.int32)),
        ("query", "int32", "float16"),
    ),
    "complex_query": Wrong(
        lambda: dense(query=torch.ones(DENSE["query"], dtype=torch.complex64)),
        ("query", "complex64"),
    ),
    "fp8_query": Wrong(
        lambda: {n: torch.ones(s).to(torch.float8_e4m3fn) for n, s in DENSE.items()},
        ("query", "float8", "bfloat16"),
    ),
    "key_dtype": Wrong(
        lambda: dense(key=torch.ones(DENSE["key"]).half()), ("key", "float16", "float32")
    ),
    "value_dtype": Wrong(
        lambda: dense(value=torch.ones(DENSE["value"]).double()), ("value", "float64", "float32")
    ),
    "key_device": Wrong(
        lambda: dense(key=torch.ones(DENSE["key"], device="meta")), ("key", "meta", "cpu")
    ),
    "sparse_query": Wrong(
        lambda: dense(query=torch.ones(DENSE["query"]).to_sparse()), ("query", "sparse", "strided")
    ),
    "nested_query": Wrong(
        lambda: dense(
            query=torch.nested.nested_tensor(
                [torch.ones(2, H, D), torch.ones(3, H, D)], layout=torch.jagged
            )
        ),
        ("query", "thd"),
    ),
    "heads_not_divisible": Wrong(
        lambda: dense(key=torch.ones(B, T, 3, D), value=torch.ones(B, T, 3, D)),
        ("4 heads", "multiple", "3"),
    ),
    "more_kv_heads": Wrong(
        lambda: dense(key=torch.ones(B, T, 8, D), value=torch.ones(B, T, 8, D)),
        ("4 heads", "multiple", "8"),
    ),
    "no_heads": Wrong(
        lambda: dense(key=torch.ones(B, T, 0, D), value=torch.ones(B, T, 0, D)),
        ("heads", "multiple", "0"),
    ),
    "kv_heads_differ": Wrong(
        lambda: dense(value=torch.ones(B, T, 4, D)), ("value", "[2, 6, 4, 8]", "[2, 6, 2]")
    ),
    "kv_lengths_differ": Wrong(
        lambda: dense(value=torch.ones(B, 5, G, D)), ("value", "[2, 5, 2, 8]", "[2, 6, 2]")
    ),
    "batches_differ": Wrong(
        lambda: dense(key=torch.ones(3, T, G, D), value=torch.ones(3, T, G, D)),
        ("key", "batch 3", "2"),
    ),
    "head_dims_differ": Wrong(lambda: dense(key=torch.ones(B, T, G, 16)), ("key", "16", "8")),
    "head_dim_zero": Wrong(
        lambda: dense(query=torch.ones(B, S, H, 0), key=torch.ones(B, T, G, 0)),
        ("head dims", "0", "at least 1"),
    ),
    # names
    "format": Wrong(lambda: dense(qkv_format="bhsd"), ("qkv_format", "bhsd", "sbhd")),
    "format_none": Wrong(lambda: dense(qkv_format=None), ("qkv_format", "None", "sbhd")),
    "mask_type": Wrong(
        lambda: dense(attn_mask_type="casual"), ("attn_mask_type", "casual", "causal_bottom_right")
    ),
    "mask_type_none": Wrong(lambda: dense(attn_mask_type=None), ("attn_mask_type", "None")),
    "mask_type_bool": Wrong(lambda: dense(attn_mask_type=True), ("attn_mask_type", "True")),
    "bias_type": Wrong(lambda: dense(bias_type="alibi"), ("bias_type", "alibi", "post_scale_bias")),
    "softmax_type": Wrong(
        lambda: dense(softmax_type="off_by_one"), ("softmax_type", "off_by_one", "off-by-one")
    ),
    "backend": Wrong(lambda: dense(backend="flash"), ("backend", "flash", "reference")),
    "backend_pair": Wrong(
        lambda: dense(backend=("reference", "flash")), ("backend", "flash", "reference")
    ),
    "backend_triple": Wrong(lambda: dense(backend=("reference",) * 3), ("backend", "pair")),
    "backend_none": Wrong(lambda: dense(backend=None), ("backend", "None", "auto")),
    # windows and alignment
    "window_scalar": Wrong(lambda: dense(window_size=4), ("window_size", "4", "(left, right)")),
    "window_three": Wrong(
        lambda: dense(window_size=(1, 2, 3)), ("window_size", "(1, 2, 3)", "(left, right)")
    ),
    "window_minus_two": Wrong(
        lambda: dense(window_size=(-2, 0)), ("window_size", "(-2, 0)", "at least -1")
    ),
    "window_float": Wrong(lambda: dense(window_size=(4.0, 0)), ("window_size", "4.0", "ints")),
    "window_bool": Wrong(lambda: dense(window_size=(True, False)), ("window_size", "True", "ints")),
    "diagonal_causal": Wrong(
        lambda: dense(attn_mask_type="causal", bottom_right_diagonal=True),
        ("bottom_right_diagonal", "True", "top-left"),
    ),
    "diagonal_bottom_right": Wrong(
        lambda: dense(attn_mask_type="causal_bottom_right", bottom_right_diagonal=False),
        ("bottom_right_diagonal", "False", "bottom-right"),
    ),
    "diagonal_string": Wrong(
        lambda: dense(bottom_right_diagonal="yes"), ("bottom_right_diagonal", "yes", "True")
    ),
    # lengths
    "thd_dense_mask": Wrong(
        lambda: thd(attn_mask_type="causal"), ("attn_mask_type", "causal", "padding_causal")
    ),
    "thd_no_mask": Wrong(
        lambda: thd(attn_mask_type="no_mask"), ("attn_mask_type", "no_mask", "padding")
    ),
    "thd_arbitrary": Wrong(
        lambda: thd(attn_mask_type="arbitrary", attention_mask=mask(1, 1, 1, 1)),
        ("attn_mask_type", "arbitrary,padding"),
    ),
    "thd_no_lengths": Wrong(
        lambda: thd(cu_seqlens_q=None, cu_seqlens_kv=None), ("cu_seqlens_q", "None", "int32")
    ),
    "thd_one_length": Wrong(lambda: thd(cu_seqlens_kv=None), ("cu_seqlens_kv", "None", "int32")),
    "cu_with_no_mask": Wrong(
        lambda: padded(attn_mask_type="no_mask"), ("cu_seqlens_q", "no_mask", "padding")
    ),
    "cu_with_causal": Wrong(
        lambda: padded(attn_mask_type="causal"), ("cu_seqlens_q", "causal", "padding_causal")
    ),
    "cu_int64": Wrong(
        lambda: padded(cu_seqlens_q=cu(0, 2, 4, dtype=torch.int64)),
        ("cu_seqlens_q", "int64", "int32"),
    ),
    "cu_float": Wrong(
        lambda: padded(cu_seqlens_kv=torch.tensor([0.0, 2.0, 4.0])),
        ("cu_seqlens_kv", "float32", "int32"),
    ),
    "cu_list": Wrong(lambda: padded(cu_seqlens_q=[0, 2, 4]), ("cu_seqlens_q", "list", "int32")),
    "cu_short": Wrong(lambda: padded(cu_seqlens_q=cu(0, 2)), ("cu_seqlens_q", "[2]", "[3]")),
    "cu_rank": Wrong(
        lambda: padded(cu_seqlens_q=cu(0, 2, 4)[None]), ("cu_seqlens_q", "[1, 3]", "[3]")
    ),
    "cu_device": Wrong(
        lambda: padded(cu_seqlens_q=torch.zeros(3, dtype=torch.int32, device="meta")),
        ("cu_seqlens_q", "meta", "cpu"),
    ),
    "cu_kv_batch": Wrong(
        lambda: thd(cu_seqlens_kv=cu(0, 2, 4, 6)), ("cu_seqlens_kv", "[4]", "[3]")
    ),
    "cu_decreasing": Wrong(
        lambda: padded(cu_seqlens_q=cu(0, 3, 2)), ("cu_seqlens_q", "[0, 3, 2]", "never decrease")
    ),
    "cu_negative": Wrong(
        lambda: thd(cu_seqlens_q=cu(-1, 2, 4)), ("cu_seqlens_q", "[-1, 2, 4]", "non-negative")
    ),
    "cu_too_long": Wrong(
        lambda: padded(cu_seqlens_q=cu(0, 5, 6)), ("cu_seqlens_q", "5", "at most 4")
    ),
    "cu_past_end": Wrong(
        lambda: thd(cu_seqlens_kv=cu(0, 3, 7)), ("cu_seqlens_kv", "7", "6 tokens")
    ),
    "cu_padded_dense": Wrong(
        lambda: padded(cu_seqlens_q_padded=cu(0, 2, 4)), ("cu_seqlens_q_padded", "thd")
    ),
    "cu_padded_alone": Wrong(
        lambda: thd(cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=cu(0, 2, 4)),
        ("cu_seqlens_q", "None"),
    ),
    "cu_padded_dtype": Wrong(
        lambda: thd(cu_seqlens_q_padded=cu(0, 2, 4, dtype=torch.int64)),
        ("cu_seqlens_q_padded", "int64", "int32"),
    ),
    "cu_padded_past_end": Wrong(
        lambda: thd(cu_seqlens_q_padded=cu(0, 2, 5)), ("cu_seqlens_q_padded", "5", "4 tokens")
    ),
    "cu_padded_overlap": Wrong(
        lambda: thd(cu_seqlens_kv=cu(0, 3, 5), cu_seqlens_kv_padded=cu(0, 2, 6)),
        ("cu_seqlens_kv_padded", "2", "3"),
    ),
    "cu_padded_decreasing": Wrong(
        lambda: thd(cu_seqlens_q_padded=cu(2, 0, 4)),
        ("cu_seqlens_q_padded", "[2, 0, 4]", "never decrease"),
    ),
    "padding_without_lengths": Wrong(
        lambda: dense(attn_mask_type="padding"),
        ("attn_mask_type", "padding", "cu_seqlens_q", "attention_mask"),
    ),
    "padding_both": Wrong(
        lambda: padded(attention_mask=mask(B, S)),
        ("attention_mask", "cu_seqlens", "arbitrary,padding"),
    ),
    "padding_one_mask": Wrong(
        lambda: dense(attn_mask_type="padding", attention_mask=mask(B, 1, 1, S)),
        ("attention_mask", "pair"),
    ),
    "padding_mask_shape": Wrong(
        lambda: dense(attn_mask_type="padding", attention_mask=(mask(B, S), mask(B, 1, T, T))),
        ("attention_mask[1]", "[2, 1, 6, 6]", "[2, 1, 1, 6]"),
    ),
    "padding_mask_dtype": Wrong(
        lambda: dense(
            attn_mask_type="padding", attention_mask=(mask(B, S), mask(B, T, dtype=torch.float32))
        ),
        ("attention_mask[1]", "float32", "bool"),
    ),
    "padding_mask_triple": Wrong(
        lambda: dense(attn_mask_type="padding", attention_mask=(mask(B, S),) * 3),
        ("attention_mask", "3 parts", "two"),
    ),
    "max_seqlen_small": Wrong(lambda: padded(max_seqlen_q=1), ("max_seqlen_q", "1", "2")),
    "max_seqlen_under_a_padding_mask": Wrong(
        lambda: dense(
            attn_mask_type="padding", attention_mask=(mask(B, S), mask(B, T)), max_seqlen_kv=5
        ),
        ("max_seqlen_kv", "5", "attention_mask, 6"),
    ),
    "scale_beyond_float": Wrong(lambda: dense(softmax_scale=10**400), ("softmax_scale", "finite")),
    "max_seqlen_full": Wrong(lambda: dense(max_seqlen_kv=5), ("max_seqlen_kv", "5", "6")),
    "max_seqlen_negative": Wrong(
        lambda: padded(max_seqlen_q=-1), ("max_seqlen_q", "-1", "non-negative")
    ),
    "max_seqlen_tensor": Wrong(
        lambda: padded(max_seqlen_q=torch.tensor(4)), ("max_seqlen_q", "int")
    ),
    # attention_mask
    "mask_not_read": Wrong(
        lambda: dense(attn_mask_type="causal", attention_mask=mask(1, 1, S, T)),
        ("attention_mask", "causal", "arbitrary"),
    ),
    "mask_missing": Wrong(
        lambda: dense(attn_mask_type="arbitrary"), ("attention_mask", "None", "bool")
    ),
    "mask_dtype": Wrong(
        lambda: dense(
            attn_mask_type="arbitrary", attention_mask=mask(1, 1, S, T, dtype=torch.float32)
        ),
        ("attention_mask", "float32", "bool"),
    ),
    "mask_rank": Wrong(
        lambda: dense(attn_mask_type="arbitrary", attention_mask=mask(S, T)),
        ("attention_mask", "[4, 6]", "four dims"),
    ),
    "mask_shape": Wrong(
        lambda: dense(attn_mask_type="arbitrary", attention_mask=mask(B, G, S, T)),
        ("attention_mask", "[2, 2, 4, 6]", "1|4"),
    ),
    "mask_pair": Wrong(
        lambda: dense(attn_mask_type="arbitrary", attention_mask=(mask(1, 1, S, T),) * 2),
        ("attention_mask", "tuple"),
    ),
    "mask_without_lengths": Wrong(
        lambda: dense(attn_mask_type="arbitrary,padding", attention_mask=mask(1, 1, S, T)),
        ("cu_seqlens_q", "None"),
    ),
    # bias, slopes, sink
    "bias_rank": Wrong(lambda: dense(bias=torch.ones(S, T)), ("bias", "[4, 6]", "four dims")),
    "bias_shape": Wrong(
        lambda: dense(bias=torch.ones(1, H, S, S)), ("bias", "[1, 4, 4, 4]", "1|6")
    ),
    "bias_batch": Wrong(
        lambda: dense(bias=torch.ones(3, 1, S, T)), ("bias", "[3, 1, 4, 6]", "1|2")
    ),
    "bias_dtype": Wrong(
        lambda: dense(bias=torch.ones(1, 1, S, T).half()), ("bias", "float16", "float32")
    ),
    "bias_device": Wrong(
        lambda: dense(bias=torch.ones(1, 1, S, T, device="meta")), ("bias", "meta", "cpu")
    ),
    "bias_thd_shape": Wrong(
        lambda: thd(bias=torch.ones(1, 1, 7, 3), max_seqlen_q=2), ("bias", "[1, 1, 7, 3]", "1|2")
    ),
    "bias_and_mask_thd": Wrong(
        lambda: thd(
            attn_mask_type="arbitrary,padding",
            attention_mask=mask(1, 1, 4, 1),
            bias=torch.ones(1, 1, 3, 1),
        ),
        ("bias", "[1, 1, 3, 1]", "4"),
    ),
    "slopes_shape": Wrong(
        lambda: dense(alibi_slopes=torch.ones(G)), ("alibi_slopes", "[2]", "[4]")
    ),
    "slopes_dtype": Wrong(
        lambda: dense(alibi_slopes=torch.ones(H).half()), ("alibi_slopes", "float16", "float32")
    ),
    "slopes_list": Wrong(lambda: dense(alibi_slopes=[1.0] * H), ("alibi_slopes", "list", "Tensor")),
    "slopes_grad": Wrong(
        lambda: dense(alibi_slopes=torch.ones(H, requires_grad=True)),
        ("alibi_slopes", "requires_grad", "False"),
    ),
    "sink_missing": Wrong(
        lambda: dense(softmax_type="learnable"), ("softmax_offset", "None", "[4]")
    ),
    "sink_unused": Wrong(
        lambda: dense(softmax_offset=torch.zeros(H)), ("softmax_offset", "vanilla", "learnable")
    ),
    "sink_shape": Wrong(
        lambda: dense(softmax_type="learnable", softmax_offset=torch.zeros(1, H, 1, 1)),
        ("softmax_offset", "[1, 4, 1, 1]", "[4]"),
    ),
    "sink_dtype": Wrong(
        lambda: dense(softmax_type="learnable", softmax_offset=torch.zeros(H, dtype=torch.int64)),
        ("softmax_offset", "int64", "float32"),
    ),
    # numbers
    "scale_nan": Wrong(
        lambda: dense(softmax_scale=float("nan")), ("softmax_scale", "nan", "finite")
    ),
    "scale_inf": Wrong(
        lambda: dense(softmax_scale=float("inf")), ("softmax_scale", "inf", "finite")
    ),
    "scale_tensor": Wrong(
        lambda: dense(softmax_scale=torch.tensor(0.1)), ("softmax_scale", "tensor", "number")
    ),
    "scale_string": Wrong(lambda: dense(softmax_scale="auto"), ("softmax_scale", "auto", "number")),
    "softcap_zero": Wrong(lambda: dense(softcap=0.0), ("softcap", "0.0", "positive")),
    "softcap_negative": Wrong(lambda: dense(softcap=-30), ("softcap", "-30", "positive")),
    "dropout_negative": Wrong(lambda: dense(dropout_p=-0.1), ("dropout_p", "-0.1", "[0, 1]")),
    "dropout_above_one": Wrong(lambda: dense(dropout_p=1.5), ("dropout_p", "1.5", "[0, 1]")),
    "dropout_nan": Wrong(lambda: dense(dropout_p=float("nan")), ("dropout_p", "nan", "finite")),
    "dropout_bool": Wrong(lambda: dense(dropout_p=True), ("dropout_p", "True", "number")),
    "seed_float": Wrong(
        lambda: dense(dropout_p=0.1, dropout_seed=1.5), ("dropout_seed", "1.5", "int64")
    ),
    "seed_int32": Wrong(
        lambda: dense(dropout_p=0.1, dropout_seed=torch.tensor(1, dtype=torch.int32)),
        ("dropout_seed", "int32", "int64"),
    ),
    "seed_shape": Wrong(
        lambda: dense(dropout_p=0.1, dropout_seed=torch.zeros(2, dtype=torch.int64)),
        ("dropout_seed", "[2]", "one"),
    ),
    "seed_too_large": Wrong(
        lambda: dense(dropout_p=0.1, dropout_seed=2**63), ("dropout_seed", str(2**63), "64-bit")
    ),
    "deterministic_int": Wrong(
        lambda: dense(deterministic=1), ("deterministic", "1", "True or False")
    ),
    "invariant_none": Wrong(
        lambda: dense(batch_invariant=None), ("batch_invariant", "None", "True or False")
    ),
    "check_inputs_string": Wrong(
        lambda: dense(check_inputs="yes"), ("check_inputs", "yes", "True")
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(
    "function", [gradtruth.attention, gradtruth.attention_with_lse, gradtruth.attention_forward]
)
def test_contradiction_is_named(function: Callable[..., Any], name: str) -> None:
    if name == "slopes_grad" and function is gradtruth.attention_forward:
        return  # without autograd nobody asks for the gradient
    wrong = WRONG[name]
    arguments = wrong.arguments()
    with pytest.raises(ValueError, match=r".") as caught:
        function(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)
    assert isinstance(caught.value, InvalidProblem)
    message = str(caught.value)
    assert "expected" in message or "cannot" in message or "are both given" in message
    for word in wrong.words:
        assert word in message, f"{word!r} is missing in {message!r}"


def test_enough_contradictions() -> None:
    assert len(WRONG) >= 100


@pytest.mark.parametrize("good", [dense, thd, padded])
def test_the_calls_are_right_before_they_are_changed(good: Callable[[], dict[str, Any]]) -> None:
    arguments = good()
    out = gradtruth.attention(
        arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments
    )
    # ones attend to ones, in the first sequence's first two rows at least
    first = out[:2] if out.dim() == 3 else out[0, :2]
    torch.testing.assert_close(first, torch.ones_like(first))


@pytest.mark.parametrize(
    "name", ["cu_int64", "scale_nan", "bias_shape", "cu_past_end", "mask_type"]
)
def test_the_second_wrong_call_raises_too(name: str) -> None:
    for _ in range(3):
        arguments = WRONG[name].arguments()
        with pytest.raises(InvalidProblem):
            gradtruth.attention(
                arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments
            )


def test_wrong_content_after_right_content() -> None:
    right, wrong = thd(), thd(cu_seqlens_kv=cu(0, 3, 7))
    gradtruth.attention(right.pop("query"), right.pop("key"), right.pop("value"), **right)
    with pytest.raises(InvalidProblem, match="cu_seqlens_kv"):
        gradtruth.attention(wrong.pop("query"), wrong.pop("key"), wrong.pop("value"), **wrong)


def test_unknown_keyword() -> None:
    q, k, v = (torch.ones(s) for s in DENSE.values())
    for function in (gradtruth.attention, gradtruth.attention_with_lse, gradtruth.explain):
        with pytest.raises(TypeError, match="is_causal"):
            function(q, k, v, is_causal=True)


def test_context_parallel_is_refused() -> None:
    q, k, v = (torch.ones(s) for s in DENSE.values())
    with pytest.raises(NotImplementedError, match="context_parallel"):
        gradtruth.attention(q, k, v, context_parallel=object())


def test_no_backend_lists_every_reason() -> None:
    q, k, v = (torch.ones(s, device="meta") for s in DENSE.values())
    with pytest.raises(NotImplementedError) as caught:
        gradtruth.attention(q, k, v)
    from gradtruth.backends import ORDER

    for name in ORDER:
        assert name in str(caught.value)


def test_named_backend_never_falls_back() -> None:
    q, k, v = (torch.ones(s) for s in DENSE.values())
    with pytest.raises(gradtruth.UnsupportedProblem, match="sdpa_cudnn"):
        gradtruth.attention(q, k, v, backend="sdpa_cudnn")


BACKWARD_WRONG = {
    "dout_shape": (
        lambda a: a | {"dout": torch.ones(B, S, H, D + 1)},
        ("dout", "[2, 4, 4, 9]", "[2, 4, 4, 8]"),
    ),
    "dout_dtype": (lambda a: a | {"dout": a["dout"].half()}, ("dout", "float16", "float32")),
    "dout_none": (lambda a: a | {"dout": None}, ("dout", "NoneType")),
    "out_dtype": (lambda a: a | {"out": a["out"].double()}, ("out", "float64", "float32")),
    "out_device": (lambda a: a | {"out": a["out"].to("meta")}, ("out", "meta", "cpu")),
    "lse_int": (lambda a: a | {"lse": a["lse"].int()}, ("lse", "int32", "float32")),
    "dlse_shape": (lambda a: a | {"dlse": torch.ones(B, H)}, ("dlse", "[2, 4]")),
    "mask_short": (lambda a: a | {"output_mask": (True, True)}, ("output_mask", "five bools")),
    "no_seed": (lambda a: a | {"dropout_p": 0.5}, ("dropout_seed", "None", "forward")),
}


@pytest.mark.parametrize("name", BACKWARD_WRONG)
def test_backward_contradiction_is_named(name: str) -> None:
    change, words = BACKWARD_WRONG[name]
    arguments = dense()
    out, lse, _ = gradtruth.attention_forward(*(arguments[n] for n in DENSE))
    with pytest.raises(InvalidProblem) as caught:
        gradtruth.attention_backward(
            **change(arguments | {"dout": torch.ones_like(out), "out": out, "lse": lse})
        )
    for word in words:
        assert word in str(caught.value)


def test_backward_lse_shape() -> None:
    q, k, v = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 4, 8), torch.ones(2, 3, 4, 8)
    out, lse, _ = gradtruth.attention_forward(q, k, v)
    with pytest.raises(InvalidProblem, match=r"lse has shape \[2, 3, 4\], expected \[2, 4, 3\]"):
        gradtruth.attention_backward(out, q, k, v, out, lse.transpose(1, 2))


@pytest.mark.parametrize("seed", [True, 2**63, -(2**63) - 1])
def test_a_seed_is_checked_after_a_legal_one_of_the_same_problem(seed: int) -> None:
    gradtruth.attention(**dense(), dropout_p=0.5, dropout_seed=1)
    with pytest.raises(InvalidProblem, match="dropout_seed"):
        gradtruth.attention(**dense(), dropout_p=0.5, dropout_seed=seed)


@pytest.mark.parametrize("value", [1e39, -1e39, 10**400])
def test_scales_beyond_fp32_are_named(value: float) -> None:
    for name in ("softmax_scale", "softcap"):
        arguments = dense(**{name: value})
        with pytest.raises(InvalidProblem, match=name):
            gradtruth.attention(
                arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments
            )


@pytest.mark.parametrize("pair", [("auto", "reference"), ("reference", "auto"), "reference,"])
def test_pairs_name_two_backends(pair: object) -> None:
    arguments = dense(backend=pair)
    with pytest.raises(InvalidProblem, match="backend is"):
        gradtruth.attention(
            arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments
        )
