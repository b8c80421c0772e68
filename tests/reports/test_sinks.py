"""Learnable softmax offsets, with values that carry weight."""

from __future__ import annotations

import torch
from tests.reports.harness import close, drawn, report, same, zero

from gradtruth.core.layout import canonical_lse
from gradtruth.core.merge import apply_sink, merge
from gradtruth.core.tile import tile

SINKS = "attention sinks"


@report(
    "NVIDIA/TransformerEngine#3551",
    SINKS,
    "q = 0: out = sum(v) / (8 + e^s), lse = ln(8 + e^s), dsoftmax_offset is not 0; merged tiles give the same",
)
def test_the_sink_counts(own, dtype):
    """Context parallelism dropped the sink, and its gradient was exactly 0; the default sink 0 hid it."""
    q = own.zeros(1, 8, 2, 16, dtype=dtype)
    _, k, v, dout = drawn(own, 8, dtype=dtype)
    offset = torch.tensor([2.0, -1.0], device=own.device)
    options = {"softmax_type": "learnable", "softmax_offset": offset}
    call = own.attend(q, k, v, dout, **options).verify()
    total = 8 + offset.double().exp().cpu()
    close(call.out[0, 3], v[0].double().cpu().sum(0) / total[:, None])
    close(call.lse[0, :, 3], total.log())
    # dsink_h = -sum_i p_sink * delta_i
    delta = (dout.double() * call.out.double()).sum(-1).cpu()[0]
    close(call.dsoftmax_offset, -(delta.sum(0) * offset.double().cpu().exp() / total), units=64)
    assert (call.dsoftmax_offset != 0).all()
    sample = call.sample
    parts = []
    for keys in ((0, 3), (3, 8)):
        found = own.backend.forward(*tile(sample.problem, sample.inputs, keys=keys))
        parts += [found.out.float(), canonical_lse(found.lse, "bshd")]
    merged = apply_sink(
        *merge(*parts), offset, torch.ones(1, 8, dtype=torch.bool, device=own.device)
    )
    close(merged[0].to(dtype), call.out.double(), units=2)
    close(merged[1], call.lse.double())


@report(
    "NVIDIA/cudnn-frontend#676",
    SINKS,
    "the row has out = 0, dq = 0; dk, dv and dsoftmax_offset are those without the row",
)
def test_an_empty_row_beside_a_sink(own):
    """Rows without a key under a sink: NaN in dq, a hang, a wrong gradient of the sink."""
    q, k, v, dout = drawn(own, 4, 8)
    hidden = torch.zeros(1, 1, 4, 8, dtype=torch.bool, device=own.device)
    hidden[:, :, 2] = True
    hidden[:, :, 0, 5:] = True
    offset = torch.tensor([0.5, 1.5], device=own.device)
    options = {"softmax_type": "learnable", "softmax_offset": offset, "attn_mask_type": "arbitrary"}
    call = own.attend(q, k, v, dout, attention_mask=hidden, **options).verify()
    zero(call.out[:, 2], call.dq[:, 2])
    same(call.lse[0, :, 2], offset)
    kept = [0, 1, 3]
    without = own.attend(
        q[:, kept], k, v, dout[:, kept], attention_mask=hidden[:, :, kept], **options
    )
    for name in ("dk", "dv", "dsoftmax_offset"):
        close(call.results[name], without.results[name].double(), units=64)
