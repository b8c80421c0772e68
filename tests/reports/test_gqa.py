"""Which query heads a KV head serves, and the sum of their gradients."""

from __future__ import annotations

import pytest
import torch
from tests.reports.harness import BF16, close, drawn, report, same

GQA = "mapping of heads and reduction of dk, dv"


def heads_numbered(own, heads, groups, length, dims, dtype):
    """q = 0 and dout of head h is h + 1: dv of a KV head is an integer."""
    q = own.zeros(1, length, heads, dims, dtype=dtype)
    k, v = (own.h(seed, 1, length, groups, dims, dtype=dtype) for seed in (2, 3))
    number = torch.arange(1, heads + 1, device=own.device).to(dtype)
    return q, k, v, number[None, None, :, None].expand(1, length, heads, dims)


@report(
    "XunhaoLai/native-sparse-attention-triton#27",
    GQA,
    "with dout = h + 1, six heads over two: dv is 6 and 15; other ratios likewise",
)
@pytest.mark.parametrize("heads", [(6, 2), (8, 1), (7, 1), (6, 3), (10, 5), (3, 3)], ids=str)
def test_dv_is_the_sum_over_the_own_heads(own, dtype, heads):
    """The backward mapped query heads to KV heads with another divisor than the forward."""
    total, groups = heads
    call = own.attend(*heads_numbered(own, total, groups, 8, 16, dtype)).verify()
    share = total // groups
    for g in range(groups):
        expected = sum(range(g * share + 1, (g + 1) * share + 1))
        close(call.dv[:, :, g], torch.full((1, 8, 16), float(expected)))


@report(
    "pytorch/pytorch#186434",
    GQA,
    "one query gives what row 0 of two queries gives, under any memory",
)
def test_a_single_query(own, poisoned_memory):
    """A shortcut for one query swapped heads and rows, and passed the tensors that were not swapped."""
    q, k, v, dout = drawn(own, 2, 20, batch=3, heads=(8, 2), d=128, dtype=BF16)
    one = own.attend(q[:, :1], k, v, dout[:, :1]).verify()
    two = own.attend(q, k, v, dout)
    for name in ("out", "dq"):
        close(one.results[name], two.results[name][:, :1].double(), units=2)
    close(one.lse, two.lse[:, :, :1].double())


@report(
    "marin-community/levanter#449",
    GQA,
    "dk, dv have the KV heads' shape and are sums over the group, not the last member's",
)
def test_gradients_of_a_group_are_summed(own, dtype):
    """K and V were broadcast over the group in the forward and their gradients not summed in the backward."""
    q, k, v, dout = drawn(own, 9, batch=2, heads=(6, 2), dtype=dtype)
    call = own.attend(q, k, v, dout, attn_mask_type="causal").verify()
    assert call.dk.shape == k.shape
    assert call.dv.shape == v.shape
    apart = own.attend(
        q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2), dout, attn_mask_type="causal"
    )
    for name in ("dk", "dv"):
        close(call.results[name], apart.results[name].double().unflatten(2, (2, 3)).sum(3), units=4)
    integers = own.attend(*heads_numbered(own, 6, 2, 8, 16, dtype))
    assert integers.dv[0, 0, :, 0].round().tolist() == [6.0, 15.0]


@report(
    "marin-community/levanter#449",
    GQA,
    "dk, dv have the KV heads' shape and are sums over the group, not the last member's",
)
def test_a_query_head_reaches_its_own_kv_head_alone(own):
    """Changing one query head changes dk, dv of its KV head and nothing else."""
    q, k, v, dout = drawn(own, 9, heads=(6, 2), dtype=BF16)
    before = own.attend(q, k, v, dout)
    q = q.clone()
    q[:, :, 4] *= 2
    after = own.attend(q, k, v, dout)
    for name in ("dk", "dv"):
        same(after.results[name][:, :, 0], before.results[name][:, :, 0])
        assert not torch.equal(after.results[name][:, :, 1], before.results[name][:, :, 1])
