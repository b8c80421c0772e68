"""Times every candidate tile of every kernel on this GPU, and writes the table that schedules are chosen from.

    python -m benchmarks.tune --dim 64 128 --json OUT     # two minutes on an H200
    python -m benchmarks.tune --kernel keys --dim 256

Each row: kernel, padded head dim, tile, warps, stages, TFLOP/s full and causal (forward 4 B H S S D; a kernel's share
of the backward 4/5 and 3/5 of 2.5 times that), registers, spills. Candidates that do not compile or do not fit say so.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.kernels import median_ms
from benchmarks.shapes import TOKENS
from gradtruth.backends.triton import arguments, launch
from gradtruth.backends.triton.schedule import Tile, tiles_for
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs, Wanted

CANDIDATES = {
    ("forward", 64): [(128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 3)],
    ("forward", 128): [(64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 128, 4, 2)],
    ("forward", 256): [(128, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 3)],
    ("keys", 64): [
        (64, 64, 4, 2),
        (32, 64, 4, 3),
        (64, 64, 4, 1),
        (64, 128, 8, 2),
        (32, 128, 8, 3),
        (128, 64, 8, 2),
    ],
    ("keys", 128): [
        (32, 64, 4, 3),
        (32, 64, 4, 2),
        (16, 64, 4, 3),
        (64, 64, 8, 2),
        (32, 128, 8, 2),
        (64, 128, 8, 1),
    ],
    ("alone", 64): [(64, 64, 4, 3), (64, 128, 8, 2)],
    ("alone", 128): [(64, 64, 4, 3), (64, 128, 8, 2), (64, 64, 4, 2)],
    ("alone", 256): [
        (64, 128, 8, 1),
        (32, 128, 8, 2),
        (32, 64, 4, 2),
        (64, 64, 4, 1),
        (64, 64, 8, 2),
    ],
    ("queries", 64): [(64, 64, 4, 3), (128, 64, 8, 3)],
    ("queries", 128): [(128, 64, 8, 3), (64, 64, 4, 2), (128, 32, 8, 3)],
    ("queries", 256): [(128, 32, 8, 2), (64, 32, 4, 1), (64, 32, 4, 2)],
}
SHARE = {"forward": 1.0, "keys": 2.0, "alone": 2.0, "queries": 1.5}  # of a forward's count
WANTED = {
    "keys": Wanted(dq=False), "alone": Wanted(dq=False), "queries": Wanted(dk=False, dv=False),
}  # fmt: skip


def measured(kernel: str, dim: int, tile: Tile, s: int) -> dict[str, object]:
    """TFLOP/s full and causal."""
    b, h = max(1, TOKENS // s), 2048 // dim
    row: dict[str, object] = {"kernel": kernel, "dim": dim, "S": s, "tile": str(tile)}
    for name, right in (("full", None), ("causal", 0)):
        q, k, v, dout = (
            torch.randn(b, s, h, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)
        )
        inputs = Inputs(q=q, k=k, v=v)
        problem = Problem.of(Spec(right=right), inputs)
        plain = tiles_for(problem, large=True)
        chosen = {"keys_alone": tile} if kernel == "alone" else {kernel: tile}
        if kernel == "keys":
            chosen["keys_alone"] = None
        table = replace(plain, **chosen)
        arguments.schedule = lambda *_, table=table: table
        flops = 4 * b * h * s * s * dim * SHARE[kernel] * (1 if right is None else 0.5)
        forward = launch.attend(problem, inputs)
        if kernel == "forward":
            ms = median_ms(lambda p=problem, i=inputs: launch.attend(p, i))
        else:
            call = launch.Backward(problem, inputs, forward, dout, None)
            half = call.queries if kernel == "queries" else call.keys
            ms = median_ms(lambda half=half: half(WANTED[kernel]))
        row[name] = round(flops / ms / 1e9)
    return row


def spills(kernel: str) -> list[int]:
    """Of what was compiled last."""
    cache = {"forward": launch._forward, "queries": launch._queries}.get(kernel, launch._keys)
    newest = (
        list(cache._compiled._entries.values())[-1]
        if hasattr(cache._compiled, "_entries")
        else None
    )
    return [] if newest is None else [newest[1].n_regs, newest[1].n_spills]


def main() -> None:
    """Print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, nargs="*", default=(64, 128, 256))
    parser.add_argument("--kernel", nargs="*", default=tuple(SHARE))
    parser.add_argument("--length", type=int, nargs="*", default=(8192, 1024))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for (kernel, dim), tiles in CANDIDATES.items():
        if dim not in given.dim or kernel not in given.kernel:
            continue
        for tile in tiles:
            for s in given.length:
                try:
                    row = measured(kernel, dim, Tile(*tile), s)
                    row["registers, spills"] = spills(kernel)
                except Exception as fault:  # noqa: BLE001 - what does not compile is a row too
                    row = {
                        "kernel": kernel,
                        "dim": dim,
                        "S": s,
                        "tile": str(tile),
                        "error": str(fault)[:90],
                    }
                rows.append(row)
                print(", ".join(f"{k} {v}" for k, v in row.items()), flush=True)
                if given.json:
                    given.json.write_text(json.dumps(rows, indent=1) + "\n")
                if "error" in row:
                    break


if __name__ == "__main__":
    main()
