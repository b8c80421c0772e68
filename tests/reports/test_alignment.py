"""Causal masks where queries and keys differ in number, and masks that reach where they do not belong."""

from __future__ import annotations

import pytest
import torch
from tests.reports.harness import close, mask_of, probe, report

from gradtruth import DotProductAttention

ALIGNMENT = "causal alignment with unequal lengths"


@report(
    "Dao-AILab/flash-attention#282",
    ALIGNMENT,
    "causal is top-left, causal_bottom_right ends at the last key, in forward and backward, on every backend",
)
@pytest.mark.parametrize("sizes", [(2, 5), (5, 2), (4, 4)], ids=str)
def test_each_name_has_one_mask(own, dtype, sizes):
    """One flag meant the top-left diagonal in one release and the bottom-right in the next."""
    s, t = sizes
    i, j = torch.arange(s)[:, None], torch.arange(t)
    for name, off in (("causal", 0), ("causal_bottom_right", t - s)):
        call = probe(own, s, t, dtype=dtype, attn_mask_type=name).verify()
        assert torch.equal(mask_of(call), j <= i + off), name


@report(
    "NVIDIA/TransformerEngine#629",
    ALIGNMENT,
    "cross attention whose mask is none or padding sees every valid key",
)
def test_cross_attention_is_not_causal(own):
    """A decoder handed the window of its causal self attention to its cross attention."""
    q = own.zeros(1, 6, 1, 16)
    k, v = own.h(2, 1, 9, 1, 16), own.eye(9, 16)
    lengths = {"cu_seqlens_q": own.cu(0, 6), "cu_seqlens_kv": own.cu(0, 9)}
    everywhere = torch.eye(16)[:9].mean(0).expand(1, 6, 16).double()
    module = DotProductAttention(
        1, 16, qkv_format="bshd", attn_mask_type="causal", backend=own.name
    )
    first = module(q, v[:, :6], v[:, :6])
    close(first[0, 0], v[0, 0, 0].double())
    close(module(q, k, v, attn_mask_type="no_mask"), everywhere)
    close(module(q, k, v, attn_mask_type="padding", **lengths), everywhere)
    cross = DotProductAttention(1, 16, qkv_format="bshd", attn_mask_type="padding", attention_type="cross",
                                backend=own.name)  # fmt: skip
    close(cross(q, k, v, **lengths), everywhere)
    seen = DotProductAttention(1, 16, qkv_format="bshd", attn_mask_type="causal", attention_type="cross",
                               backend=own.name)(q, k, v)  # fmt: skip
    assert (seen[0, 0] > 0).sum() == 1
