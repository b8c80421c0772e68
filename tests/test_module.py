"""DotProductAttention computes what its arguments say: against a dense fp64 definition, output and gradients."""

from __future__ import annotations

import inspect

import pytest
import torch
from tests.dense import attend, causal
from tests.module_cases import (
    CLOSE,
    FORMATS,
    SEEN,
    B,
    D,
    G,
    H,
    S,
    agree,
    bits,
    cu,
    defined,
    lengths,
    made,
    module,
    run,
    stored,
)

from gradtruth import DotProductAttention
from gradtruth.module import alibi_slopes_of

# ---------------------------------------------------------------- signature


def test_constructor_is_transformer_engines() -> None:
    found = inspect.signature(DotProductAttention).parameters.values()
    positional = {p.name: p.default for p in found if p.kind is p.POSITIONAL_OR_KEYWORD}
    missing = inspect.Parameter.empty
    assert list(positional.items()) == [
        ("num_attention_heads", missing),
        ("kv_channels", missing),
        ("num_gqa_groups", None),
        ("attention_dropout", 0.0),
        ("qkv_format", "sbhd"),
        ("attn_mask_type", "causal"),
        ("window_size", None),
        ("bottom_right_diagonal", None),
        ("sequence_parallel", False),
        ("tp_size", 1),
        ("get_rng_state_tracker", None),
        ("tp_group", None),
        ("layer_number", None),
        ("attention_type", "self"),
        ("cp_group", None),
        ("cp_global_ranks", None),
        ("cp_stream", None),
        ("cp_comm_type", "p2p"),
        ("softmax_scale", None),
        ("softmax_type", "vanilla"),
        ("return_max_logit", False),
        ("name", None),
    ]


def test_forward_is_transformer_engines() -> None:
    found = list(inspect.signature(DotProductAttention.forward).parameters.values())[1:]
    assert [(p.name, p.default) for p in found] == [
        ("query_layer", None),
        ("key_layer", None),
        ("value_layer", None),
        ("attention_mask", None),
        ("qkv_format", None),
        ("cu_seqlens_q", None),
        ("cu_seqlens_kv", None),
        ("cu_seqlens_q_padded", None),
        ("cu_seqlens_kv_padded", None),
        ("max_seqlen_q", None),
        ("max_seqlen_kv", None),
        ("attn_mask_type", None),
        ("window_size", None),
        ("bottom_right_diagonal", None),
        ("checkpoint_core_attention", False),
        ("core_attention_bias_type", "no_bias"),
        ("core_attention_bias", None),
        ("alibi_slopes", None),
        ("fast_zero_fill", True),
        ("inference_params", None),
        ("pad_between_seqs", None),
        ("fp8_output", False),
        ("bf16_backward", False),
        ("num_splits", 1),
        ("score_mod", None),
        ("score_mod_bprop", None),
        ("score_mod_tensors", None),
        ("score_mod_bprop_tensors", None),
        ("qkv_layer", None),
        ("kv_layer", None),
        ("qkv_interleave_dim", -3),
    ]


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("s", "t"), [(5, 5), (3, 7), (7, 3)])
def test_causal_in_every_format(form: str, s: int, t: int) -> None:
    tensors = made(s, t)
    attention = module(
        qkv_format=form, attn_mask_type="padding_causal" if form == "thd" else "causal"
    )
    agree(
        run(attention, form, tensors, **lengths(form, s, t)),
        defined(tensors, {"visible": causal(s, t)}),
    )


BIAS = torch.linspace(-2, 2, H * S * S, dtype=torch.float64).sin().view(1, H, S, S)
SLOPES = torch.tensor([0.5, 0.1, 0.0, 1.0])
DISTANCE = (torch.arange(S)[:, None] - torch.arange(S)).abs()
HIDDEN = torch.zeros(B, 1, S, S, dtype=torch.bool)
HIDDEN[0, 0, 1, 2], HIDDEN[1, 0, :, 0] = True, True

