"""The same call again: the same bits, and nothing kept that no longer holds."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from tests.reports.harness import BF16, FP16, close, drawn, report, same, zero

import gradtruth
from gradtruth import DotProductAttention
from gradtruth.core.tensors import Wanted

RACES = "determinism and races"
CACHES = "plan and graph caches"


@contextmanager
def busy(device: torch.device):
    """The device has other work meanwhile: products on a second stream, or on the CPU in another thread."""
    if device.type == "cuda":
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            x = torch.ones(2048, 2048, device=device, dtype=BF16)
            for _ in range(400):
                x = x @ x * 0.0
        yield
        side.synchronize()
        return
    done = threading.Event()

    def work() -> None:
        x = torch.ones(128, 128)
        while not done.is_set():
            x = x @ x * 0.0

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@report("Dao-AILab/flash-attention#2244", RACES, "every run has the bits of the first")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_many_runs_have_one_result(own, heads):
    """dq differed from run to run although determinism had been asked for."""
    tensors = drawn(own, 192, batch=2, heads=heads, d=64, dtype=FP16)
    options = {"attn_mask_type": "causal", "deterministic": True}
    first = own.attend(*tensors, **options).verify()
    sample = first.sample
    with busy(own.device):
        for _ in range(200 if own.device.type == "cuda" else 8):
            forward = own.backend.forward(sample.problem, sample.inputs)
            grads = own.backend.backward(
                sample.problem, sample.inputs, forward, sample.dout, None, Wanted()
            )
            found = {"out": forward.out, "lse": forward.lse, **dict(grads.items())}
            for name, tensor in found.items():
                same(tensor, first.results[name])


# ---------------------------------------------------------------- caches


@report(
    "flashinfer-ai/flashinfer#4014", CACHES, "every call uses its own scale and its own strides"
)
def test_the_same_shapes_with_another_scale_or_stride(own, dtype):
    """A graph was found by its shapes alone: another scale or other strides replayed the first one's."""
    tensors = drawn(own, 16, dtype=dtype)
    for scale in (0.25, 0.75, 0.25):
        call = own.attend(*tensors, softmax_scale=scale).verify()
        scores = torch.einsum("ihd,jhd->hij", *(x[0].double() for x in tensors[:2])) * scale
        close(call.lse[0], scores.logsumexp(-1), units=16)
    q, _, _, dout = tensors
    wide = own.h(6, 1, 16, 4, 16, dtype=dtype)
    k, v = wide[:, :, ::2], wide[:, :, 1::2]
    own.attend(q, k.contiguous(), v.contiguous(), dout).verify()
    own.attend(q, k, v, dout).verify()


@report(
    "sgl-project/sgl-flash-attn#47",
    CACHES,
    "after cu_seqlens change in place a repeated call, or a replayed graph, gives what a fresh call gives",
)
def test_lengths_that_change_in_place(own):
    """A captured graph was replayed with other lengths than it had been captured with: boundary rows were wrong."""
    tensors = drawn(own, 64, dtype=BF16, form="thd")
    cu = own.cu(0, 20, 40, 64)
    sample = own.sample(
        *tensors, qkv_format="thd", attn_mask_type="padding", cu_seqlens_q=cu, cu_seqlens_kv=cu
    )
    backend = own.backend
    if not backend.supports(sample.problem, own.device).ok:
        pytest.skip(str(backend.supports(sample.problem, own.device)))

    def run() -> dict[str, torch.Tensor]:
        forward = backend.forward(sample.problem, sample.inputs)
        grads = backend.backward(
            sample.problem, sample.inputs, forward, sample.dout, None, sample.wanted
        )
        return {"out": forward.out, "lse": forward.lse, **dict(grads.items())}

    replay = run
    if own.device.type == "cuda":
        stream = torch.cuda.Stream(own.device)
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()

        def replay() -> dict[str, torch.Tensor]:
            for tensor in captured.values():
                tensor.zero_()
            graph.replay()
            torch.cuda.synchronize()
            return captured

    for offsets in ((0, 20, 40, 64), (0, 5, 40, 64), (0, 20, 40, 50)):
        cu.copy_(own.cu(*offsets))
        found = replay()
        own.judge(sample, found)
        zero(*(found[name][offsets[-1] :] for name in ("out", "dq", "dk", "dv")))


@report("NVIDIA/TransformerEngine#630", CACHES, "every module and every batch uses its own lengths")
@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (1, 1), (2, 2)], ids=str)
def test_lengths_belong_to_their_call(own, numbers):
    """Lengths were computed in the layer numbered 1 and reused: stale for the next batch, missing without it."""
    q, k, v, _ = drawn(own, 16, batch=2)
    modules = [
        DotProductAttention(2, 16, qkv_format="bshd", attn_mask_type="padding", layer_number=number, backend=own.name)
        for number in numbers
    ]  # fmt: skip
    at = torch.arange(16, device=own.device)
    for lengths in ((5, 16), (16, 9), (5, 16)):
        hidden = at >= torch.tensor(lengths, device=own.device)[:, None]
        for module in modules:
            out = module(q, k, v, attention_mask=hidden[:, None, None])
            for n, length in enumerate(lengths):
                part = (x[n : n + 1, :length] for x in (q, k, v))
                alone = gradtruth.attention(*part, backend=own.name)
                close(out[n : n + 1, :length], alone.flatten(-2).double(), units=8)
                zero(out[n, length:])
