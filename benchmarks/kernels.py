"""The Triton kernels beside SDPA-cuDNN, SDPA-flash, FA4 and FlexAttention on one GPU: verified, then timed.

    for i in $(seq 0 11); do python -m benchmarks.kernels --warm $i 12 & done; wait    # compiles, in parallel
    python -m benchmarks.kernels --json FILE --seconds 300    # the grid and the features; what FILE has is kept
    python -m benchmarks.kernels --table FILE                 # the same as Markdown, nothing is run

TFLOP/s by the usual count (forward 4 B H S S D, halved when causal; backward 2.5 times that), medians of CUDA-event
times, backward through autograd, all contestants of a shape one after the other. A contestant whose out or gradients
are further than 2 % (relative L2, bf16; 1e-4 for fp32) from fp32 attention is printed as WRONG and not timed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.contestants import Call, Shape, ours
from benchmarks.shapes import features, grid

NEAR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
HALVES = ("forward_ms", "backward_ms")
COMPILED = ("ours", "fa4", "flex")


def median_ms(call: Callable[[], object], reps: int = 9) -> float:
    """Median CUDA-event time; events of all repetitions are recorded before any is read."""
    for _ in range(3):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def judge(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative L2 of out and gradients."""
    return max(
        ((x.float() - y.float()).norm() / y.float().norm()).item()
        for x, y in zip(found, exact, strict=True)
    )


def exact_of(shape: Shape, dout: Tensor) -> list[Tensor] | None:
    """out and gradients of fp32 attention of the same arguments, by the backend ``reference``."""
    if not shape.judged:
        return None
    torch.cuda.empty_cache()
    wide = [x.detach().float().requires_grad_() for x in shape.leaves]
    out = ours(*shape.names, backend="reference", **shape.given)(*wide)
    return [x.detach() for x in (out, *torch.autograd.grad(out, wide, dout.float()))]


def entry_of(shape: Shape, call: Call, dout: Tensor, exact: list[Tensor] | None) -> dict:
    """One contestant: refused, wrong, or timed."""
    try:
        out = call(*shape.leaves)
        grads = torch.autograd.grad(out, shape.leaves, dout, retain_graph=True)
        error = judge([out, *grads], exact) if exact else None
        entry = {"error": error}
        del grads
        if error is not None and not error <= NEAR[out.dtype]:
            return entry | {"wrong": True}
        with torch.no_grad():
            forward = median_ms(partial(call, *shape.leaves))
        backward = median_ms(
            partial(torch.autograd.grad, out, shape.leaves, dout, retain_graph=True)
        )
        return entry | {"forward_ms": forward, "backward_ms": backward}
    except Exception as fault:  # noqa: BLE001 - whatever a peer raises is its row
        first = (str(fault).splitlines() or [""])[0]
        return {"refused": f"{type(fault).__name__}: {first[:160]}"}


def fill(shape: Shape, row: dict, names: list[str]) -> None:
    """Verify and time these contestants."""
    calls = {"ours": shape.ours, **shape.peers}
    dout = torch.randn(shape.out_shape, device="cuda", dtype=shape.leaves[0].dtype)
    exact = exact_of(shape, dout)
    for name in names:
        row[name] = entry_of(shape, calls[name], dout, exact)
    best = {
        half: min((row[n][half] for n in shape.peers if half in row.get(n, {})), default=math.inf)
        for half in HALVES
    }
    mine = row.get("ours", {})
    row["ratio"] = None
    if "forward_ms" in mine and best["forward_ms"] < math.inf:
        row["ratio"] = [best[half] / mine[half] for half in HALVES]


def shown(row: dict) -> str:
    """One line: TFLOP/s forward / backward of each, and the ratio of ours to the best peer."""
    parts = []
    for name, entry in row.items():
        if not isinstance(entry, dict):
            continue
        if "forward_ms" in entry:
            rates = [
                row["flops"] * f / entry[t] / 1e9 for f, t in zip((1, 2.5), HALVES, strict=True)
            ]
            parts.append("{} {:.0f}/{:.0f}".format(name, *rates))
        else:
            parts.append(
                f"{name} " + (f"WRONG {entry['error']:.1e}" if "wrong" in entry else "refuses")
            )
    if row.get("ratio"):
        parts.append("ratio {:.2f}/{:.2f}".format(*row["ratio"]))
    return f"{row['name']:42} " + "  ".join(parts)


