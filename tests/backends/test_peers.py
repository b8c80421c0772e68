"""The peers against the definition in fp64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.backends.peer_cases import answer, draw

from gradtruth.backends import get
from gradtruth.backends.peers import sdpa_cpu as cpu
from gradtruth.backends.peers import sdpa_math as math_peer
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs, Wanted

CPU = torch.device("cpu")
HALVES = ("bfloat16", "float16")

MASKS = {
    "full": {},
    "causal": {"right": 0},
    "causal-br": {"right": 0, "alignment": "bottom_right"},
    "window": {"left": 3, "right": 2},
    "window-br": {"left": 5, "right": 0, "alignment": "bottom_right"},
    "arbitrary": {"arbitrary": True, "mask_dims": (1, 0, 1, 1)},
    "arbitrary-causal": {"arbitrary": True, "right": 0, "mask_dims": (0, 1, 1, 1)},
}
PLACES = {
    "bshd": {},
    "sbhd": {"layout": "sbhd"},
    "bshd-lengths": {"lengths": "cu_seqlens"},
    "sbhd-padding": {"layout": "sbhd", "lengths": "padding_mask"},
    "bshd-padding": {"lengths": "padding_mask"},
    "thd": {"layout": "thd", "lengths": "cu_seqlens"},
}
SHAPES = {
    "mha": {"groups": 3},
    "gqa": {"gqa": 3, "dims": (8, 8)},
    "mqa": {"groups": 1, "gqa": 4, "dims": (33, 33)},
}
EXTRAS = {
    "alibi": {"alibi": True},
    "alibi-batched": {"alibi": True, "slopes": "BH", "batch": 3},
    "scale": {"scale": -0.7},
    "zero-scale": {"scale": 0.0},
    "post": {"bias": "post_scale", "bias_dims": (0, 1, 1, 1)},
    "post-wide": {"bias": "post_scale", "bias_dims": (1, 0, 1, 0), "alibi": True},
    "pre": {"bias": "pre_scale", "bias_dims": (1, 1, 0, 1)},
    "lse": {"lse_grad": True, "bias": "post_scale"},
    "dims": {"dims": (24, 7)},
    "softcap": {"softcap": 2.0},
    "softcap-pre": {"softcap": 3.0, "bias": "pre_scale"},
    "off-by-one": {"softmax": "off-by-one"},
    "learnable": {"softmax": "learnable", "lse_grad": True},
    "max-logit": {"max_logit": True, "bias": "post_scale"},
    "all": {
        "softcap": 4.0, "bias": "post_scale", "alibi": True, "softmax": "learnable", "lse_grad": True,
        "max_logit": True, "dims": (9, 20), "gqa": 2,
    },
}  # fmt: skip
EXTRAS_OF = {
    "sdpa_flash": ("alibi", "alibi-batched", "scale", "zero-scale"),
    "sdpa_math": (
        "alibi",
        "alibi-batched",
        "scale",
        "zero-scale",
        "post",
        "post-wide",
        "pre",
        "dims",
    ),
    "flex": tuple(EXTRAS),
}


def check(name, case):
    """Forward and backward of a case lie within rounding of the definition."""
    backend = get(name)
    problem, inputs = case.problem, case.inputs
    assert backend.supports(problem, CPU).ok, backend.supports(problem, CPU)
    before = {key: x.clone() for key, x in inputs.items()}
    forward = backend.forward(problem, inputs)
    grads = backend.backward(problem, inputs, forward, case.dout, case.dlse, Wanted())
    for key, x in inputs.items():
        assert torch.equal(x.nan_to_num(), before[key].nan_to_num()), f"{key} was written"
    found = dict(grads.items()) | {"out": forward.out, "lse": forward.lse}
    if problem.spec.max_logit:
        found["max_logit"] = forward.max_logit
    assert set(found) == expected_names(problem, inputs)
    # Only a kernel that takes out from elsewhere computes delta from its rounded form.
    value, magnitude = answer(
        case, forward.out if backend.claims(problem, CPU).foreign_lse else None
    )
    for key, got in found.items():
        compare(key, got, value[key], magnitude[key], problem)
    like = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v, "dbias": inputs.bias, "out": case.dout}
    for key in found.keys() & like.keys():
        assert found[key].dtype == like[key].dtype
        assert found[key].shape == like[key].shape
        assert found[key].is_contiguous()
    assert (forward.lse.t() if problem.layout == "thd" else forward.lse).is_contiguous()
    return forward, grads


def expected_names(problem, inputs):
    names = {"out", "lse", "dq", "dk", "dv"}
    names |= {"dbias"} if inputs.bias is not None else set()
    names |= {"dsoftmax_offset"} if inputs.softmax_offset is not None else set()
    return names | ({"max_logit"} if problem.spec.max_logit else set())


def compare(key, got, want, magnitude, problem):
    """One rounding to the result's dtype, and c roundings of the accumulation dtype on the way."""
    exact = torch.isinf(want)
    assert torch.equal(got.double()[exact], want[exact]), f"{key}: -inf in other places"
    assert torch.isfinite(got).all() or exact.any(), f"{key} is not finite"
    got, want, magnitude = (x.double().masked_fill(exact, 0.0) for x in (got, want, magnitude))
    bound = 8 * torch.finfo(problem.accumulate_dtype).eps * magnitude
    bound += 0.51 * torch.finfo(found_dtype(key, problem)).eps * want.abs()
    if found_dtype(key, problem) == torch.float16:
        bound += 2.0**-25  # half of the smallest number
    excess = ((got - want).abs() - bound).max() if got.numel() else torch.tensor(0.0)
    assert excess <= 0, f"{key}: {excess:.2e} above the bound"


