"""How tensors lie in memory must not matter."""

from __future__ import annotations

import pytest
import torch
from tests.reports.harness import BF16, FP16, FP32, Call, Own, close, drawn, report, same, zero

import gradtruth

STRIDES = "views, expanded tensors, mixed layouts"


def equal(found: Call, expected: Call) -> None:
    for name, tensor in expected.results.items():
        close(found.results[name], tensor.double(), units=2)


def copies(own: Own, q, k, v, dout, **options) -> Call:
    return own.attend(*(x.contiguous() for x in (q, k, v, dout)), **options).verify()


@report(
    "Dao-AILab/flash-attention#355", STRIDES, "a strided dout gives what its contiguous copy gives"
)
def test_dout_with_other_strides(own):
    """The backward read dout with the strides of out."""
    q, k, v, _ = drawn(own, 16, batch=2, heads=(4, 1), d=32, dtype=FP16)
    plain = own.h(4, 2, 16, 4, 32, dtype=FP16)
    for dout in (
        own.h(4, 2, 4, 16, 32, dtype=FP16).transpose(1, 2),
        own.h(4, 16, 2, 4, 32, dtype=FP16).transpose(0, 1),
        own.h(4, 2, 16, 32, 4, dtype=FP16).transpose(2, 3),
        plain[:, :, :1].expand(2, 16, 4, 32),
    ):
        equal(own.attend(q, k, v, dout), copies(own, q, k, v, dout))


@report("NVIDIA/TransformerEngine#1195", STRIDES, "views of a packed projection equal their copies")
def test_keys_split_off_a_packed_projection(own):
    """K and V split off one buffer over its heads were read as if they were contiguous."""
    packed = own.h(1, 32, 1, 6, 64, dtype=FP16)
    q, k, v = packed.split([4, 1, 1], dim=2)
    dout = own.h(4, 32, 1, 4, 64, dtype=FP16)
    options = {"qkv_format": "sbhd", "attn_mask_type": "causal"}
    equal(own.attend(q, k, v, dout, **options), copies(own, q, k, v, dout, **options))


@report(
    "pytorch/pytorch#181133",
    STRIDES,
    "permuted views equal their copies, where a mix-up keeps the shape too",
)
def test_permuted_views(own):
    """Permuted inputs gave other values than their copies; lengths and heads were equal, so no shape told."""
    q, k, v, dout = (own.h(seed, 84, 3, 3, 64).transpose(1, 2) for seed in (1, 2, 3, 4))
    equal(own.attend(q, k, v, dout), copies(own, q, k, v, dout))


@report("triton-lang/triton#6242", STRIDES, "all ones in, all ones out")
def test_ones_in_every_batch_item(own, dtype):
    """The address left the batch item away: later items of all-ones inputs came out as zeros."""
    ones = own.full(1.0, 2, 16, 3, 16, dtype=dtype)
    call = own.attend(ones, ones, ones, ones).verify()
    close(call.out, ones.double())
    close(call.dv, ones.double())


@report(
    "pytorch/pytorch#141147",
    STRIDES,
    "as with dout of ones in memory; the sum of dv is the number of elements of out",
)
def test_dout_of_a_sum(own, dtype):
    """out.sum().backward() makes a dout whose strides are all 0: an assertion failed, or dout was misread."""
    q, k, v, _ = drawn(own, 16, d=32, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    gradtruth.attention(*leaves, backend=own.name).sum().backward()
    expected = own.attend(q, k, v, own.full(1.0, 1, 16, 2, 32, dtype=dtype)).verify()
    for leaf, name in zip(leaves, ("dq", "dk", "dv"), strict=True):
        same(leaf.grad, expected.results[name])
    total = float(leaves[2].grad.double().sum())
    assert abs(total / q.numel() - 1) < 8 * torch.finfo(dtype).eps


@report(
    "pytorch/pytorch#146377",
    STRIDES,
    "the gradient of a slice is that of its copy, rows that were cut off get 0",
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradient_of_a_slice(own, compiled):
    """The compiled backward wrote dk as if the slice that it belongs to were contiguous."""
    whole = own.h(2, 1, 2, 96, 64)

    def loss(q, full, v, dout):
        k = full[:, :, : v.shape[1]].transpose(1, 2)
        return (gradtruth.attention(q, k, v, backend=own.name) * dout).sum()

    run = torch.compile(loss, backend="aot_eager", dynamic=True) if compiled else loss
    for length in (48, 64):  # compiled for another length first
        q, _, v, dout = drawn(own, length, d=64, dtype=FP32)
        found = whole.clone().requires_grad_()
        run(q, found, v, dout).backward()
        k = whole[:, :, :length].transpose(1, 2).contiguous()
        expected = own.attend(q, k, v, dout).verify()
        zero(found.grad[:, :, length:])
        close(found.grad[:, :, :length].transpose(1, 2), expected.dk.double())


@report("NVIDIA/TransformerEngine#1195", STRIDES, "views of a packed projection equal their copies")
@pytest.mark.parametrize("form", ["3hd", "h3d"])
def test_q_k_v_of_one_buffer(own, form):
    """The same for the three interleaved in one buffer."""
    shape = (2, 16, 3, 4, 32) if form == "3hd" else (2, 16, 4, 3, 32)
    q, k, v = own.h(1, *shape, dtype=BF16).unbind(2 if form == "3hd" else 3)
    dout = own.h(4, 2, 16, 4, 32, dtype=BF16)
    equal(own.attend(q, k, v, dout), copies(own, q, k, v, dout))
