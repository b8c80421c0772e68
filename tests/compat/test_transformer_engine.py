"""fused_attn_fwd and fused_attn_bwd: TransformerEngine's arguments and layouts, gradtruth's values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compat.te_calls import BIAS, Foreign, backward, forward
from tests.dense import attend, causal, kept
from tests.module_cases import CLOSE, B, D, H, S, bits, cu, made, read, stored
from torch import Tensor

import gradtruth.compat.transformer_engine as te
from gradtruth import InvalidProblem
from gradtruth.backends.unfused import Unfused

SEEN = causal(S, S)
FORMS = {"sbhd": "sb", "bshd": "bs", "thd": "t"}
LAYOUTS = {
    layout: (form, packing)
    for form, lead in FORMS.items()
    for layout, packing in (
        (f"{lead}3hd", "3hd"),
        (f"{lead}h3d", "h3d"),
        (f"{form}_{lead}2hd", "2hd"),
        (f"{form}_{lead}h2d", "h2d"),
        (f"{form}_{form}_{form}", "separate"),
    )
}


def packed(packing: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of the buffers that a layout names."""
    dim = -3 if packing in ("3hd", "2hd") else -2
    if packing in ("3hd", "h3d"):
        q, k, v = torch.stack((q, k, v), dim).unbind(dim)
    elif packing in ("2hd", "h2d"):
        k, v = torch.stack((k, v), dim).unbind(dim)
    return q, k, v


def defined(
    tensors: list[Tensor], *each: dict[str, Any], extra: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    """out, lse [B, H, S], dq, dk, dv and the gradients of ``extra``; each: the definition's options per sequence."""
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    found = [attend(*(t[n] for t in leaves), **each[n % len(each)]) for n in range(B)]
    out, lse = torch.stack([f.out for f in found]), torch.stack([f.lse for f in found])
    return (out.detach(), lse, *torch.autograd.grad(out, (*leaves, *extra), tensors[3]))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, **CLOSE)


# ---------------------------------------------------------------- signatures and names


def order(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    missing = inspect.Parameter.empty
    found = inspect.signature(function).parameters.values()
    return [(p.name, ...) if p.default is missing else (p.name, p.default) for p in found]


TAIL = [("softmax_type", "vanilla"), ("window_size", (-1, -1)), ("bottom_right_diagonal", None)]


def test_forward_signature() -> None:
    required = "is_training max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv q k v fake_dtype"
    assert order(te.fused_attn_fwd) == [
        *((name, ...) for name in required.split()),
        ("fused_attention_backend", ...),
        ("attn_bias", None),
        ("cu_seqlens_q_padded", None),
        ("cu_seqlens_kv_padded", None),
        ("page_table_k", None),
        ("page_table_v", None),
        ("s_quantizer", None),
        ("o_quantizer", None),
        ("attn_scale", None),
        ("dropout", 0.0),
        ("fast_zero_fill", True),
        ("qkv_layout", "sbh3d"),
        ("o_format", "sbhd"),
        ("qkv_scale_inv_format", None),
        ("attn_bias_type", "no_bias"),
        ("attn_mask_type", "padding"),
        *TAIL,
        ("rng_gen", None),
        ("softmax_offset", None),
        ("return_max_logit", False),
        ("cuda_graph", False),
    ]


def test_backward_signature() -> None:
    required = "max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv q k v o d_o fake_dtype aux_ctx_tensors"
    assert order(te.fused_attn_bwd) == [
        *((name, ...) for name in required.split()),
        ("fused_attention_backend", ...),
        ("cu_seqlens_q_padded", None),
        ("cu_seqlens_kv_padded", None),
        ("s_quantizer", None),
        ("dp_quantizer", None),
        ("dqkv_quantizer", None),
        ("attn_scale", None),
        ("dropout", 0.0),
        ("fast_zero_fill", True),
        ("qkv_layout", "sbh3d"),
        ("o_format", "sbhd"),
        ("do_format", "sbhd"),
        ("dqkv_layout", "sbh3d"),
        ("qkv_scale_inv_format", None),
        ("do_scale_inv_format", None),
        ("attn_bias_type", "no_bias"),
        ("attn_mask_type", "padding"),
        *TAIL,
        ("deterministic", False),
        ("cuda_graph", False),
    ]


def test_module_is_gradtruths() -> None:
    from gradtruth import DotProductAttention

    assert te.DotProductAttention is DotProductAttention


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str) -> None:
    form, packing = LAYOUTS[layout]
    together = packing in ("3hd", "h3d")
    tensors = made(dv=D, groups=H if together else 2)
    q, k, v = packed(packing, *(stored(t, form) for t in tensors[:3]))
    mask = "padding_causal" if form == "thd" else "causal"
    options = {"qkv_layout": layout, "attn_mask_type": mask}
    out, aux = forward(q, k, v, **options)
    want_out, want_lse, *wanted = defined(tensors, {"visible": SEEN})
    close(read(out, form, S), want_out)
    assert out.shape == q.shape
    assert [t.shape for t in aux] == [(B * S, H, 1) if form == "thd" else (B, H, S, 1), (2,)]
    lse = aux[0][..., 0]
    close(read(lse, form, S).transpose(1, 2) if form == "thd" else lse, want_lse)
    grads = backward(q, k, v, out, stored(tensors[3], form), aux, **options)
    assert grads[3:] == [None, None]
    for found, want, source in zip(grads[:3], wanted, (q, k, v), strict=True):
        close(read(found, form, S), want)
        assert found.shape == source.shape
    dq, dk, dv = grads[:3]
    storage = [t.untyped_storage().data_ptr() for t in (dq, dk, dv)]
    shared = {"separate": 3, "2hd": 2, "h2d": 2}.get(packing, 1)
    assert len(set(storage)) == shared
    if packing != "separate":  # one buffer, in the layout that the input has
        assert (dk.stride(), dv.data_ptr() - dk.data_ptr()) == (
            k.stride(),
            v.data_ptr() - k.data_ptr(),
        )


