"""lse: its base, its shape, every head of it."""

from __future__ import annotations

import math

import torch
from tests.reports.harness import BF16, close, drawn, report

LSE = "lse: base, shape, every head written"


@report(
    "pytorch/pytorch#181645", LSE, "q = 0 and 8 keys: lse = ln 8 = 2.0794, and its gradient arrives"
)
def test_lse_is_a_natural_logarithm(own, dtype):
    """A conversion from base 2 was applied to what was natural already: lse too small by a factor of ln 2."""
    _, k, v, dout = drawn(own, 4, 8, dtype=dtype)
    q = own.zeros(1, 4, 2, 16, dtype=dtype)
    dlse = own.h(8, 1, 2, 4)
    call = own.attend(q, k, v, dout, dlse=dlse).verify()
    close(call.lse, torch.full((1, 2, 4), math.log(8)))
    # With dout = 0: dq_i = scale * dlse_i * mean(k)
    alone = own.attend(q, k, v, torch.zeros_like(dout), dlse=dlse)
    mean = k[0].double().mean(0).cpu()
    close(alone.dq[0], dlse[0].t().double().cpu()[..., None] * mean / 4, units=8)


@report(
    "NVIDIA/cudnn-frontend#1083",
    LSE,
    "lse of every head is written, whatever the memory held",
)
def test_lse_of_every_head_of_a_group(own, poisoned_memory):
    """lse was written for the first head of each KV group; the others kept what the buffer held."""
    q, k, v, dout = drawn(own, 1, 30, heads=(8, 2), d=128, dtype=BF16, form="thd")
    call = own.attend(
        q, k, v, dout, qkv_format="thd", attn_mask_type="padding",
        cu_seqlens_q=own.cu(0, 1), cu_seqlens_kv=own.cu(0, 30),
    ).verify()  # fmt: skip
    assert call.lse.shape == (1, 8)
    scores = (
        torch.einsum("hd,jhd->hj", q[0].double(), k.double().repeat_interleave(4, 1)) / 128**0.5
    )
    close(call.lse[0], scores.logsumexp(1), units=16)
