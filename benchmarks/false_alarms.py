"""False alarms: healthy backends over thousands of generated problems, every finding kept with its recipe.

    python -m benchmarks.false_alarms [--problems N] [--seconds S] [--workers W] [--backends a,b] [--device cuda]

Problems are the conformance suite's, then rows drawn from the same axes with other seeds, in bf16, fp16 and fp32.
Each is examined as ``gradtruth.testing.assert_verified`` does: forward and backward against the oracle, inputs not
written, results of the right form. The oracle and the yardstick run once per problem, for all backends. A finding is
a false alarm or a fault: nothing here decides which, so each comes with the line that repeats it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch

import gradtruth
from gradtruth.backends import Backend, get
from gradtruth.testing import repeat, unpoisoned
from gradtruth.verify.suite.conformance import Truth, examine, truth_of
from gradtruth.verify.suite.inputs import Sample, make
from gradtruth.verify.suite.recipe import Recipe
from gradtruth.verify.suite.suite import AXES, allowed, build, suite

HEALTHY = ("reference", "unfused", "sdpa_math", "sdpa_flash")
DTYPES = ("bfloat16", "float16", "float32")
FIRST_SEED = 1_000_000  # beyond those of the suite, which are its row numbers
PLAIN: dict[str, tuple[str, ...]] = {
    "source": ("full",),
    "mask": ("full", "causal"),
    "bias": ("none",),
    "alibi": ("none",),
    "softmax": ("vanilla",),
    "softcap": ("none",),
    "scale": ("default",),
    "dropout": ("0",),
    "max_logit": ("no",),
    "dlse": ("no",),
    "window": ("none",),
    "alignment": ("top_left",),
    "layout": ("bshd", "sbhd"),
    "wanted": ("all",),
}
"""Every second drawn problem is one that nearly every backend takes."""


def recipes(problems: int) -> Iterator[Recipe]:
    """The suite's recipes in these dtypes, then drawn ones; the first N are the same in every run."""
    made = 0
    for recipe in (*suite().recipes, *(drawn(FIRST_SEED + at) for at in range(2 * problems))):
        if made == problems:
            return
        if recipe is not None and recipe.problem.dtype in DTYPES:
            made += 1
            yield recipe


def drawn(seed: int) -> Recipe | None:
    """The recipe of a random row of the suite's axes, in its frequencies; None where the rules leave a dead end."""
    rng = random.Random(seed)
    fixed: dict[str, tuple[str, ...]] = {"dtype": DTYPES, **(PLAIN if seed % 2 else {})}
    row: dict[str, str] = {}
    axes = list(AXES)
    rng.shuffle(axes)
    for axis in sorted(axes, key=lambda axis: axis not in fixed):
        choices = [x for x in allowed(row, axis) if x in fixed.get(axis, AXES[axis])]
        if not choices:
            return None
        row[axis] = rng.choices(choices, [AXES[axis][x] for x in choices])[0]
    return build({axis: row[axis] for axis in AXES}, seed)


class Examiner:
    """All backends on one problem after the other."""

    def __init__(self, names: Sequence[str], device: str) -> None:
        self.backends = [get(name) for name in names]
        self.device = torch.device(device)

    def examine(self, recipe: Recipe) -> list[tuple[str, str, list[str]]]:
        """(backend, answer, findings): the answer is right, alarm, refuses or raised."""
        poisoned = make(recipe, self.device)
        samples: dict[bool, tuple[Sample, Truth]] = {}
        found = []
        for backend in self.backends:
            if self._refuses(backend, poisoned):
                found.append((backend.name, "refuses", []))
                continue
            claims = backend.claims(poisoned.problem, self.device)
            clean = recipe.poison != "none" and not claims.shielded
            if clean not in samples:
                sample = unpoisoned(recipe, self.device) if clean else poisoned
                samples[clean] = sample, truth_of(sample)
            sample, truth = samples[clean]
            try:
                lines = examine(sample, backend, truth)
            except Exception as error:  # noqa: BLE001 - one problem must not end the run
                found.append((backend.name, "raised", [f"{type(error).__name__}: {error}"]))
                continue
            found.append((backend.name, "alarm" if lines else "right", lines))
        return found

    def _refuses(self, backend: Backend, sample: Sample) -> bool:
        """It takes no such problem, or drops other weights than the oracle."""
        if not backend.supports(sample.problem, self.device).ok:
            return True
        dropped = sample.problem.spec.dropout_p not in (0.0, 1.0)
        return dropped and not backend.claims(sample.problem, self.device).global_dropout


_EXAMINER: list[Examiner] = []  # of this worker process


def start_worker(names: Sequence[str], device: str) -> None:
    """Make the backends of a worker process."""
    torch.set_num_threads(1)
    _EXAMINER[:] = [Examiner(names, device)]


def work(recipe: Recipe) -> tuple[Recipe, list[tuple[str, str, list[str]]]]:
    """One problem in a worker process."""
    return recipe, _EXAMINER[0].examine(recipe)


def sweep(
    todo: Sequence[Recipe], seconds: float, workers: int, names: Sequence[str], device: str
) -> dict[str, Any]:
    """Examine until the problems or the time are used up."""
    start = time.perf_counter()
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    dtypes: Counter[str] = Counter()
    alarms = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, start_worker, (names, device)) as pool:
        for at, (recipe, answers) in zip(count(1), pool.imap_unordered(work, todo), strict=False):
            dtypes[recipe.problem.dtype] += 1
            for name, answer, lines in answers:
                counts[name][answer] += 1
                if answer in ("alarm", "raised"):
                    alarms.append(
                        {"backend": name, "findings": lines, "repeat": repeat(recipe, name)}
                    )
                    print(f"{name} {answer}: {lines}\n  {repeat(recipe, name)}", flush=True)
            if at % 100 == 0:
                print(f"{at} problems, {time.perf_counter() - start:.0f} s", flush=True)
            if time.perf_counter() - start > seconds:
                pool.terminate()
                break
    return {
        "problems": sum(dtypes.values()),
        "dtypes": dict(sorted(dtypes.items())),
        "counts": {name: dict(sorted(found.items())) for name, found in counts.items()},
        "seconds": round(time.perf_counter() - start),
        "alarms": sorted(alarms, key=lambda alarm: (alarm["backend"], alarm["repeat"])),
    }


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=3200)
    parser.add_argument("--skip", type=int, default=0, help="go on after so many problems")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--backends", type=lambda text: text.split(","), default=list(HEALTHY))
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--json", type=Path, help="default: benchmarks/results/<date>-false-alarms-<device>.json"
    )
    return parser.parse_args()


def main() -> None:
    """Run, print each finding as it comes, and write everything."""
    given = parsed()
    todo = list(recipes(given.problems))[given.skip :]
    found = sweep(todo, given.seconds, given.workers, given.backends, given.device)
    today = datetime.now(UTC).date().isoformat()
    place = Path(__file__).parent / "results" / f"{today}-false-alarms-{given.device}.json"
    cuda = given.device != "cpu"
    result = {
        "command": "python -m benchmarks.false_alarms",
        "machine": torch.cuda.get_device_name() if cuda else platform.machine(),
        "versions": {"gradtruth": gradtruth.__version__, "torch": torch.__version__},
        **found,
    }
    (given.json or place).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "alarms"}, indent=2))
    if found["alarms"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