def test_layout_of_the_gradients_may_differ() -> None:
    q, k, v, dout = made(dv=D)
    out, aux = forward(q, k, v)
    wanted = backward(q, k, v, out, dout, aux)
    found = backward(q, k, v, out, dout, aux, dqkv_layout="bshd_bsh2d")
    assert bits(wanted[:3], found[:3])
    assert found[1].untyped_storage().data_ptr() == found[2].untyped_storage().data_ptr()
    assert wanted[1].untyped_storage().data_ptr() != wanted[2].untyped_storage().data_ptr()


# ---------------------------------------------------------------- arguments


SLOPES = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8])[:, None, None]
DISTANCE = (torch.arange(S)[:, None] - torch.arange(S)).abs()

ARGUMENTS: dict[str, tuple[dict, dict]] = {
    "attn_scale": ({"attn_scale": 0.3}, {"visible": SEEN, "scale": 0.3}),
    "no_mask": ({"attn_mask_type": "no_mask"}, {}),
    "padding": ({"attn_mask_type": "padding"}, {}),
    "causal window": ({"window_size": (1, 0)}, {"visible": causal(S, S, 0, 1)}),
    "alibi": ({"attn_bias_type": "alibi"}, {"visible": SEEN, "post": -SLOPES * DISTANCE}),
    "off-by-one": ({"softmax_type": "off-by-one"}, {"visible": SEEN, "sink": torch.zeros(H)}),
    "without effect": (
        {"fast_zero_fill": False, "cuda_graph": True, "o_format": "bshd"},
        {"visible": SEEN},
    ),
    "lengths not read": ({"cu_seqlens_q": None, "cu_seqlens_kv": None}, {"visible": SEEN}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument_is_honoured(name: str) -> None:
    options, wanted = ARGUMENTS[name]
    tensors = made()
    out, aux = forward(*tensors[:3], **options)
    want_out, _, *want = defined(tensors, wanted)
    close(out, want_out)
    for found, expected in zip(
        backward(*tensors[:3], out, tensors[3], aux, **options), want, strict=False
    ):
        close(found, expected)


@pytest.mark.parametrize(("given", "diagonal"), [(None, 0), (False, 0), (True, 2)])
@pytest.mark.parametrize("mask", ["no_mask", "padding"])
def test_a_window_is_top_left_unless_told(given: bool | None, diagonal: int, mask: str) -> None:
    """The low-level functions read None off the mask's name; the module's None is bottom-right."""
    tensors = made(3, 5)
    options = {
        "attn_mask_type": mask,
        "window_size": (1, 0),
        "bottom_right_diagonal": given,
        "max_seqlen_q": 3,
        "cu_seqlens_q": cu(3, 3),
    }
    out, aux = forward(*tensors[:3], **options)
    want_out, _, *wanted = defined(tensors, {"visible": causal(3, 5, diagonal, 1)})
    close(out, want_out)
    for found, want in zip(
        backward(*tensors[:3], out, tensors[3], aux, **options), wanted, strict=False
    ):
        close(found, want)


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
def test_bias_travels_in_the_auxiliary_tensors(kind: str) -> None:
    tensors, leaf = made(), BIAS.clone().requires_grad_()
    options = {"attn_bias_type": kind}
    out, aux = forward(*tensors[:3], attn_bias=BIAS, **options)
    assert len(aux) == 3
    assert aux[2] is BIAS
    grads = backward(*tensors[:3], out, tensors[3], aux, **options)
    want_out, _, *wanted = defined(
        tensors, {"visible": SEEN, kind.split("_")[0]: leaf[0]}, extra=(leaf,)
    )
    close(out, want_out)
    for found, want in zip(grads, wanted, strict=False):
        close(found, want)
    assert grads[3].shape == BIAS.shape


@pytest.mark.parametrize("shape", [(1, H, 1, 1), (H,)])
def test_learnable_sink_beside_a_bias(shape: tuple[int, ...]) -> None:
    """The sink is the last auxiliary tensor, the bias stands before it."""
    tensors = made()
    values = torch.tensor([0.5, -1.0, 2.0, 0.0])
    sink, bias = values.double().requires_grad_(), BIAS.clone().requires_grad_()
    options = {"softmax_type": "learnable", "attn_bias_type": "post_scale_bias"}
    out, aux = forward(*tensors[:3], attn_bias=BIAS, softmax_offset=values.view(shape), **options)
    grads = backward(*tensors[:3], out, tensors[3], aux, **options)
    want_out, want_lse, *wanted = defined(
        tensors, {"visible": SEEN, "post": bias[0], "sink": sink}, extra=(bias, sink)
    )
    close(out, want_out)
    close(aux[0][..., 0], want_lse)
    for found, want in zip(grads[:4], wanted, strict=False):
        close(found, want)
    assert grads[4].shape == shape
    torch.testing.assert_close(grads[4].flatten().double(), wanted[4], rtol=1e-6, atol=1e-7)


def test_off_by_one_takes_the_zeros_that_transformer_engine_passes() -> None:
    tensors = made()
    options = {"softmax_type": "off-by-one"}
    zeros = torch.zeros(1, H, 1, 1)
    out, aux = forward(*tensors[:3], softmax_offset=zeros, **options)
    plain, shorter = forward(*tensors[:3], **options)
    assert torch.equal(out, plain)
    assert (len(aux), len(shorter)) == (3, 2)
    grads = [backward(*tensors[:3], out, tensors[3], given, **options) for given in (aux, shorter)]
    assert bits(grads[0][:3], grads[1][:3])
    assert grads[0][3:] == grads[1][3:] == [None, None]


def test_max_logit() -> None:
    tensors = made()
    _, _, top = forward(*tensors[:3], return_max_logit=True)
    scores = torch.stack(
        [attend(*(t[n] for t in tensors[:3]), visible=SEEN).scores for n in range(B)]
    )
    torch.testing.assert_close(top.double(), scores.amax((0, 2, 3)), rtol=1e-6, atol=1e-6)


def test_dropout_seed_travels_in_the_rng_state() -> None:
    p, tensors = 0.4, made()
    torch.manual_seed(3)
    out, aux = forward(*tensors[:3], dropout=p)
    assert (aux[1].dtype, aux[1].shape, int(aux[1][1])) == (torch.int64, (2,), 0)
    each = [{"visible": SEEN, "keep": kept(p, aux[1][0], n, H, S, S), "p": p} for n in range(B)]
    want_out, _, *wanted = defined(tensors, *each)
    close(out, want_out)
    for found, want in zip(
        backward(*tensors[:3], out, tensors[3], aux, dropout=p), wanted, strict=False
    ):
        close(found, want)
    torch.manual_seed(3)
    again, repeated = forward(*tensors[:3], dropout=p)
    assert torch.equal(out, again)
    assert torch.equal(aux[1], repeated[1])
    _, other = forward(*tensors[:3], dropout=p)
    assert not torch.equal(aux[1], other[1])


def test_dropout_draws_from_the_generator_it_is_given() -> None:
    tensors, before = made(), torch.get_rng_state()
    draws = [
        forward(*tensors[:3], dropout=0.4, rng_gen=torch.Generator().manual_seed(seed))[1][1][
            0
        ].item()
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(before, torch.get_rng_state())


def test_no_dropout_without_training() -> None:
    tensors, before = made(), torch.get_rng_state()
    out, aux = forward(*tensors[:3], is_training=False, dropout=0.4)
    assert torch.equal(out, forward(*tensors[:3])[0])
    assert torch.equal(before, torch.get_rng_state())
    assert len(aux) == 2


def test_no_autograd() -> None:
    tensors = [t.requires_grad_() for t in made()]
    out, aux = forward(*tensors[:3])
    assert not out.requires_grad
    assert not any(t.requires_grad for t in backward(*tensors[:3], out, tensors[3], aux)[:3])


# ---------------------------------------------------------------- out and lse from elsewhere


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("unit", [True, False], ids=["with last dim", "without"])
@pytest.mark.parametrize("form", ["thd", "bshd"])
def test_any_out_and_lse(dtype: torch.dtype, unit: bool, form: str) -> None:
    """P = exp(x - lse) and delta = d_o . o for numbers that no forward returned."""
    tensors = made()
    q, k, v, dout = tensors
    gen = torch.Generator().manual_seed(5)
    out = torch.randn(dout.shape, generator=gen, dtype=torch.float64)
    lse = torch.randn(B, S, H, generator=gen).to(dtype)
    given = stored(lse, form) if form == "thd" else lse.transpose(1, 2)
    mask = "padding_causal" if form == "thd" else "causal"
    found = backward(
        *(stored(t, form) for t in (q, k, v, out, dout)),
        [given[..., None] if unit else given, torch.randn(3, dtype=torch.float16)],
        qkv_layout="_".join([form] * 3),
        attn_mask_type=mask,
    )
    ke, ve = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    scale = D**-0.5
    x = torch.einsum("bihd,bjhd->bhij", q, ke) * scale
    weights = (x - lse.double().transpose(1, 2)[..., None]).exp() * SEEN
    delta = (dout * out).sum(-1).transpose(1, 2)[..., None]
    ds = weights * (torch.einsum("bihd,bjhd->bhij", dout, ve) - delta)
    dq = scale * torch.einsum("bhij,bjhd->bihd", ds, ke)
    dk = scale * torch.einsum("bhij,bihd->bjhd", ds, q).unflatten(2, (2, 2)).sum(3)
    dv = torch.einsum("bhij,bihd->bjhd", weights, dout).unflatten(2, (2, 2)).sum(3)
    for ours, want in zip(found[:3], (dq, dk, dv), strict=True):
        close(read(ours, form, S), want)


def report_call(*, older: bool, **changed: Any) -> list[Tensor]:
    """The call of a public report, whose argument order is the older one; the second sequence has no query."""
    gen = torch.Generator().manual_seed(42)
    q, out, dout = (torch.randn(12, 2, 8, generator=gen).half() for _ in range(3))
    k, v = (torch.randn(12, 1, 8, generator=gen).half() for _ in range(2))
    lse, rng = torch.randn(12, 2, 1, generator=gen).half(), torch.randn(2, generator=gen).half()
    backend = te.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    middle = [torch.float16, te.TE_DType[dout.dtype]] if older else [torch.float16]
    padded = torch.tensor([0, 4, 12], dtype=torch.int32)
    options = {
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded.clone(),
        "attn_scale": 0.1,
        "dropout": 0.0,
        "qkv_layout": "thd_thd_thd",
        "attn_mask_type": "padding",
        "attn_bias_type": "no_bias",
        "deterministic": True,
    }
    return te.fused_attn_bwd(
        8,
        8,
        cu(0, 3),
        cu(3, 6),
        q,
        k,
        v,
        out,
        dout,
        *middle,
        [lse, rng],
        backend,
        **{**options, **changed},
    )


def test_older_argument_order_by_place_and_by_name() -> None:
    newer = report_call(older=False)
    assert bits(newer[:3], report_call(older=True)[:3])
    assert bits(newer[:3], report_call(older=False, dqkv_dtype=te.TE_DType[torch.float16])[:3])
    dq, dk, dv = newer[:3]
    assert [bool(t[:4].any()) for t in (dq, dk, dv)] == [False] * 3
    assert [bool(t[4:].any()) for t in (dq, dk, dv)] == [True] * 3


def test_older_argument_order_with_a_wrong_dtype() -> None:
    with pytest.raises(
        InvalidProblem, match=r"dqkv_dtype is torch\.float32, expected q's dtype, torch\.float16"
    ):
        report_call(older=False, dqkv_dtype=torch.float32)


# ---------------------------------------------------------------- dtypes and backends by their names


@pytest.mark.parametrize("name", [torch.bfloat16, te.DType.kBFloat16, Foreign.kBFloat16])
def test_dtype_by_any_name(name: Any) -> None:
    tensors = [t.bfloat16() for t in made()]
    out, aux = forward(*tensors[:3], fake_dtype=name)
    assert out.dtype == torch.bfloat16
    assert aux[0].dtype == torch.float32
    assert backward(*tensors[:3], out, tensors[3], aux, fake_dtype=name)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("given", "unfused"),
    [
        ("unfused", True),
        (("reference", "unfused"), False),
        ("reference", False),
        ("auto", False),
        ("F16_arbitrary_seqlen", False),
        (te.FusedAttnBackend["F16_max512_seqlen"], False),
        (Foreign.NVTE_F16_arbitrary_seqlen, False),
        (1, False),
        (None, False),
    ],
)
def test_backend_by_any_name(given: Any, unfused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = Unfused.forward
    monkeypatch.setattr(Unfused, "forward", lambda *a: (calls.append(1), original(*a))[1])
    tensors = made()
    out, _ = forward(*tensors[:3], fused_attention_backend=given)
    assert len(calls) == unfused
    close(out, defined(tensors, {"visible": SEEN})[0])
