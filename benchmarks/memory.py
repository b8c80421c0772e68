"""Peak memory of a forward and backward of the Triton kernels beyond inputs, outputs and gradients.

    python -m benchmarks.memory --json OUT

Against the formula of ``backends/triton/README.md``: 8 B H S for level and delta, and what split reductions take.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from gradtruth.backends import get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs, Wanted

MIB = 2**20


def measured(s: int, h: int, g: int, d: int, **spec) -> dict[str, float]:
    """Bytes beyond what the caller holds; the formula's beside it."""
    bias = spec.pop("bias_shape", None)
    q, k, v, dout = (
        torch.randn(1, s, n, d, device="cuda", dtype=torch.bfloat16) for n in (h, g, g, h)
    )
    inputs = Inputs(q=q, k=k, v=v, bias=None if bias is None else torch.randn(bias, device="cuda"))
    problem = Problem.of(Spec(right=0, **spec), inputs)
    backend, wanted = get("triton"), Wanted(dsoftmax_offset=False, dbias=bias is not None)
    small = Inputs(q=q[:, :256], k=k[:, :256], v=v[:, :256])
    if bias is None:  # compile first
        backend.forward(Problem.of(problem.spec, small), small)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward = backend.forward(problem, inputs)
    after_forward = torch.cuda.max_memory_allocated() - before
    grads = backend.backward(problem, inputs, forward, dout, None, wanted)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    held = [forward.out, forward.lse, *(x for _, x in grads.items())]
    results = sum(x.numel() * x.element_size() for x in held)
    formula = 8 * h * s
    if bias is not None:
        elements = torch.Size(bias).numel()
        formula += 4 * elements * max(1, min(512, (64 << 20) // (4 * elements)))
    return {
        "S": s, "heads": f"{h}/{g}", "d": d, "bias": str(bias), "forward_extra_mib": (
            after_forward - sum(x.numel() * x.element_size() for x in held[:2])) / MIB,
        "extra_mib": (peak - results) / MIB, "formula_mib": formula / MIB,
        "square_gib": h * s * s * 2 / 2**30,
    }  # fmt: skip


def main() -> None:
    """Print and save a table up to 128k."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for s in (4096, 16384, 65536, 131072):
        for h, g, d in ((16, 16, 128), (32, 8, 64)):
            rows.append(measured(s, h, g, d))
    rows.append(measured(16384, 16, 16, 128, bias="post_scale", bias_shape=(1, 1, 1, 16384)))
    for row in rows:
        print(
            ", ".join(
                f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
            )
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
