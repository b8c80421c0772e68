"""Where a sequence begins and ends, and that it is alone."""

from __future__ import annotations

import pytest
import torch
from tests.reports.harness import BF16, FP16, GRADIENTS, close, drawn, report, same

from gradtruth import DotProductAttention, InvalidProblem, attention
from gradtruth.compat.transformer_engine import fused_attn_fwd

BOOKKEEPING = "where sequences lie in packed tensors"
THD = {"qkv_format": "thd", "attn_mask_type": "padding"}


@report(
    "NVIDIA/TransformerEngine#3333",
    BOOKKEEPING,
    "gradients point the right way at the right length; thd with one sequence equals bshd with a batch of one",
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_one_packed_sequence_is_a_dense_one(own, causal):
    """On one family of GPUs the packed backward was wrong in direction and norm while its forward was right."""
    tensors = drawn(own, 96, heads=(4, 2), d=64, dtype=BF16, form="thd")
    mask = "padding_causal" if causal else "padding"
    packed = own.attend(*tensors, qkv_format="thd", attn_mask_type=mask, **own.lengths(96)).verify()
    dense = own.attend(
        *(x[None] for x in tensors), attn_mask_type="causal" if causal else "no_mask"
    )
    for name in ("out", *GRADIENTS):
        one, other = packed.results[name].double(), dense.results[name][0].double()
        close(packed.results[name], other, units=2)
        assert torch.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.999
        assert abs(one.norm() / other.norm() - 1) < 0.01
    close(packed.lse, dense.lse[0].t().double())


@report(
    "fla-org/flash-linear-attention#838",
    BOOKKEEPING,
    "the explicit boundaries win, or the pair is refused; token 3 attends itself alone: out = v",
)
def test_a_mask_beside_boundaries_does_not_replace_them(own, dtype):
    """A layer that was given both dropped the boundaries when the mask was all ones: sequences saw each other."""
    q, k, v, dout = drawn(own, 6, heads=(1, 1), dtype=dtype, form="thd")
    lengths = own.lengths(3, 3)
    call = own.attend(q, k, v, dout, **{**THD, "attn_mask_type": "padding_causal"}, **lengths)
    call.verify()
    for first in (0, 3):
        close(call.out[first], v[first].double(), units=1)
    mask = torch.ones(1, 6, dtype=torch.bool, device=own.device)
    with pytest.raises(InvalidProblem, match="attention_mask and cu_seqlens are both given"):
        attention(q, k, v, qkv_format="thd", attn_mask_type="padding_causal", attention_mask=mask,
                  backend=own.name, **lengths)  # fmt: skip
    module = DotProductAttention(
        1, 16, qkv_format="thd", attn_mask_type="padding_causal", backend=own.name
    )
    for given in (None, mask[:, None, None]):
        same(module(q, k, v, given, **lengths), call.out.flatten(1))


@report(
    "flashinfer-ai/flashinfer#3800",
    BOOKKEEPING,
    "results of a batch item are those of the item alone",
)
def test_every_batch_item_reads_its_own_queries(own, dtype):
    """The stride between batch items was that of one token, so all but the first read foreign queries."""
    tensors = drawn(own, 4, batch=3, dtype=dtype)
    whole = own.attend(*tensors).verify()
    for n in range(3):
        alone = own.attend(*(x[n : n + 1] for x in tensors))
        for name, tensor in alone.results.items():
            close(whole.results[name][n : n + 1], tensor.double(), units=2)


@report(
    "NVIDIA/TransformerEngine#1259",
    BOOKKEEPING,
    "documents attend themselves alone, or the call is refused before anything is launched",
)
def test_packed_documents_in_a_dense_batch_of_one(own):
    """Boundaries given with a dense batch of one: one backend honoured them, another failed on the device."""
    tensors = drawn(own, 48, dtype=FP16, form="sbhd")
    lengths = own.lengths(7, 19, 22)
    q, k, v, _ = tensors
    for name in ("padding", "padding_causal"):
        with pytest.raises(InvalidProblem, match=r"cu_seqlens_q has shape \[4\], expected \[2\]"):
            attention(q, k, v, qkv_format="sbhd", attn_mask_type=name, backend=own.name, **lengths)
    with pytest.raises(InvalidProblem, match=r"cu_seqlens_q has shape \[4\], expected \[2\]"):
        fused_attn_fwd(
            True, 48, 48, *lengths.values(), q, k, v, FP16, own.name, qkv_layout="sbhd_sbhd_sbhd",
            o_format="sbhd", attn_mask_type="padding",
        )  # fmt: skip
    packed = own.attend(*(x[:, 0] for x in tensors), **THD, **lengths).verify()
    of = torch.repeat_interleave(torch.arange(3), torch.tensor([7, 19, 22])).to(own.device)
    blocks = (of[:, None] != of)[None, None]
    dense = own.attend(
        *tensors, qkv_format="sbhd", attn_mask_type="arbitrary", attention_mask=blocks
    )
    dense.verify()
    for name in ("out", *GRADIENTS):
        close(packed.results[name], dense.results[name][:, 0].double(), units=2)
