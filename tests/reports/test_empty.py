"""Sequences, tensors and batches without anything in them, and with one of it."""

from __future__ import annotations

import pytest
import torch
from tests.reports.harness import BF16, FP16, drawn, finite, report, same, vanishes, zero

EMPTY = "zero-length, empty and one-token inputs"


@report(
    "Dao-AILab/flash-attention#2562",
    EMPTY,
    "dk, dv of sequences without a query are exactly 0, everything is finite",
)
def test_sequences_without_a_query(own, poisoned_memory):
    """A query sequence of length zero was an illegal memory access in the backward at head dim 256."""
    q, k, v, dout = drawn(own, 20, 80, heads=(4, 1), d=256, dtype=BF16, form="thd")
    call = own.attend(
        q, k, v, dout, qkv_format="thd", attn_mask_type="padding",
        cu_seqlens_q=own.cu(0, 0, 12, 20, 20), cu_seqlens_kv=own.cu(0, 25, 42, 51, 80),
    ).verify()  # fmt: skip
    finite(call.results.values())
    for grad in (call.dk, call.dv):
        zero(grad[:25], grad[51:])
        assert grad[25:51].any()


@report(
    "Dao-AILab/flash-attention#2776",
    EMPTY,
    "no key: out = 0, lse = -inf, dq = 0; no query: dk = dv = 0; no sequence: empty tensors of the right form",
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", [(2, 0, 8), (2, 8, 0), (0, 8, 8)], ids=str)
def test_dense_tensors_without_elements(own, dtype, sizes, causal, poisoned_memory):
    """The forward defined what empty tensors give, the dense backward failed on them."""
    batch, s, t = sizes
    q, k, v, dout = drawn(own, s, t, batch=batch, d=32, dtype=dtype)
    mask = "causal_bottom_right" if causal else "no_mask"
    call = own.attend(q, k, v, dout, attn_mask_type=mask)
    for name, like in (("out", q), ("dq", q), ("dk", k), ("dv", v)):
        found = call.results[name]
        assert (found.shape, found.dtype) == (like.shape, dtype)
        zero(found)
    assert call.lse.shape == (batch, 2, s)
    assert (call.lse == -torch.inf).all()
    call.verify()


@report(
    "Dao-AILab/flash-attention#334", EMPTY, "out = v, dv = dout, dq and dk are 0 up to rounding"
)
@pytest.mark.parametrize("dims", [16, 64, 256])
def test_one_query_and_one_key(own, dims):
    """One query, one key, values times three: NaN in dq."""
    for seed in range(1, 51, 4):
        q, k, v = (3 * own.h(seed + at, 1, 1, 1, dims, dtype=FP16) for at in range(3))
        dout = torch.ones_like(v)
        call = own.attend(q, k, v, dout).verify()
        same(call.out, v)
        same(call.dv, dout)
        vanishes(call, "dq", "dk")