# name: (constructor, call, options of the definition, one per sequence or one for all)
HONOURED: dict[str, tuple[dict, dict, tuple[dict, ...]]] = {
    "softmax_scale": ({"softmax_scale": 0.7}, {}, ({"visible": SEEN, "scale": 0.7},)),
    "negative scale": ({"softmax_scale": -0.7}, {}, ({"visible": SEEN, "scale": -0.7},)),
    "softcap": ({"softcap": 0.9}, {}, ({"visible": SEEN, "softcap": 0.9},)),
    "no_mask": ({"attn_mask_type": "no_mask"}, {}, ({},)),
    "mask per call": ({}, {"attn_mask_type": "no_mask"}, ({},)),
    "window": ({"window_size": (1, 0)}, {}, ({"visible": causal(S, S, 0, 1)},)),
    "window as a list": ({"window_size": [1, 0]}, {}, ({"visible": causal(S, S, 0, 1)},)),
    "window per call": (
        {"window_size": (1, 0)},
        {"window_size": (2, 0)},
        ({"visible": causal(S, S, 0, 2)},),
    ),
    "right of the diagonal": ({"window_size": (1, 3)}, {}, ({"visible": causal(S, S, 0, 1)},)),
    "pre_scale_bias": (
        {},
        {"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": BIAS},
        ({"visible": SEEN, "pre": BIAS[0]},),
    ),
    "post_scale_bias": (
        {},
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": BIAS[:, :1]},
        ({"visible": SEEN, "post": BIAS[0, :1]},),
    ),
    "alibi": (
        {},
        {"core_attention_bias_type": "alibi"},
        ({"visible": SEEN, "post": -alibi_slopes_of(H)[:, None, None] * DISTANCE},),
    ),
    "alibi_slopes": (
        {"attn_mask_type": "no_mask"},
        {"core_attention_bias_type": "alibi", "alibi_slopes": SLOPES},
        ({"post": -SLOPES.double()[:, None, None] * DISTANCE},),
    ),
    "off-by-one": (
        {"softmax_type": "off-by-one"},
        {},
        ({"visible": SEEN, "sink": torch.zeros(H)},),
    ),
    "arbitrary": (
        {"attn_mask_type": "arbitrary"},
        {"attention_mask": HIDDEN},
        ({"visible": ~HIDDEN[0]}, {"visible": ~HIDDEN[1]}),
    ),
    "arbitrary and causal": (
        {"attn_mask_type": "arbitrary,causal"},
        {"attention_mask": HIDDEN},
        ({"visible": ~HIDDEN[0] & SEEN}, {"visible": ~HIDDEN[1] & SEEN}),
    ),
}


@pytest.mark.parametrize("name", HONOURED)
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_argument_is_honoured(name: str, form: str) -> None:
    options, call, each = HONOURED[name]
    tensors = made()
    found = run(module(qkv_format=form, **options), form, tensors, **call)
    agree(found, defined(tensors, *each))


@pytest.mark.parametrize(
    ("options", "call", "diagonal"),
    [
        ({}, {}, 2),
        ({"bottom_right_diagonal": True}, {}, 2),
        ({"bottom_right_diagonal": False}, {}, 0),
        ({"bottom_right_diagonal": True}, {"bottom_right_diagonal": False}, 0),
        ({"bottom_right_diagonal": False}, {"bottom_right_diagonal": True}, 2),
    ],
)
def test_diagonal_of_a_window(options: dict, call: dict, diagonal: int) -> None:
    tensors = made(5, 7)
    attention = module(qkv_format="bshd", attn_mask_type="no_mask", window_size=(1, 0), **options)
    agree(
        run(attention, "bshd", tensors, **call),
        defined(tensors, {"visible": causal(5, 7, diagonal, 1)}),
    )


