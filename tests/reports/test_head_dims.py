"""Head dims that fill no tile, or the largest one, and values of another width."""

from __future__ import annotations

import pytest
import torch
from tests.reports.harness import BF16, close, drawn, report, zero

DIMS = "head dims: 256, odd sizes, padding"
VALUES = "value dim other than the key's"


@report(
    "NVIDIA/TransformerEngine#3216",
    DIMS,
    "gradients of a batch item are those of the item alone, and of fp64",
)
def test_a_batch_of_two_at_256(own):
    """With two sequences dq was five times too large; Gaussian inputs did not show it, real activations did."""
    q, k, v, dout = drawn(own, 64, batch=2, heads=(8, 1), d=256, form="sbhd")
    for channel, offset in ((17, 20.0), (101, -15.0), (254, 8.0)):
        k[..., channel] += offset
        q[..., channel] += 0.3 * offset
    k[:, 1] *= 0.5
    dout[:, 1] *= 3.0
    tensors = [x.to(BF16) for x in (q, k, v, dout)]
    options = {"qkv_format": "sbhd", "attn_mask_type": "causal"}
    whole = own.attend(*tensors, **options).verify()
    for n in range(2):
        alone = own.attend(*(x[:, n : n + 1] for x in tensors), **options).verify()
        for name in ("out", "dq", "dk", "dv"):
            close(whole.results[name][:, n : n + 1], alone.results[name].double(), units=2)


@report("Dao-AILab/flash-attention#2698", DIMS, "every head equals the call with that head alone")
@pytest.mark.parametrize("dims", [72, 104])
def test_a_head_leaves_its_neighbour_alone(own, dims, poisoned_memory):
    """A padded tile was stored without a bound on its columns, over dk and dv of the next head."""
    tensors = drawn(own, 96, heads=(3, 3), d=dims, dtype=BF16, form="thd")
    options = {"qkv_format": "thd", "attn_mask_type": "padding", **own.lengths(40, 56)}
    whole = own.attend(*tensors, **options).verify()
    for head in range(3):
        part = slice(head, head + 1)
        alone = own.attend(*(x[:, part] for x in tensors), **options)
        for name, tensor in alone.results.items():
            close(whole.results[name][:, part], tensor.double(), units=2)


@report(
    "triton-lang/triton#621",
    DIMS,
    "columns 64 to 127 decide the softmax: as at head dim 64 under the scale of 128",
)
def test_signal_in_the_last_columns(own, dtype):
    """At head dim 128 only the first 64 columns of q and k were used."""
    q, k, v, dout = (2 * x for x in drawn(own, 16, heads=(1, 1), d=128, dtype=dtype))
    for x in (q, k):
        x[..., :64] = 0
    whole = own.attend(q, k, v, dout).verify()
    half = own.attend(q[..., 64:], k[..., 64:], v, dout, softmax_scale=128**-0.5)
    close(whole.out, half.out.double())
    for name in ("dq", "dk"):
        zero(whole.results[name][..., :64])
        close(whole.results[name][..., 64:], half.results[name].double())
    assert whole.lse.std() > 0.1


# ---------------------------------------------------------------- values of another width


@report(
    "Dao-AILab/flash-attention#2552",
    VALUES,
    "dv is that of fp64, and the first columns of dv for values of 128 with dout padded by zeros",
)
@pytest.mark.parametrize("width", [8, 16, 24, 40, 48, 72, 80, 88, 96, 104, 112, 120])
def test_values_narrower_than_keys(own, width):
    """A few elements of dv were wrong where its width did not fit the stores that were made for dk."""
    q, k, v, dout = drawn(own, 64, d=128, dtype=BF16)
    narrow = own.attend(q, k, v[..., :width], dout[..., :width]).verify()
    padded = dout.clone()
    padded[..., width:] = 0
    wide = own.attend(q, k, v, padded)
    assert narrow.dv.shape == (1, 64, 2, width)
    close(narrow.dv, wide.dv[..., :width].double(), units=2)
    close(narrow.out, wide.out[..., :width].double(), units=2)
    zero(wide.dv[..., width:])


@report(
    "ROCm/TransformerEngine#364",
    VALUES,
    "dq has all its columns right, also past the width of the values",
)
def test_dq_wider_than_values(own, dtype, poisoned_memory):
    """dq's accumulator had the width of the values, so its last columns were wrong or foreign memory."""
    q, k, v, dout = drawn(own, 16, d=192, dv=128, dtype=dtype)
    call = own.attend(q, k, v, dout).verify()
    assert call.dq.shape == q.shape
    assert call.out.shape == dout.shape
    assert torch.count_nonzero(call.dq[..., 128:]) == call.dq[..., 128:].numel()
