"""False alarms: healthy backends over thousands of generated problems, every finding kept with its recipe.

    python -m benchmarks.false_alarms [--problems N] [--seconds S] [--workers W] [--backends a,b] [--device cuda]

Problems are the conformance suite's, then rows drawn from the same axes with other seeds, in bf16, fp16 and fp32.
Each is examined as ``gradtruth.testing.assert_verified`` does: forward and backward against the oracle, inputs not
written, results of the right form. The oracle and the yardstick run once per problem, for all backends. A finding is
a false alarm or a fault: nothing here decides which, so each comes with the line that repeats it.

Results are written every few seconds, and what a file holds is not run again: a run that was stopped goes on, more
problems and other backends join the same file. With other budgets a file is begun anew.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.alarms import Alarms
from gradtruth.backends import Backend, get
from gradtruth.errors import UnsupportedProblem
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
_SAVED_EVERY = 10.0  # seconds
_PATIENCE = 900.0  # seconds for one problem, the compilation of a kernel included

Task = tuple[int, Recipe, tuple[str, ...]]
"""The number of a problem, the problem, and who is asked."""
Answer = tuple[str, str, list[str]]
"""A backend, its answer (right, alarm, raised, refuses) and the findings."""


def recipes(problems: int) -> Iterator[Recipe]:
    """The suite's recipes in these dtypes, then drawn ones; the first N are the same in every run."""
    made = 0
    for recipe in (*suite().recipes, *(FIRST_SEED + at for at in range(3 * problems))):
        if made == problems:
            return
        found = drawn(recipe) if isinstance(recipe, int) else recipe
        if found is not None and found.problem.dtype in DTYPES:
            made += 1
            yield found


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
    """Backends on one problem after the other."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.lost = False

    def examine(self, recipe: Recipe, names: Sequence[str]) -> list[Answer]:
        """What each backend answers."""
        poisoned = make(recipe, self.device)
        samples: dict[bool, tuple[Sample, Truth]] = {}
        found: list[Answer] = []
        for name in names:
            backend = get(name)
            if self._refuses(backend, poisoned):
                found.append((name, "refuses", []))
                continue
            claims = backend.claims(poisoned.problem, self.device)
            clean = recipe.poison != "none" and not claims.shielded
            if clean not in samples:
                sample = unpoisoned(recipe, self.device) if clean else poisoned
                samples[clean] = sample, truth_of(sample)
            sample, truth = samples[clean]
            try:
                lines = examine(sample, backend, truth)
            except UnsupportedProblem:  # for what the tensors hold
                found.append((name, "refuses", []))
                continue
            except Exception as error:  # noqa: BLE001 - one problem must not end the run
                self.lost = not self._answers()
                found.append((name, "raised", [f"{type(error).__name__}: {error}"[:2000]]))
                if self.lost:
                    return found
                continue
            found.append((name, "alarm" if lines else "right", lines))
        return found

    def _refuses(self, backend: Backend, sample: Sample) -> bool:
        """It takes no such problem, or drops other weights than the oracle."""
        if not backend.supports(sample.problem, self.device).ok:
            return True
        dropped = sample.problem.spec.dropout_p not in (0.0, 1.0)
        return dropped and not backend.claims(sample.problem, self.device).global_dropout

    def _answers(self) -> bool:
        """Whether the device still does: after an illegal access a process gets nothing more from it."""
        try:
            torch.ones(1, device=self.device).sum().item()
        except RuntimeError:
            return False
        return True


_EXAMINER: list[Examiner] = []  # of this worker process


def start_worker(device: str) -> None:
    """Make the examiner of a worker process."""
    torch.set_num_threads(1)
    _EXAMINER[:] = [Examiner(device)]


def work(task: Task) -> tuple[int, str, list[Answer], list[str]]:
    """One problem in a worker process: number, dtype, answers, and how to repeat the findings.

    Raises:
        SystemExit: the problem before has cost this process its device; the pool starts another one.
    """
    at, recipe, names = task
    if _EXAMINER[0].lost:
        raise SystemExit(1)
    answers = _EXAMINER[0].examine(recipe, names)
    return at, recipe.problem.dtype, answers, [repeat(recipe, name) for name, *_ in answers]


def tasks(alarms: Alarms, names: Sequence[str], problems: int, skip: int) -> Iterator[Task]:
    """What is not done yet."""
    for at, recipe in enumerate(recipes(problems)):
        left = tuple(name for name in names if at not in alarms.done.get(name, ()))
        if left and at >= skip:
            yield at, recipe, left


def sweep(alarms: Alarms, todo: Iterator[Task], seconds: float, workers: int, path: Path) -> None:
    """Examine until the problems or the time are used up."""
    start = saved = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, start_worker, (alarms.device,)) as pool:
        results = pool.imap_unordered(work, todo)
        while (left := start + seconds - time.perf_counter()) > 0:
            try:
                at, dtype, answers, lines = results.next(min(left, _PATIENCE))
            except (StopIteration, multiprocessing.TimeoutError):
                break
            for (name, answer, found), line in zip(answers, lines, strict=True):
                alarms.enter(at, dtype, name, answer, found, line)
                if found:
                    print(f"{name} {answer}: {found}\n  {line}", flush=True)
            if time.perf_counter() - saved > _SAVED_EVERY:
                saved = time.perf_counter()
                alarms.save(path)
                print(f"{saved - start:.0f} s: {alarms.examined} problems", flush=True)
        pool.terminate()
    alarms.seconds += round(time.perf_counter() - start)
    alarms.save(path)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=3200)
    parser.add_argument("--skip", type=int, default=0, help="leave out so many problems")
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
    for name in given.backends:
        get(name)
    today = datetime.now(UTC).date().isoformat()
    place = Path(__file__).parent / "results" / f"{today}-false-alarms-{given.device}.json"
    path = given.json or place
    machine = platform.machine() if given.device == "cpu" else torch.cuda.get_device_name()
    alarms = Alarms.load(path, given.device, machine)
    todo = tasks(alarms, given.backends, given.problems, given.skip)
    sweep(alarms, todo, given.seconds, given.workers, path)
    summary: dict[str, Any] = alarms.as_json()
    for name in ("done", "budgets"):
        summary.pop(name)
    found = summary.pop("alarms")
    print(json.dumps(summary, indent=2))
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
