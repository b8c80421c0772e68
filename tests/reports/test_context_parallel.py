"""Context parallelism in one process: what ranks would compute from their chunks, merged and summed."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from tests.reports.harness import Call, close, drawn, finite, report, same, zero
from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse, stored
from gradtruth.core.merge import merge
from gradtruth.core.tensors import Forward, Wanted
from gradtruth.core.tile import tile

CONTEXT = "context parallelism"
SLACK = 2.0  # budgets: results are put together from rounded parts


def chunks(own, *ends: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Half-open ranges between ends, each [B]."""
    marks = [torch.tensor(end, dtype=torch.int32, device=own.device) for end in ends]
    return list(pairwise(marks))


def ring(call: Call, queries: list, keys: list) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv from every chunk of queries against every chunk of keys, in the order given."""
    sample, backend = call.sample, call.own.backend
    problem, inputs, layout = sample.problem, sample.inputs, sample.problem.layout
    out = torch.zeros_like(canonical(call.out, layout))
    lse = torch.full_like(canonical_lse(call.lse, layout), -torch.inf)
    parts = [tile(problem, inputs, queries=a, keys=b) for a, b in product(queries, keys)]
    for part in parts:
        if not backend.supports(part[0], call.own.device).ok:
            pytest.skip(str(backend.supports(part[0], call.own.device)))
        found = backend.forward(*part)
        out, lse = merge(out, lse, canonical(found.out, layout), canonical_lse(found.lse, layout))
    results = {
        "out": stored(out, layout).contiguous(),
        "lse": lse[0].t() if layout == "thd" else lse,
    }
    for name in ("dq", "dk", "dv"):
        results[name] = torch.zeros_like(call.results[name])
    whole = Forward(out=results["out"], lse=results["lse"])
    for part in parts:
        grads = backend.backward(*part, whole, sample.dout, None, Wanted())
        for name in ("dq", "dk", "dv"):
            results[name] += getattr(grads, name)
    return results


def agree(call: Call, results: dict[str, Tensor]) -> None:
    call.own.judge(call.sample, results, slack=SLACK)


def order_of(names: str, parts: list) -> list:
    """Chunks in the order in which ranks meet them: zigzag pairs the first with the last."""
    at = {"in order": (0, 1, 2, 3), "zigzag": (0, 3, 1, 2), "reversed": (3, 2, 1, 0)}[names]
    return [parts[n] for n in at]


@report(
    "NVIDIA/TransformerEngine#2186",
    CONTEXT,
    "padding rows of every gradient are 0, all others are those of one device",
)
def test_chunks_that_are_all_padding(own, poisoned_memory):
    """Where the second half of a rank was padding altogether dk and dv exploded."""
    lengths, padded = [9, 7, 8, 12, 8, 12], [0, 12, 20, 28, 40, 48, 60]
    cu = [sum(lengths[:n]) for n in range(7)]
    tensors = drawn(own, 60, heads=(2, 1), form="thd")
    options = {f"cu_seqlens_{side}": own.cu(*cu) for side in ("q", "kv")}
    options |= {f"cu_seqlens_{side}_padded": own.cu(*padded) for side in ("q", "kv")}
    call = own.attend(
        *tensors, qkv_format="thd", attn_mask_type="padding_causal", **options
    ).verify()
    slots = [b - a for a, b in pairwise(padded)]
    parts = chunks(own, *([slot * n // 4 for slot in slots] for n in range(5)))
    empty = [int(a) >= length for a, length in zip(parts[3][0], lengths, strict=True)]
    assert any(empty)
    results = ring(call, order_of("zigzag", parts), order_of("zigzag", parts))
    finite(results[name] for name in ("out", "dq", "dk", "dv"))
    agree(call, results)
    for n, length in enumerate(lengths):
        pad = slice(padded[n] + length, padded[n + 1])
        zero(*(results[name][pad] for name in ("out", "dq", "dk", "dv")))


@report(
    "NVIDIA/TransformerEngine#1930",
    CONTEXT,
    "the last valid token attends all seven and is attended",
)
@pytest.mark.parametrize("places", [8, 10])
def test_an_odd_length(own, places):
    """A length of 7 was rounded down to fit the chunks, and the last token was ignored."""
    tensors = drawn(own, places, heads=(1, 1), d=8)
    call = own.attend(*tensors, attn_mask_type="padding_causal", **own.lengths(7)).verify()
    parts = chunks(own, *([-(-places * n // 4)] for n in range(5)))
    results = ring(call, parts, order_of("zigzag", parts))
    agree(call, results)
    q, k, v, dout = (x[0, :7, 0].double() for x in tensors)
    scores = (q[6] @ k.t()) / 8**0.5
    close(results["lse"][0, 0, 6], scores.logsumexp(0), units=8)
    close(results["out"][0, 6, 0], scores.softmax(0) @ v, units=16)
    close(results["dv"][0, 6, 0], scores.softmax(0)[6] * dout[6], units=16)
    zero(results["out"][:, 7:], results["dk"][:, 7:])


@report("huggingface/diffusers#14265", CONTEXT, "gradients are those of one device")
def test_every_step_uses_its_own_keys(own):
    """The backward of a ring used the keys of its first step at every step: the forward was right, gradients not."""
    call = own.attend(*drawn(own, 16, d=32)).verify()
    parts = chunks(own, [0], [8], [16])
    agree(call, ring(call, parts, parts))


@report(
    "pytorch/pytorch#141429", CONTEXT, "without a causal mask the order of chunks changes nothing"
)
def test_the_order_of_chunks_without_a_mask(own):
    """Load balancing, made for causal masks, crashed without one."""
    call = own.attend(*drawn(own, 16)).verify()
    parts = chunks(own, [0], [4], [8], [12], [16])
    found = {
        name: ring(call, parts, order_of(name, parts))
        for name in ("in order", "zigzag", "reversed")
    }
    for results in found.values():
        agree(call, results)
        for name in ("out", "lse", "dq", "dk", "dv"):
            close(results[name], found["in order"][name].double(), units=16)
    same(ring(call, parts, parts)["dq"], found["in order"]["dq"])