def test_bottom_right_mask_by_name() -> None:
    tensors = made(5, 7)
    attention = module(qkv_format="bshd", attn_mask_type="causal_bottom_right")
    agree(run(attention, "bshd", tensors), defined(tensors, {"visible": causal(5, 7, 2)}))


def test_format_per_call() -> None:
    tensors = made()
    found = run(module(qkv_format="sbhd"), "bshd", tensors, qkv_format="bshd")
    agree(found, defined(tensors, {"visible": SEEN}))


def test_bias_gets_a_gradient_in_its_shape() -> None:
    tensors = made()
    bias, plain = BIAS.clone().requires_grad_(), BIAS.clone().requires_grad_()
    out = module(qkv_format="bshd")(
        *tensors[:3], core_attention_bias_type="post_scale_bias", core_attention_bias=bias
    )
    out.backward(tensors[3].flatten(-2))
    dense = [
        attend(*(t[n] for t in tensors[:3]), visible=SEEN, post=plain[0]).out for n in range(B)
    ]
    torch.stack(dense).backward(tensors[3])
    torch.testing.assert_close(bias.grad, plain.grad, **CLOSE)


def test_true_is_padding_and_left_padding_counts_from_the_first_valid_place() -> None:
    tensors = made()
    padding = torch.tensor([[True, True, False, False, False], [False, False, False, False, True]])
    places = [slice(2, 5), slice(0, 4)]
    each = ({"visible": causal(3, 3)}, {"visible": causal(4, 4)})
    wanted = defined(tensors, *each, rows=places, keys=places)
    attention = module(qkv_format="bshd", attn_mask_type="padding_causal")
    for mask in (padding[:, None, None], padding, (padding, padding)):
        found = run(attention, "bshd", tensors, attention_mask=mask)
        agree(found, wanted)
        assert not any(t[0, :2].any() or t[1, 4:].any() for t in found)


def test_masks_of_query_and_key_apart() -> None:
    tensors = made(3, 6)
    query = torch.tensor([[False, False, True], [False] * 3])[:, None, None]
    key = torch.tensor([[True] + [False] * 5, [False] * 2 + [True] * 4])[:, None, None]
    wanted = defined(tensors, {}, rows=[slice(0, 2), slice(0, 3)], keys=[slice(1, 6), slice(0, 2)])
    attention = module(qkv_format="bshd", attn_mask_type="padding", attention_type="cross")
    agree(run(attention, "bshd", tensors, attention_mask=(query, key)), wanted)


def test_lengths_in_dense_tensors() -> None:
    tensors = made(4, 5)
    wanted = defined(
        tensors,
        {"visible": causal(3, 5, 2)},
        {"visible": causal(4, 2, -2)},
        rows=[slice(0, 3), slice(0, 4)],
        keys=[slice(0, 5), slice(0, 2)],
    )
    attention = module(attn_mask_type="padding_causal_bottom_right")
    found = run(attention, "sbhd", tensors, cu_seqlens_q=cu(3, 4), cu_seqlens_kv=cu(5, 2))
    agree(found, wanted)


def test_gaps_between_packed_sequences() -> None:
    """cu_seqlens_*_padded: slots of S tokens that are not full, on both sides."""
    tensors = made(5, 6)
    rows, keys = [slice(0, 2), slice(0, 5)], [slice(0, 6), slice(0, 3)]
    wanted = defined(
        tensors, {"visible": causal(2, 6)}, {"visible": causal(5, 3)}, rows=rows, keys=keys
    )
    attention = module(qkv_format="thd", attn_mask_type="padding_causal")
    call = {
        "cu_seqlens_q": cu(2, 5),
        "cu_seqlens_kv": cu(6, 3),
        "cu_seqlens_q_padded": cu(5, 5),
        "cu_seqlens_kv_padded": cu(6, 6),
    }
    found = run(attention, "thd", tensors, **call)
    agree(found, wanted)
    assert bits(found, run(attention, "thd", tensors, **call, max_seqlen_q=5, max_seqlen_kv=64))


