"""Sizes past 32-bit offsets and past the limits of a launch.

The two backends in plain torch take one sequence after the other on the host: they have no grid, and a few hundred
sequences say the same as thousands.
"""

from __future__ import annotations

import pytest
import torch
from tests.reports.harness import BF16, FP16, WHOLE, close, drawn, report, same, vanishes

OFFSETS = "32-bit offsets"
LAUNCH = "launch limits"


@report("Dao-AILab/flash-attention#2260", OFFSETS, "one query and key each: dq = dk = 0, dv = dout")
def test_many_batch_items_of_one_token(own):
    """An offset into dq's accumulator was multiplied in 32 bits before it was widened."""
    batch = 200 if own.name in WHOLE else 8300
    q, k, v, dout = drawn(own, 1, batch=batch, heads=(16, 16), d=128, dtype=BF16)
    call = own.attend(q, k, v, dout)
    same(call.out, v)
    same(call.dv, dout)
    vanishes(call, "dq", "dk")


@report(
    "pytorch/pytorch#190857",
    OFFSETS,
    "keys and values far apart in memory give what their copies give",
)
def test_rows_further_apart_than_2_to_the_31(own):
    """The address of a key was flattened in 32 bits: illegal memory access past 2^31 elements."""
    rows, stride = 200, 11_000_000
    memory = torch.empty((rows - 1) * stride + 128, dtype=BF16, device=own.device)
    assert memory.numel() > 2**31
    q, k, v, dout = drawn(own, 32, rows, heads=(1, 1), d=64, dtype=BF16)
    far = []
    for offset, near in ((0, k), (64, v)):
        view = memory.as_strided((1, rows, 1, 64), (0, stride, 64, 1), offset)
        far.append(view.copy_(near))
    found = own.attend(q, *far, dout)
    expected = own.attend(q, k, v, dout).verify()
    for name, tensor in expected.results.items():
        close(found.results[name], tensor.double(), units=2)


@report("pytorch/pytorch#146704", LAUNCH, "out = v, dv = dout in the last batch item and head too")
@pytest.mark.parametrize("what", ["batch", "heads", "sequences"])
def test_more_than_65535(own, what):
    """A grid dimension past 65,535 was an invalid launch; one that is swallowed leaves what memory held."""
    count = 300 if own.name in WHOLE and what != "heads" else 65537
    options = {}
    if what == "sequences":
        tensors = drawn(own, count, heads=(1, 1), dtype=FP16, form="thd")
        each = torch.arange(count + 1, dtype=torch.int32, device=own.device)
        options = {
            "qkv_format": "thd",
            "attn_mask_type": "padding",
            "cu_seqlens_q": each,
            "cu_seqlens_kv": each,
        }
    elif what == "batch":
        tensors = drawn(own, 1, batch=count, heads=(1, 1), dtype=FP16)
    else:
        tensors = drawn(own, 1, heads=(count, count), dtype=FP16)
    call = own.attend(*tensors, **options)
    same(call.out, tensors[2])
    same(call.dv, tensors[3])
    vanishes(call, "dq", "dk")
