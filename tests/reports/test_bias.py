"""Bias and ALiBi: where they enter, how they broadcast, and their gradient."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from tests.reports.harness import BF16, FP32, close, drawn, finite, report, same

import gradtruth

BIAS = "bias and ALiBi: order, broadcast, gradient"


@report(
    "NVIDIA/TransformerEngine#236",
    BIAS,
    "q = 0 and bias (0, ln 3) give weights 1/4 and 3/4 under any scale",
)
@pytest.mark.parametrize("scale", [None, 1.0, 0.125, 3.0], ids=str)
def test_the_scale_leaves_the_bias_alone(own, scale):
    """The scale multiplied the bias too, which weakened it."""
    q, k, v = own.zeros(1, 1, 1, 16), own.h(2, 1, 2, 1, 16), own.eye(2, 16)
    bias = torch.tensor([0.0, math.log(3)], device=own.device).view(1, 1, 1, 2)
    call = own.attend(q, k, v, own.h(4, 1, 1, 1, 16), bias=bias, softmax_scale=scale).verify()
    close(call.out[0, 0, 0, :2], torch.tensor([0.25, 0.75]))
    close(call.lse.view(()), math.log(4))


@report(
    "NVIDIA/TransformerEngine#2537",
    BIAS,
    "dbias has the bias's shape and is the expanded one summed over the broadcast dims",
)
def test_every_shape_of_a_bias_has_its_gradient(own, dtype):
    """Only a bias of one batch item and all heads had a gradient; other shapes were read as larger than they are."""
    tensors = drawn(own, 5, 7, batch=2, heads=(3, 3), dtype=dtype)
    for shape in (
        (2, 1, 5, 7),
        (2, 3, 5, 7),
        (1, 1, 5, 7),
        (1, 1, 1, 7),
        (1, 3, 5, 7),
        (2, 1, 5, 1),
    ):
        bias = own.h(5, *shape, dtype=dtype)
        call = own.attend(*tensors, bias=bias).verify()
        assert (call.dbias.shape, call.dbias.dtype) == (shape, dtype)
        full = own.attend(*tensors, bias=bias.expand(2, 3, 5, 7).contiguous())
        view = own.attend(*tensors, bias=bias.expand(2, 3, 5, 7))
        for name in ("out", "dq", "dk", "dv"):
            close(call.results[name], full.results[name].double())
            close(view.results[name], full.results[name].double())
        summed = full.dbias.double().sum_to_size(shape)
        bound = (
            4 * torch.finfo(dtype).eps * float(full.dbias.abs().double().sum_to_size(shape).max())
        )
        assert float((call.dbias.double() - summed).abs().max()) <= bound


@report(
    "jax-ml/jax#32242", BIAS, "the gradient is finite and that of the bias in the input's dtype"
)
def test_an_fp32_bias_beside_bf16(own):
    """A bias in fp32 beside q, k, v in bf16 had a gradient that was not finite."""
    tensors = drawn(own, 32, batch=2, heads=(4, 4), d=32, dtype=BF16)
    bias = own.h(5, 1, 4, 32, 32, dtype=BF16)
    wide, narrow = (own.attend(*tensors, bias=x).verify() for x in (bias.float(), bias))
    assert wide.dbias.dtype == FP32
    finite([wide.dbias])
    close(narrow.dbias, wide.dbias.double())
    same(wide.out, narrow.out)


@report(
    "meta-pytorch/attention-gym#86",
    BIAS,
    "slope ln 2 and q = 0: a key counts 2^-(i - j)",
)
def test_alibi_favours_near_keys(own, dtype):
    """The sign was turned: distant keys were favoured."""
    q, k, v = (
        own.zeros(1, 6, 1, 8, dtype=dtype),
        own.h(2, 1, 6, 1, 8, dtype=dtype),
        own.eye(6, 8, dtype=dtype),
    )
    slopes = torch.tensor([math.log(2)], device=own.device)
    call = own.attend(
        q, k, v, own.h(4, 1, 6, 1, 8, dtype=dtype), attn_mask_type="causal", alibi_slopes=slopes
    )
    call.verify()
    i, j = torch.arange(6.0)[:, None], torch.arange(6.0)
    weights = torch.where(j <= i, 2.0 ** (j - i), 0.0)
    close(call.out[0, :, 0, :6], weights / weights.sum(1, keepdim=True))


@report(
    "pytorch/pytorch#188302",
    BIAS,
    "every subset of q, k, v, bias gets the gradients that it gets when all require them",
)
def test_any_subset_requires_gradients(own):
    """Where only the mask required a gradient lse was not saved, and the backward read what was not there."""
    *tensors, dout = drawn(own, 16, d=32)
    tensors.append(own.h(5, 1, 2, 16, 16))

    def gradients(needed: tuple[bool, ...]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(need) for x, need in zip(tensors, needed, strict=True)]
        out = gradtruth.attention(*leaves[:3], bias=leaves[3], backend=own.name)
        return torch.autograd.grad(out, [x for x in leaves if x.requires_grad], dout)

    every = gradients((True,) * 4)
    for needed in product((False, True), repeat=4):
        if any(needed):
            expected = [grad for grad, need in zip(every, needed, strict=True) if need]
            for found, right in zip(gradients(needed), expected, strict=True):
                same(found, right)
    own.attend(*tensors[:3], dout, bias=tensors[3]).verify()
