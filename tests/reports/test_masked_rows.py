"""Rows that see no key, and what stands behind a mask."""

from __future__ import annotations

import pytest
import torch
from tests.reports.harness import FP32, close, drawn, finite, report, same, zero

import gradtruth

MASKED = "fully masked rows and poison behind a mask"


@report(
    "pytorch/pytorch#103749",
    MASKED,
    "the row has out = 0 and dq = 0, hidden keys get 0, everything is finite",
)
def test_a_fully_masked_row(own):
    """A row whose keys are all masked was NaN, and so were the gradients of the whole batch."""
    q, k, v, dout = drawn(own, 6, 10, d=8)
    hidden = torch.ones(6, 10, dtype=torch.bool, device=own.device).triu(1)
    hidden[5] = True
    options = {"attn_mask_type": "arbitrary", "attention_mask": hidden[None, None]}
    call = own.attend(q, k, v, dout, **options).verify()
    zero(call.out[:, 5], call.dq[:, 5], call.dk[:, 5:], call.dv[:, 5:])
    assert (call.lse[:, :, 5] == -torch.inf).all()
    finite([call.out, call.dq, call.dk, call.dv])
    weight = own.h(6, 8, 8).requires_grad_()
    out = gradtruth.attention(q @ weight, k @ weight, v @ weight, backend=own.name, **options)
    (found,) = torch.autograd.grad(out, weight, dout)
    rows = {**options, "attention_mask": hidden[None, None, :5]}
    out = gradtruth.attention(q[:, :5] @ weight, k @ weight, v @ weight, backend=own.name, **rows)
    (without,) = torch.autograd.grad(out, weight, dout[:, :5])
    finite([found])
    close(found, without.double(), units=32)


@report(
    "pytorch/pytorch#101967",
    MASKED,
    "past a sequence's length nothing is read: out = v of the key that is left; behind a mask of pairs a NaN may "
    "reach its own sequence and KV head, never another one",
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_in_a_hidden_key(own, bad):
    """NaN in a key that the mask hides reached the output, since 0 * NaN is not 0."""
    x = torch.arange(8.0, device=own.device).view(1, 2, 1, 4)
    k, v = x.clone(), x.clone()
    k[0, 1, 0, 0] = v[0, 1, 0, 0] = bad
    lengths = {"cu_seqlens_q": own.cu(0, 2), "cu_seqlens_kv": own.cu(0, 1)}
    call = own.attend(x, k, v, torch.ones_like(x), attn_mask_type="padding", **lengths)
    close(call.out, x[:, :1].expand(1, 2, 1, 4).double())
    finite(call.results.values())
    zero(call.dk[:, 1], call.dv[:, 1])
    one_key = own.attend(x, k[:, :1], v[:, :1], torch.ones_like(x))
    close(call.dv[:, :1], one_key.dv.double())


@report(
    "pytorch/pytorch#101967",
    MASKED,
    "past a sequence's length nothing is read: out = v of the key that is left; behind a mask of pairs a NaN may "
    "reach its own sequence and KV head, never another one",
)
def test_nan_behind_a_mask_of_pairs_stays_in_its_sequence_and_head(own):
    """The rule for masks of pairs: neighbours in the batch and other KV heads keep their bits."""
    q, k, v, dout = drawn(own, 5, batch=2, heads=(4, 2), dtype=FP32)
    hidden = torch.zeros(1, 1, 5, 5, dtype=torch.bool, device=own.device)
    hidden[..., 3] = True
    options = {"attn_mask_type": "arbitrary", "attention_mask": hidden}
    clean = own.attend(q, k, v, dout, **options).verify()
    k, v = k.clone(), v.clone()
    k[1, 3, 0] = v[1, 3, 0] = torch.nan
    found = own.attend(q, k, v, dout, **options)
    for name in ("out", "dq"):
        same(found.results[name][0], clean.results[name][0])
        same(found.results[name][1, :, 2:], clean.results[name][1, :, 2:])
    for name in ("dk", "dv"):
        same(found.results[name][0], clean.results[name][0])
        same(found.results[name][1, :, 1], clean.results[name][1, :, 1])
