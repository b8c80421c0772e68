"""Memory that nobody wrote, and what an earlier call left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.reports.harness import (
    BF16,
    FP16,
    GRADIENTS,
    Call,
    close,
    drawn,
    finite,
    report,
    same,
    zero,
)
from torch import Tensor

import gradtruth
from gradtruth.compat.transformer_engine import fused_attn_bwd, fused_attn_fwd

UNWRITTEN = "unwritten memory returned as data"
LIFETIME = "workspace or saved state that outlives its call"
THD = {"qkv_format": "thd", "attn_mask_type": "padding"}


def rows(call: Call, at: slice) -> dict[str, Tensor]:
    return {name: tensor[at] for name, tensor in call.results.items()}


@report(
    "pytorch/pytorch#188933",
    UNWRITTEN,
    "dq, dk, dv of rows that no sequence owns are exactly 0, all others as without these rows",
)
@pytest.mark.parametrize("counted", [24, 26], ids=["owned rows", "all rows"])
def test_rows_past_the_last_sequence(own, dtype, counted, poisoned_memory):
    """Tensors longer than the last entry of cu_seqlens: the backward left NaN in the rows that no sequence owns."""
    q, k, v, dout = drawn(own, 26, dtype=dtype, form="thd")
    dout[counted:] = 0
    options = {**THD, "attn_mask_type": "padding_causal", **own.lengths(9, 15)}
    call = own.attend(q, k, v, dout, **options).verify()
    zero(call.out[24:], *(call.results[name][24:] for name in GRADIENTS))
    assert (call.lse[24:] == -torch.inf).all()
    short = own.attend(*(x[:24] for x in (q, k, v, dout)), **options)
    for name, tensor in rows(call, slice(24)).items():
        close(tensor, short.results[name])


@report(
    "fla-org/flash-linear-attention#892",
    UNWRITTEN,
    "the weight gradient of a projection in front is finite and that over the owned rows alone",
)
def test_tail_of_gradients_meets_a_projection(own, poisoned_memory):
    """Gradient buffers were allocated empty and written inside sequences only: NaN in the tail of dk spread to every
    weight of the projection that made k."""
    x, weight = own.h(9, 26, 8), own.h(10, 8, 32)
    q, _, v, dout = drawn(own, 26, form="thd")

    def weight_gradient(count: int) -> Tensor:
        leaf = weight.clone().requires_grad_()
        k = (x[:count] @ leaf).view(count, 2, 16)
        out = gradtruth.attention(
            q[:count], k, v[:count], backend=own.name, **THD, **own.lengths(9, 15)
        )
        freed = torch.softmax(torch.full_like(k, -torch.inf), -1)  # NaN
        del freed
        out.backward(dout[:count])
        return leaf.grad

    found = weight_gradient(26)
    finite([found])
    close(found, weight_gradient(24).double(), units=32)


# ---------------------------------------------------------------- calls after calls


class Calls:
    """The two calls of the report, over the same tensors with other lengths."""

    def __init__(self, own: Any) -> None:
        self.own = own
        self.tensors = [
            own.h(seed, *shape, dtype=FP16)
            for seed, shape in enumerate(((3, 2, 8), (9, 1, 8), (9, 1, 8), (3, 2, 8)), 1)
        ]
        self.lengths = {
            "A": {"cu_seqlens_q": own.cu(0, 1, 3), "cu_seqlens_kv": own.cu(0, 3, 9)},
            "B": {"cu_seqlens_q": own.cu(0, 0, 3), "cu_seqlens_kv": own.cu(0, 3, 9)},
        }

    def __call__(self, which: str) -> dict[str, Tensor]:
        q, k, v, dout = self.tensors
        common = {
            "max_seqlen_q": 3, "max_seqlen_kv": 6, **self.lengths[which], "q": q, "k": k, "v": v,
            "fake_dtype": FP16, "fused_attention_backend": self.own.name,
            "qkv_layout": "thd_thd_thd", "attn_mask_type": "padding",
        }  # fmt: skip
        out, aux = fused_attn_fwd(True, o_format="thd", **common)
        grads = fused_attn_bwd(
            **common, o=out, d_o=dout, aux_ctx_tensors=aux, o_format="thd", do_format="thd",
            dqkv_layout="thd_thd_thd",
        )  # fmt: skip
        return {
            "out": out,
            "lse": aux[0][..., 0],
            **dict(zip(GRADIENTS, grads[:3], strict=True)),
        }


@report(
    "NVIDIA/TransformerEngine#2448",
    LIFETIME,
    "every call is what it is alone, in any order; dk, dv of the sequence without a query are exactly 0",
)
@pytest.mark.parametrize("order", ["AB", "BA", "AAB", "ABBA"])
def test_calls_in_any_order(own, order):
    """thd with GQA: dk and dv of the second backward held values of the first, so the order of calls changed them."""
    calls = Calls(own)
    alone = {which: calls(which) for which in "AB"}
    for which in order:
        found = calls(which)
        between = own.h(7, 40, 8, dtype=BF16).float() + 1  # other sizes and another dtype
        del between
        for name, tensor in found.items():
            same(tensor, alone[which][name])
        sample = own.sample(*calls.tensors, **THD, **calls.lengths[which])
        own.judge(sample, found)
        if which == "B":
            zero(found["dk"][:3], found["dv"][:3])


@report(
    "Dao-AILab/flash-attention#2337",
    LIFETIME,
    "dq, dk, dv of every sequence are those of the sequence alone",
)
def test_many_short_sequences(own, poisoned_memory):
    """An accumulator was sized for one tile and addressed with another: with many sequences dq of the last ones lay
    past its end."""
    lengths = [1 + 5 * at % 9 for at in range(24)]
    q, k, v, dout = drawn(own, sum(lengths), d=64, dtype=BF16, form="thd")
    call = own.attend(q, k, v, dout, **THD, **own.lengths(*lengths)).verify()
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        one = own.attend(*(x[part] for x in (q, k, v, dout)), **THD, **own.lengths(length))
        for name, tensor in rows(call, part).items():
            close(tensor, one.results[name].double(), units=2)
        start += length