def test_tensor_parallel_ranks_hold_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = made()
    wanted = defined(tensors, {"visible": SEEN})
    options = {"num_attention_heads": 3 * H, "num_gqa_groups": 3 * G, "qkv_format": "bshd"}
    agree(run(module(**options, tp_size=3), "bshd", tensors), wanted)
    group = object()
    monkeypatch.setattr(torch.distributed, "get_world_size", {group: 3}.__getitem__)
    grouped = module(**options, tp_group=group, softmax_type="learnable")
    assert grouped.tp_size == 3
    assert grouped.softmax_offset.shape == (H,)


def test_input_dtype_is_the_output_dtype() -> None:
    tensors = made()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        low = [t.to(dtype) for t in tensors]
        out = module(qkv_format="bshd")(*low[:3])
        wanted = defined([t.double() for t in low], {"visible": SEEN})[0].flatten(-2)
        assert out.dtype == dtype
        error = (out.double() - wanted).abs().max() / wanted.abs().max()
        assert error < 2 * torch.finfo(dtype).eps


def test_without_effect_as_documented() -> None:
    tensors = made()
    plain = run(module(qkv_format="bshd"), "bshd", tensors)
    named = module(qkv_format="bshd", layer_number=7, name="decoder", sequence_parallel=True)
    assert bits(plain, run(named, "bshd", tensors, fast_zero_fill=False, pad_between_seqs=True))
    assert (named.layer_number, named.name) == (7, "decoder")


@pytest.mark.parametrize("mask_type", ["causal", "no_mask", "causal_bottom_right"])
def test_mask_that_is_not_read_is_accepted(mask_type: str) -> None:
    tensors = made()
    attention = module(qkv_format="bshd", attn_mask_type=mask_type)
    given = torch.ones(B, 1, S, S, dtype=torch.bool)
    assert bits(
        run(attention, "bshd", tensors), run(attention, "bshd", tensors, attention_mask=given)
    )


def test_mask_beside_packed_lengths_is_accepted() -> None:
    tensors = made()
    attention = module(qkv_format="thd", attn_mask_type="padding_causal")
    given = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    plain = run(attention, "thd", tensors, **lengths("thd"))
    assert bits(plain, run(attention, "thd", tensors, **lengths("thd"), attention_mask=given))


# ---------------------------------------------------------------- packed input


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dim", [-3, -2])
@pytest.mark.parametrize("kind", ["qkv_layer", "kv_layer"])
def test_packed_is_the_same_and_gets_its_gradient(form: str, dim: int, kind: str) -> None:
    groups = H if kind == "qkv_layer" else G
    q, k, v, dout = (stored(t, form) for t in made(dv=D, groups=groups))
    attention = module(
        kv_channels=D,
        num_gqa_groups=groups,
        qkv_format=form,
        attn_mask_type="padding_causal" if form == "thd" else "causal",
    )
    call = lengths(form)
    apart = [t.clone().requires_grad_() for t in (q, k, v)]
    wanted = attention(*apart, **call)
    grads = torch.autograd.grad(wanted, apart, dout.flatten(-2))
    parts = (q, k, v) if kind == "qkv_layer" else (k, v)
    packed = torch.stack(parts, dim).requires_grad_()
    query = q.clone().requires_grad_()
    if kind == "qkv_layer":
        out = attention(qkv_layer=packed, qkv_interleave_dim=dim, **call)
    else:
        out = attention(query, kv_layer=packed, qkv_interleave_dim=dim, **call)
    out.backward(dout.flatten(-2))
    assert torch.equal(out, wanted)
    assert packed.grad.shape == packed.shape
    assert bits(packed.grad.unbind(dim), grads[-len(parts) :])
    assert kind == "qkv_layer" or torch.equal(query.grad, grads[0])
