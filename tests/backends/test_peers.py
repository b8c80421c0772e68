"""The peers against the definition in fp64, their refusals, and every guarantee that they claim."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradtruth.backends import PEERS, get
from gradtruth.backends.peers import flex, refusals
from gradtruth.backends.peers import sdpa_cpu as cpu
from gradtruth.core.problem import Problem
from gradtruth.core.support import DEFAULT_CLAIMS, ReasonCode
from gradtruth.core.tensors import Forward, Inputs, Wanted
from tests.backends.peer_cases import answer, draw

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
    "sdpa_flash": ("alibi", "scale", "zero-scale"),
    "sdpa_math": ("alibi", "scale", "zero-scale", "post", "post-wide", "pre", "lse", "dims"),
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
    value, magnitude = answer(case, forward.out if backend.claims(problem, CPU).foreign_lse else None)
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
    for shape, dtype in zip(SHAPES, ("float32", "bfloat16", "float64"), strict=True):
        features = MASKS[mask] | PLACES[places] | SHAPES[shape]
        check(name, draw(seed_of(mask, places, shape), dtype=dtype, **features))


@pytest.mark.parametrize("places", ["bshd", "sbhd-padding", "thd"])
@pytest.mark.parametrize(("name", "extra"), [(n, e) for n in EXTRAS_OF for e in EXTRAS_OF[n]])
def test_extras(name, extra, places):
    for mask, dtype in (("window", "float32"), ("causal-br", "float16")):
        check(name, draw(seed_of(extra, places, mask), dtype=dtype, **PLACES[places], **(MASKS[mask] | EXTRAS[extra])))
