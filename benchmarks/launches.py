"""Host time of a seen problem on a GPU, ours and the peers', and CUDA-graph replay beside eager for small shapes.

    python -m benchmarks.launches --json OUT

Host time is wall-clock until the call returns, over blocks that the GPU keeps up with (tiny shapes), in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import gradtruth
from benchmarks.contestants import SDPA, fa4, ours
from gradtruth.backends import get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs, Wanted


def host_us(call, blocks: int = 15, calls: int = 50) -> float:
    """Median over blocks of the mean time of a call until it returns."""
    for _ in range(20):
        call()
    times = []
    for _ in range(blocks):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return statistics.median(times)


def tensors(b=1, s=64, h=4, d=64):
    """q, k, v."""
    return [
        torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]


def contestants():
    """Functional forms by name."""
    yield "gradtruth (triton)", ours(attn_mask_type="causal")
    for name in ("cudnn", "flash2"):
        yield f"SDPA {name}", SDPA[name](is_causal=True)
    yield "FA4", fa4(causal=True)


def host_table() -> list[dict[str, object]]:
    """Forward and backward of each through autograd, and ours without it."""
    rows = []
    for name, call in contestants():
        leaves = tensors()
        try:
            out = call(*leaves)
            dout = torch.randn_like(out)
            with torch.no_grad():
                forward = host_us(lambda call=call, leaves=leaves: call(*leaves))
            backward = host_us(
                lambda out=out, leaves=leaves, dout=dout: torch.autograd.grad(
                    out, leaves, dout, retain_graph=True
                )
            )
            rows.append({"name": name, "forward_us": forward, "backward_us": backward})
        except Exception as fault:  # noqa: BLE001 - whatever a peer raises is its row
            rows.append({"name": name, "refused": str(fault)[:100]})
    backend = get("triton")
    for layout in ("bshd", "thd"):
        q, k, v = (x.detach() for x in tensors())
        cu = torch.tensor([0, 64], dtype=torch.int32, device="cuda") if layout == "thd" else None
        if layout == "thd":
            q, k, v = (x[0] for x in (q, k, v))
        inputs = Inputs(q=q, k=k, v=v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
        lengths = "cu_seqlens" if cu is not None else "full"
        problem = Problem.of(Spec(layout=layout, lengths=lengths, right=0), inputs)
        found, dout = backend.forward(problem, inputs), torch.randn_like(q)
        rows.append({
            "name": f"backend alone, {layout}",
            "forward_us": host_us(lambda p=problem, i=inputs: backend.forward(p, i)),
            "backward_us": host_us(
                lambda p=problem, i=inputs, f=found, d=dout: backend.backward(
                    p, i, f, d, None, Wanted()
                )
            ),
        })  # fmt: skip
    return rows


def replay_table() -> list[dict[str, object]]:
    """A forward and backward, eager and replayed from a CUDA graph, microseconds until the GPU is done."""
    rows = []
    for b, s, h, d in ((1, 128, 8, 64), (2, 384, 16, 128), (4, 512, 16, 256)):
        q, k, v = tensors(b, s, h, d)
        dout = torch.randn_like(q)

        def step(q=q, k=k, v=v, dout=dout):
            out = gradtruth.attention(q, k, v, attn_mask_type="causal", backend="triton")
            return torch.autograd.grad(out, (q, k, v), dout)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        graph.replay()
        torch.cuda.synchronize()
        same = all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
        times = [_finished_us(call) for call in (step, graph.replay)]
        rows.append(
            {
                "shape": f"b{b} s{s} h{h} d{d}",
                "eager_us": times[0],
                "replay_us": times[1],
                "same_bits": same,
            }
        )
    return rows


def _finished_us(call, blocks: int = 11, calls: int = 20) -> float:
    times = []
    for _ in range(blocks):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return statistics.median(times)


def main() -> None:
    """Print and save both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {"host": host_table(), "replay": replay_table()}
    for row in (*found["host"], *found["replay"]):
        print(
            ", ".join(
                f"{k} {v:.0f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
            )
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
