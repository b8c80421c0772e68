"""Dropout: one mask in both directions, in the right formula."""

from __future__ import annotations

import pytest
import torch
from tests.dense import attend
from tests.reports.harness import close, drawn, probe, report, same

DROPOUT = "dropout: one mask in forward and backward, in the right formula"


@report(
    "facebookresearch/xformers#755",
    DROPOUT,
    "with q = 0 and identities for v and dout, dv is out transposed",
)
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_the_backward_draws_the_forwards_mask(own, mask):
    """Under a causal mask the backward indexed its random numbers by another count of keys than the forward."""
    call = probe(own, 96, 96, attn_mask_type=mask, dropout_p=0.2, dropout_seed=11).verify()
    out = call.out[0, :, 0]
    close(call.dv[0, :, 0], out.double().t())
    count = torch.arange(1, 97) if mask == "causal" else torch.full((96,), 96)
    kept = (out.double().cpu() * count[:, None] * 0.8).round(decimals=5)
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    visible = int(count.sum())
    assert abs(float(kept.sum()) - 0.8 * visible) < 5 * (0.16 * visible) ** 0.5
    same(probe(own, 96, 96, attn_mask_type=mask, dropout_p=0.2, dropout_seed=11).out, call.out)
    other = probe(own, 96, 96, attn_mask_type=mask, dropout_p=0.2, dropout_seed=12).out
    assert not torch.equal(other, call.out)


@report(
    "aws-neuron/nki-samples#81",
    DROPOUT,
    "dS = P * (M * dP / (1 - p) - delta), with P before dropout and delta = dout . out",
)
def test_gradients_use_the_plain_probabilities(own):
    """The dropped probabilities stood where the plain ones belong: dv right, dq and dk wrong."""
    options = {"dropout_p": 0.4, "dropout_seed": 5}
    shown = probe(own, 16, 16, **options).out[0, :, 0, :16].cpu()
    keep = shown > 0
    assert 0.3 < keep.float().mean() < 0.9
    q, k, v, dout = drawn(own, 16, heads=(1, 1))
    call = own.attend(q, k, v, dout, **options).verify()
    leaves = [x[0].double().cpu().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, keep=keep[None], p=0.4).out
    expected = torch.autograd.grad(out, leaves, dout[0].double().cpu())
    close(call.out[0], out.detach(), units=16)
    for name, grad in zip(("dq", "dk", "dv"), expected, strict=True):
        close(call.results[name][0], grad, units=16)