def found_dtype(key, problem):
    if key in ("lse", "max_logit", "dsoftmax_offset"):
        return problem.accumulate_dtype
    return problem.torch_dtype


def seed_of(*parts):
    return sum(ord(letter) * (n + 1) for n, letter in enumerate("/".join(parts)))


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math", "flex"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("places", PLACES)
def test_masks_and_layouts(name, mask, places):
    seed = seed_of(mask, places)
    chosen = list(zip(SHAPES, ("float32", "bfloat16", "float64"), strict=True))
    if name == "flex":  # slow, and without fp64
        chosen = [(tuple(SHAPES)[seed % 3], ("float32", "float16")[seed % 2])]
    for shape, dtype in chosen:
        check(name, draw(seed, dtype=dtype, **MASKS[mask], **PLACES[places], **SHAPES[shape]))


@pytest.mark.parametrize("places", ["bshd", "sbhd-padding", "thd"])
@pytest.mark.parametrize(("name", "extra"), [(n, e) for n in EXTRAS_OF for e in EXTRAS_OF[n]])
def test_extras(name, extra, places):
    for mask, dtype in (("window", "float32"), ("causal-br", "float16")):
        check(
            name,
            draw(
                seed_of(extra, places, mask),
                dtype=dtype,
                **PLACES[places],
                **(MASKS[mask] | EXTRAS[extra]),
            ),
        )


def test_several_blocks():
    # The kernel's blocks are 32, 64 or 256 queries by 512 keys; here each of the first 512 keys is hidden from
    # some rows, so that their running maximum is still -inf when the second block comes.
    for sizes, mask in (((200, 1100), "window-br"), ((40, 600), "full"), ((800, 70), "causal")):
        check("sdpa_flash", draw(7, batch=1, groups=1, dims=(8, 8), sizes=sizes, **MASKS[mask]))


@pytest.mark.parametrize("mask", ["full", "causal", "window-br", "arbitrary"])
def test_lse_of_math_in_several_blocks(mask, monkeypatch):
    monkeypatch.setattr(math_peer, "_SCORES", 70)
    check("sdpa_math", draw(9, sizes=(23, 17), gqa=2, **MASKS[mask]))


