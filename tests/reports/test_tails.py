"""Lengths that do not fill a tile, under scores so low that an empty lane would overflow."""

from __future__ import annotations

import pytest
import torch
from tests.reports.harness import (
    BF16,
    FP16,
    close,
    drawn,
    finite,
    negative,
    report,
    vanishes,
    zero,
)

TAILS = "tile tails: lengths that do not fill a tile"


@report("pytorch/pytorch#196678", TAILS, "every gradient is finite and that of fp64")
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 192])
def test_low_scores_with_a_mask_tensor(own, length):
    """Lanes past the last key scored 0 when a mask tensor was given: exp(0 - lse) is Inf once lse is under -89, and
    dq NaN, at lengths of 64 mod 128."""
    tensors = negative(drawn(own, length, heads=(1, 1), d=64, dtype=BF16), -120.0)
    nothing = torch.zeros(1, 1, length, length, dtype=torch.bool, device=own.device)
    for options in ({"attn_mask_type": "arbitrary", "attention_mask": nothing}, {}):
        call = own.attend(*tensors, **options)
        assert call.lse.max() < -100
        finite(call.results.values())
        call.verify()


@report(
    "Dao-AILab/flash-attention#443",
    TAILS,
    "a row sees one key or none: dq = dk = 0 up to rounding, dv of a key is dout of the last row of its sequence",
)
def test_one_key_per_sequence_and_many_queries(own):
    """Many queries and one key per sequence: dq was NaN, dk and dv finite."""
    q, k, v, dout = (3 * x for x in drawn(own, 70, 3, heads=(1, 1), d=32, dtype=FP16, form="thd"))
    call = own.attend(
        q, k, v, dout, qkv_format="thd", attn_mask_type="padding_causal_bottom_right",
        cu_seqlens_q=own.cu(0, 20, 31, 70), cu_seqlens_kv=own.cu(0, 1, 2, 3),
    ).verify()  # fmt: skip
    last = [19, 30, 69]
    close(call.dv, dout[last].double())
    close(call.out[last], v.double())
    vanishes(call, "dq", "dk")
    others = [at for at in range(70) if at not in last]
    zero(call.dq[others], call.out[others])
    assert (call.lse[others] == -torch.inf).all()


@report("ROCm/aiter#3551", TAILS, "every gradient is finite and that of fp64")
@pytest.mark.parametrize("sizes", [(40, 37), (37, 40), (129, 127)], ids=str)
def test_low_scores_without_a_mask(own, sizes):
    """The backward without a mask recomputed probabilities past the last key and hid them only after the exp."""
    tensors = negative(drawn(own, *sizes, heads=(1, 1), d=32, dtype=BF16), -110.0)
    call = own.attend(*tensors)
    finite(call.results.values())
    call.verify()


@report(
    "NVIDIA/cudnn-frontend#160",
    TAILS,
    "no mask and a padding mask over the full length give the same",
)
@pytest.mark.parametrize("length", [2, 3, 5, 31])
def test_short_sequences_with_and_without_lengths(own, length, poisoned_memory):
    """A very short sequence gave NaN gradients unless a padding mask said its length."""
    tensors = drawn(own, length, d=64, dtype=FP16)
    plain = own.attend(*tensors).verify()
    padded = own.attend(*tensors, attn_mask_type="padding", **own.lengths(length)).verify()
    for name, tensor in plain.results.items():
        close(padded.results[name], tensor.double(), units=2)
