"""Scores far from 0: the running maximum, and the merge of partial results."""

from __future__ import annotations

import torch
from tests.reports.harness import BF16, FP32, close, drawn, finite, report

from gradtruth.core.layout import canonical_lse
from gradtruth.core.merge import merge
from gradtruth.core.tensors import Forward, Wanted
from gradtruth.core.tile import tile

LOGITS = "large logits: running maximum and merge"


@report(
    "Dao-AILab/flash-attention#2082",
    LOGITS,
    "scores of -200: out = mean of the visible values, lse = -200 + ln n",
)
def test_very_negative_scores_after_a_masked_block(own):
    """The running maximum stayed 0 after a block that was fully masked, so rows with very low scores came out 0."""
    q, k, v, dout = drawn(own, 88, 200, heads=(2, 1), d=64)
    q, k = 0.0 * q, 0.0 * k
    q[..., 0], k[..., 0] = 1.0, -1600.0
    options = {"attn_mask_type": "causal_bottom_right"}
    flat = own.attend(q, k, v, dout, **options).verify()
    count = torch.arange(113.0, 201.0, dtype=torch.float64)
    close(flat.lse, (count.log() - 200).expand(1, 2, 88))
    mean = (v[0, :, 0].double().cpu().cumsum(0)[112:]) / count[:, None]
    close(flat.out, mean[None, :, None].expand(1, 88, 2, 64), units=16)
    noisy = [own.h(seed, *x.shape) * 0.01 for seed, x in ((1, q), (2, k))]
    noisy[0][..., 0], noisy[1][..., 0] = 1.0, -1600.0
    call = own.attend(*(x.to(BF16) for x in (*noisy, v, dout)), **options).verify()
    assert (call.lse < -190).all()
    finite(call.results.values())


@report(
    "NVIDIA/TransformerEngine#716",
    LOGITS,
    "merging two halves whose lse is near 900 gives the whole, and so do their gradients",
)
def test_merging_halves_with_lse_near_900(own):
    """Partial results were merged through exp(lse), which overflows past 709."""
    q, k, v, dout = drawn(own, 4, 16)
    q[..., 0] = k[..., 0] = 60.0
    whole = own.attend(q, k, v, dout).verify()
    assert (whole.lse > 709).all()
    problem, inputs = whole.sample.problem, whole.sample.inputs
    parts, halves = [], []
    for keys in ((0, 8), (8, 16)):
        halves.append(tile(problem, inputs, keys=keys))
        found = own.backend.forward(*halves[-1])
        parts += [found.out.to(FP32), canonical_lse(found.lse, "bshd")]
    out, lse = merge(*parts)
    finite([out, lse])
    close(out, whole.out.double(), units=2000)  # lse near 900 has an error of 900 units
    close(lse, whole.lse.double())
    total = [torch.zeros_like(x) for x in (q, k, v)]
    for half in halves:
        grads = own.backend.backward(*half, Forward(out=out, lse=lse), dout, None, Wanted())
        for sum_, grad in zip(total, (grads.dq, grads.dk, grads.dv), strict=True):
            sum_ += grad
    own.judge(whole.sample, {**whole.results, "dq": total[0], "dk": total[1], "dv": total[2]})