@pytest.mark.parametrize("name", ["sdpa_math", "flex"])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_a_bias_gradient_is_summed_before_it_is_rounded(name, layout):
    # Over a thousand rows share the bias; added one by one in fp32 they are off by more than 0.03 of this unit.
    lengths = "cu_seqlens" if layout == "thd" else "full"
    features = {"bias": "post_scale", "bias_dims": (0, 0, 0, 1), "dims": (8, 8)}
    case = draw(12, layout=layout, lengths=lengths, sizes=(1500, 5), batch=2, **features)
    backend = get(name)
    forward = backend.forward(case.problem, case.inputs)
    grads = backend.backward(case.problem, case.inputs, forward, case.dout, None, Wanted())
    value, magnitude = answer(case)
    error = (grads.dbias.double() - value["dbias"]).abs().max()
    assert error <= 0.02 * 2.0**-24 * magnitude["dbias"].max()


@pytest.mark.parametrize("dtype", HALVES)
def test_flash_sums_in_fp32(dtype):
    # Torch's own half kernel rounds dk and dv after every block of queries and every head of the group.
    case = draw(3, dtype=dtype, batch=1, groups=1, gqa=8, sizes=(300, 30), dims=(8, 8))
    forward, grads = check("sdpa_flash", case)
    q, k, v, out, dout = (
        x.transpose(1, 2)
        for x in (case.inputs.q, case.inputs.k, case.inputs.v, forward.out, case.dout)
    )
    own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, forward.lse, 0.0, False, scale=case.problem.scale
    )
    want = answer(case, forward.out)[0]["dk"]
    error, own_error = ((x.double() - want).norm() for x in (grads.dk, own[1].transpose(1, 2)))
    assert own_error > 3 * error


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math", "flex"])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0), (3, 4)])
def test_nothing_to_attend(name, layout, sizes):
    lengths = "cu_seqlens" if layout == "thd" else "full"
    for batch in (0,) if all(sizes) else (0, 2):
        S, T = sizes
        cu = torch.zeros(batch + 1, dtype=torch.int32) if layout == "thd" else None
        make = {"bshd": (batch, -1, 2, 4), "sbhd": (-1, batch, 2, 4), "thd": (-1, 2, 4)}[layout]
        q, k, v = (torch.randn([n if size == -1 else size for size in make]) for n in (S, T, T))
        inputs = Inputs(q=q, k=k, v=v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
        problem = Problem.of(Spec(layout=layout, lengths=lengths), inputs)
        forward = get(name).forward(problem, inputs)
        grads = get(name).backward(
            problem, inputs, forward, torch.ones_like(forward.out), None, Wanted()
        )
        assert torch.equal(forward.out, torch.zeros_like(q))
        assert (forward.lse == -torch.inf).all()
        for grad, like in zip((grads.dq, grads.dk, grads.dv), (q, k, v), strict=True):
            assert torch.equal(grad, torch.zeros_like(like))


def restrided(tensor, how):
    """The same values with other strides, where that is possible."""
    if how == "packed":
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-2).select(-2, 0)
    if how == "columns":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "odd":
        buffer = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan)
        buffer[..., 1:-2] = tensor
        return buffer[..., 1:-2]
    dim = {"heads": -2, "sequence": -3, "row": -1}[how]
    return tensor.narrow(dim, 0, 1).expand(tensor.shape)


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math", "flex"])
@pytest.mark.parametrize("how", ["packed", "columns", "odd", "heads", "sequence", "row"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strides(name, how, dtype):
    for n, layout in enumerate(("bshd", "sbhd")):
        case = draw(n, layout=layout, dtype=dtype, right=0, sizes=(9, 1 + 8 * n), batch=2)
        tensors = {key: restrided(getattr(case.inputs, key), how) for key in "qkv"}
        inputs = replace(case.inputs, **tensors)
        problem = Problem.of(case.problem.spec, inputs)
        check(name, replace(case, problem=problem, inputs=inputs, dout=restrided(case.dout, how)))


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
def test_causal_with_any_scale(scale):
    # The flash kernel and torch's SDPA hide by -inf before they scale: 0 * -inf is NaN, and -1 * -inf hides nothing.
    for dtype in ("float32", "bfloat16"):
        case = draw(6, dtype=dtype, right=0, scale=scale, sizes=(20, 20))
        for name in ("sdpa_flash", "sdpa_math", "flex"):
            check(name, case)


def test_how_the_scale_is_split():
    for scale in (0.3, -0.3, 0.125, 0.0, 1e-30):
        for dtype in ("float32", "bfloat16"):
            factor, power = cpu._split(draw(0, dtype=dtype, scale=scale).problem)
            assert factor * power == scale
            assert power > 0
            if dtype == "bfloat16":
                assert factor in (-1.0, 0.0, 1.0)
            else:
                assert math.log2(power).is_integer()
                assert 1 <= abs(factor) < 2 or scale == 0


def test_lengths_are_clamped_to_the_given_maximum():
    case = draw(8, batch=2, sizes=(12, 12), right=0)
    for longest in ((7, 12), (12, 9)):
        problem = replace(case.problem, max_seqlen_q=longest[0], max_seqlen_kv=longest[1])
        queries, keys = (
            replace(side, length=[n, n])
            for side, n in zip((case.queries, case.keys), longest, strict=True)
        )
        for name in ("sdpa_flash", "sdpa_math", "flex"):
            check(name, replace(case, problem=problem, queries=queries, keys=keys))


def test_a_sink_without_keys():
    # Both sequences have queries; nothing has keys, and the second place is past the end of the first.
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    inputs = Inputs(
        q=torch.randn(6, 2, 4),
        k=torch.randn(0, 2, 4),
        v=torch.randn(0, 2, 4),
        cu_seqlens_q=cu,
        cu_seqlens_kv=torch.zeros(3, dtype=torch.int32),
        softmax_offset=torch.tensor([0.5, -2.0]),
    )
    spec = Spec(layout="thd", lengths="cu_seqlens", softmax="learnable", lse_grad=True)
    problem = Problem.of(spec, inputs)
    forward = get("flex").forward(problem, inputs)
    assert torch.equal(forward.out, torch.zeros(6, 2, 4))
    assert torch.equal(forward.lse[:5], inputs.softmax_offset.expand(5, 2))
    assert (forward.lse[5] == -torch.inf).all()
    grads = get("flex").backward(problem, inputs, forward, forward.out, forward.lse, Wanted())
    assert torch.equal(grads.dsoftmax_offset, torch.zeros(2))


def test_a_sink_takes_all_where_a_bias_of_finfo_min_hides_every_key():
    """In base 2 such a row has no lse, and its out is the mean of v."""
    bias = torch.zeros(1, 1, 2, 3)
    bias[..., 0, :] = torch.finfo(torch.float32).min
    inputs = Inputs(*(torch.randn(1, n, 2, 4) for n in (2, 3, 3)), bias=bias)
    problem = Problem.of(Spec(bias="post_scale", softmax="off-by-one"), inputs)
    found = get("flex").forward(problem, inputs)
    assert torch.equal(found.out[:, 0], torch.zeros(1, 2, 4))
    assert torch.equal(found.lse[..., 0], torch.zeros(1, 2))
    grads = get("flex").backward(problem, inputs, found, torch.ones_like(found.out), None, Wanted())
    assert torch.equal(grads.dq[:, 0], torch.zeros(1, 2, 4))


def test_a_lowered_precision_of_products_is_lifted_for_the_call():
    # CPUs with bf16 arithmetic would use it; here only the switch can be seen.
    problem = draw(1).problem
    matmul = torch.backends.mkldnn.matmul
    standing = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    with cpu._precision(problem, CPU):
        assert matmul.fp32_precision == "ieee"
    assert matmul.fp32_precision == "bf16"
    matmul.fp32_precision = standing


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_large_halves_are_widened_in_one_piece(layout, monkeypatch):
    monkeypatch.setattr(cpu, "_LARGE", 0)
    for how in ("packed", "columns", "heads"):
        case = draw(14, layout=layout, dtype="float16", gqa=2, right=0)
        tensors = {key: restrided(getattr(case.inputs, key), how) for key in "qkv"}
        check("sdpa_flash", replace(case, inputs=replace(case.inputs, **tensors)))


def test_one_row_of_stride_zero():
    case = draw(5, sizes=(1, 1), batch=1, groups=1)
    tensors = {
        key: getattr(case.inputs, key).as_strided((1, 1, 1, 16), (0, 0, 0, 1)) for key in "qkv"
    }
    check("sdpa_flash", replace(case, inputs=replace(case.inputs, **tensors)))
