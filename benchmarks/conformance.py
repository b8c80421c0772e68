"""The suite on a GPU with the Triton backend, many processes side by side, for compiling takes most of the time.

    python -m benchmarks.conformance --share 9 --first 0 --jobs 14 --json OUT   # every ninth recipe, three minutes

Also for compute-sanitizer, which wants one process and few recipes:

    compute-sanitizer --tool memcheck python -m benchmarks.conformance --jobs 0 --share 160 --hostile
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from gradtruth.backends import get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs, Wanted
from gradtruth.verify.suite.conformance import examine, truth_of
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.suite import suite

GPU = "cuda"


def examined(at: int) -> dict[str, object]:
    """One recipe: what is wrong with it, twice the same bits included."""
    torch.set_num_threads(1)
    recipe = suite().recipes[at]
    begin = time.perf_counter()
    row: dict[str, object] = {
        "recipe": at, "dtype": recipe.problem.dtype, "label": recipe.label(), "wrong": [],
    }  # fmt: skip
    try:
        sample = make(recipe, GPU)
        backend = get("triton")
        support = backend.supports(sample.problem, sample.inputs.q.device)
        row["refused"] = "; ".join(map(str, support.reasons))
        if support.ok:
            row["wrong"] = examine(sample, backend, truth_of(sample))
    except Exception as fault:  # noqa: BLE001 - an error is a finding
        row["wrong"] = [f"{type(fault).__name__}: {str(fault).splitlines()[0][:200]}"]
    return {**row, "seconds": round(time.perf_counter() - begin, 1)}


def hostile() -> None:
    """thd with cu_seqlens of any content: for memcheck, which must find nothing."""
    drawn = torch.Generator().manual_seed(0)
    for case in range(12):
        q, k, v, dout = (
            torch.randn(100, h, 40, generator=drawn).to(GPU, torch.bfloat16) for h in (4, 2, 2, 4)
        )
        low, high = ((-(2**31), 2**31 - 1), (-40, 160))[case % 2]
        cu = [torch.randint(low, high, (6,), generator=drawn).int().to(GPU) for _ in range(4)]
        inputs = Inputs(
            q=q, k=k, v=v, cu_seqlens_q=cu[0], cu_seqlens_kv=cu[1],
            cu_seqlens_q_padded=cu[2], cu_seqlens_kv_padded=cu[3],
        )  # fmt: skip
        spec = Spec(layout="thd", lengths="cu_seqlens", right=0 if case % 3 else None)
        problem, backend = Problem.of(spec, inputs), get("triton")
        forward = backend.forward(problem, inputs)
        backend.backward(problem, inputs, forward, dout, None, Wanted())
    torch.cuda.synchronize()
    print("hostile cu_seqlens: done")


def main() -> None:
    """Run, print what is wrong, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=int, default=9, help="every so manieth recipe")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=14, help="processes; 0: this one")
    parser.add_argument("--only", type=int, nargs="*", help="these recipes")
    parser.add_argument("--seconds", type=float, default=480.0, help="stop taking results then")
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.hostile:
        hostile()
    chosen = given.only or range(given.first, len(suite().recipes), given.share)
    rows, begin = [], time.perf_counter()

    def take(row):
        rows.append(row)
        for wrong in row["wrong"]:
            print(row["recipe"], row["label"], wrong, sep=": ", flush=True)
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1) + "\n")

    if given.jobs == 0:
        for at in chosen:
            take(examined(at))
    else:
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
            for row in pool.map(examined, chosen):
                take(row)
                if time.perf_counter() - begin > given.seconds:
                    print("out of time")
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
    counted = Counter(
        (r["dtype"], "refused" if r.get("refused") else "WRONG" if r["wrong"] else "right")
        for r in rows
    )
    for (dtype, what), count in sorted(counted.items()):
        print(f"{dtype:9} {what:8} {count}")


if __name__ == "__main__":
    main()
