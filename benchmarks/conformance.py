"""The suite on a GPU with the Triton backend, many processes side by side, for compiling takes most of the time.

    python -m benchmarks.conformance --jobs 15 --json FILE.jsonl --seconds 460    # again, it goes on where it was

Also for compute-sanitizer, which wants one process and few recipes:

    compute-sanitizer --tool memcheck python -m benchmarks.conformance --jobs 0 --bare --hostile \
        --only $(python -m benchmarks.conformance --list-selection 12)
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from heapq import heapify, heappop, heappush
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path

import torch
from tests.backends.triton_sample import features

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
        "recipe": at, "dtype": recipe.problem.dtype, "label": recipe.label(), "code": code(), "wrong": [],
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


def bare(at: int) -> dict[str, object]:
    """One recipe forward and backward by the backend alone, for a sanitizer: other kernels would report their own."""
    recipe, backend = suite().recipes[at], get("triton")
    sample = make(recipe, GPU)
    torch.cuda.synchronize()
    print(f"recipe {at}: {recipe.label()}", flush=True)
    forward = backend.forward(sample.problem, sample.inputs)
    given = (sample.dout, sample.dlse, sample.wanted)
    backend.backward(sample.problem, sample.inputs, forward, *given)
    torch.cuda.synchronize()
    return {"recipe": at, "dtype": recipe.problem.dtype, "label": recipe.label(), "wrong": []}


def selection(count: int) -> list[int]:
    """Recipes that the backend takes, each the one with most values of features that were not there before."""

    def values(at: int) -> set[tuple[str, str]]:
        recipe = suite().recipes[at]
        problem = recipe.problem
        found = {**asdict(problem.spec), "family": recipe.family, "holes": recipe.holes}
        for name in (
            "dtype",
            "head_dim_qk",
            "head_dim_v",
            "bias_shape",
            "mask_shape",
            "group_size",
        ):
            found[name] = getattr(problem, name)
        return {(name, str(value)) for name, value in found.items()}

    left = {
        at: values(at) for at in order()
        if (p := suite().recipes[at].problem).dtype != "float64" and p.seqlen_q and p.seqlen_kv
    }  # fmt: skip
    chosen: list[int] = []
    seen: set[tuple[str, str]] = set()
    while len(chosen) < count and left:
        best = max(left, key=lambda at: len(left[at] - seen))
        seen |= left.pop(best)
        chosen.append(best)
    return chosen


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
    parser.add_argument("--share", type=int, default=1, help="every so manieth recipe of the order")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=14, help="processes; 0: this one")
    parser.add_argument("--only", type=int, nargs="*", help="these recipes")
    parser.add_argument(
        "--seconds", type=float, default=480.0, help="begin no recipe after so long"
    )
    parser.add_argument(
        "--hostile", action="store_true", help="cu_seqlens of any content before that"
    )
    parser.add_argument("--bare", action="store_true", help="the backend alone, nothing is judged")
    parser.add_argument("--list-selection", type=int, metavar="N", help="print N recipes and end")
    parser.add_argument(
        "--json",
        type=Path,
        help="JSON lines; recipes that this code got right in it are left out, rows are added",
    )
    given = parser.parse_args()
    if given.list_selection:
        print(*selection(given.list_selection))
        return
    if given.hostile:
        hostile()
    before = given.json.read_text().splitlines() if given.json and given.json.exists() else []
    rows = [
        row for line in before
        if not (row := json.loads(line))["wrong"] and row.get("code") == code()
        and row["label"] == suite().recipes[row["recipe"]].label()
    ]  # fmt: skip
    if given.json and len(rows) < len(before):
        given.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = {row["recipe"] for row in rows}
    chosen = [at for at in given.only or order()[given.first :: given.share] if at not in done]
    for row in _results(bare if given.bare else examined, chosen, given.jobs, given.seconds):
        rows.append(row)
        for wrong in row["wrong"]:
            print(row["recipe"], row["label"], wrong, sep=": ", flush=True)
        if given.json:
            with given.json.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
    counted = Counter(
        (r["dtype"], "refused" if r.get("refused") else "WRONG" if r["wrong"] else "right")
        for r in rows
    )
    for (dtype, what), count in sorted(counted.items()):
        print(f"{dtype:9} {what:8} {count}")
    print(f"{len(rows)} of {len(suite().recipes)} recipes")


@cache
def order() -> tuple[int, ...]:
    """All recipes, those first that add most pairs of features: what was done when the time was up covers most.

    In the end come those that add none, shuffled, and those that the backend refuses without a look at the GPU.
    """
    recipes = suite().recipes
    left = [at for at, recipe in enumerate(recipes) if recipe.problem.dtype != "float64"]
    random.Random(0).shuffle(left)
    pairs = {at: set(combinations(features(recipes[at]).items(), 2)) for at in left}
    queue = [(-len(pairs[at]), rank, at) for rank, at in enumerate(left)]
    heapify(queue)
    chosen: list[int] = []
    seen: set[tuple] = set()
    while queue:
        _, rank, at = heappop(queue)
        now = len(pairs[at] - seen)
        if now and queue and -now > queue[0][0]:  # it adds less than when it was put there
            heappush(queue, (-now, rank, at))
            continue
        chosen.append(at)
        seen |= pairs[at]
    return (*chosen, *(at for at in range(len(recipes)) if at not in pairs))


@cache
def code() -> str:
    """What the rows hold for: a digest of the backend's sources, and versions."""
    import triton

    folder = Path(__file__).parents[1] / "src/gradtruth/backends/triton"
    texts = [file.read_bytes() for file in sorted(folder.rglob("*.py"))]
    digest = sha256(b"".join(texts)).hexdigest()[:12]
    return f"{digest}, triton {triton.__version__}, torch {torch.__version__}"


def _results(
    one: Callable[[int], dict[str, object]], chosen: list[int], jobs: int, seconds: float
) -> Iterator[dict[str, object]]:
    """Rows as they come."""
    begin = time.perf_counter()
    if jobs == 0:
        for at in chosen:
            if time.perf_counter() - begin < seconds:
                yield one(at)
        return
    left = list(reversed(chosen))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(one, left.pop()) for _ in range(min(jobs, len(left)))}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                if left and time.perf_counter() - begin < seconds:
                    running.add(pool.submit(one, left.pop()))
                yield future.result()


if __name__ == "__main__":
    main()