def shapes(only: str | None, *, short: bool) -> Iterator[Shape]:
    """The grid, then the features."""
    if only != "features":
        yield from grid(short=short)
    if only != "grid":
        yield from features()


def passes(shape: Shape) -> tuple[list[str], list[str]]:
    """Contestants of the first and of the second walk: what compiles for every length comes last in the grid."""
    names = ["ours", *shape.peers]
    later = ["flex"] if shape.grid and " S8192 " not in shape.name else []
    return [n for n in names if n not in later], [n for n in later if n in names]


def summary(rows: list[dict]) -> list[str]:
    """Geometric means and least ratios of the grid."""
    lines = []
    for label, at in (("forward", 0), ("backward", 1)):
        found = [
            (row["ratio"][at], row["name"]) for row in rows if row.get("grid") and row.get("ratio")
        ]
        if found:
            mean = math.exp(statistics.fmean(math.log(r) for r, _ in found))
            least = min(found)
            lines.append(
                f"grid, {label}: geometric mean {mean:.2f} of the best peer over {len(found)} shapes, "
                f"least {least[0]:.2f} ({least[1]})"
            )
    return lines


def measure(given: argparse.Namespace) -> None:
    """Both walks, saved after every shape."""
    begin = time.perf_counter()
    saved = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    rows = {row["name"]: row for row in saved.get("rows", [])}
    versions = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(), "triton": __import__("triton").__version__,
    }  # fmt: skip
    print(versions)
    for walk in (0, 1):
        for shape in shapes(given.only, short=given.short):
            if time.perf_counter() - begin > given.seconds:
                print("out of time")
                break
            row = rows.setdefault(
                shape.name, {"name": shape.name, "flops": shape.flops, "grid": shape.grid}
            )
            if missing := [name for name in passes(shape)[walk] if name not in row]:
                fill(shape, row, missing)
                print(shown(row), flush=True)
                if given.json:
                    found = {"versions": versions, "rows": list(rows.values())}
                    given.json.write_text(json.dumps(found, indent=1) + "\n")
            torch.cuda.empty_cache()
    print("\n".join(summary(list(rows.values()))))


def warm(part: int, parts: int, given: argparse.Namespace) -> None:
    """Compile what compiles, into the caches on disk: one part of the work."""
    tasks = 0
    for shape in shapes(given.only, short=given.short):
        longest = not shape.grid or " S8192 " in shape.name
        for name, call in {"ours": shape.ours, **shape.peers}.items():
            if name not in COMPILED or not (longest or name == "flex"):
                continue
            tasks += 1
            if tasks % parts != part:
                continue
            try:
                out = call(*shape.leaves)
                torch.autograd.grad(out, shape.leaves, torch.zeros_like(out))
            except Exception as fault:  # noqa: BLE001 - the measuring walk says it again
                print(shape.name, name, str(fault)[:100])


def table(file: Path) -> None:
    """The rows as Markdown."""
    rows = json.loads(file.read_text())["rows"]
    for wanted in (True, False):
        chosen = [row for row in rows if bool(row.get("grid")) == wanted]
        names = list(
            dict.fromkeys(n for row in chosen for n, x in row.items() if isinstance(x, dict))
        )
        print("| shape | " + " | ".join(names) + " | ratio fwd / bwd |")
        print("|---" * (len(names) + 2) + "|")
        for row in chosen:
            cells = [_cell(row, row.get(name)) for name in names]
            ratio = "{:.2f} / {:.2f}".format(*row["ratio"]) if row.get("ratio") else ""
            print(f"| {row['name']} | " + " | ".join(cells) + f" | {ratio} |")
        print()
    print("\n".join(summary(rows)))


def _cell(row: dict, entry: dict | None) -> str:
    if entry is None:
        return ""
    if "forward_ms" not in entry:
        return f"wrong ({entry['error']:.1e})" if "wrong" in entry else "refuses"
    rates = [row["flops"] * f / entry[t] / 1e9 for f, t in zip((1, 2.5), HALVES, strict=True)]
    return "{:.0f} / {:.0f}".format(*rates)


def main() -> None:
    """Warm, measure or tabulate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("grid", "features"))
    parser.add_argument("--short", action="store_true", help="two lengths of the grid")
    parser.add_argument("--json", type=Path, help="rows that it has are kept, new ones are added")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no shape after so long")
    parser.add_argument("--warm", type=int, nargs=2, metavar=("PART", "PARTS"))
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.table:
        table(given.table)
    elif given.warm:
        warm(*given.warm, given)
    else:
        measure(given)


if __name__ == "__main__":
    main()
