"""What a search for false alarms has found so far: a file that later runs add to."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import gradtruth
from benchmarks.instrument.budgets import budgets, same

__all__ = ["Alarms"]

Count = dict[str, dict[str, dict[str, int]]]


@dataclass(slots=True)
class Alarms:
    """The results.

    Attributes:
        device, machine: where the backends ran.
        budgets: with which they were judged.
        done: by backend, the numbers of the problems.
        counts: by backend, dtype and answer.
        alarms: findings with what repeats them.
        seconds: of all runs.
    """

    device: str
    machine: str
    budgets: dict[str, float]
    done: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    counts: Count = field(default_factory=dict)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    seconds: int = 0

    @staticmethod
    def load(path: Path, device: str, machine: str) -> Alarms:
        """Those of a file, where there is one with the same budgets and device; otherwise none yet."""
        found = Alarms(device, machine, budgets())
        if not path.exists():
            return found
        stored = json.loads(path.read_text())
        if stored["device"] != device or not same(stored["budgets"], found.budgets):
            return found
        for name, ranges in stored["done"].items():
            found.done[name] = {at for first, last in ranges for at in range(first, last + 1)}
        found.counts, found.alarms = stored["counts"], stored["alarms"]
        found.seconds = stored["seconds"]
        return found

    @property
    def examined(self) -> int:
        """Problems that at least one backend was asked about."""
        return len(set().union(*self.done.values()))

    def enter(
        self, at: int, dtype: str, backend: str, answer: str, findings: list[str], line: str
    ) -> None:
        """One backend's answer to one problem."""
        if at in self.done[backend]:
            return
        self.done[backend].add(at)
        counts = self.counts.setdefault(backend, {}).setdefault(dtype, {})
        counts[answer] = counts.get(answer, 0) + 1
        if findings:
            found = {"problem": at, "backend": backend, "findings": findings, "repeat": line}
            self.alarms.append(found)

    def as_json(self) -> dict[str, Any]:
        """Everything, in an order that does not depend on that of the answers."""
        return {
            "command": "python -m benchmarks.false_alarms",
            "device": self.device,
            "machine": self.machine,
            "versions": {"gradtruth": gradtruth.__version__, "torch": torch.__version__},
            "problems": self.examined,
            "counts": {
                name: {dtype: dict(sorted(x.items())) for dtype, x in sorted(by_dtype.items())}
                for name, by_dtype in sorted(self.counts.items())
            },
            "seconds": self.seconds,
            "alarms": sorted(self.alarms, key=lambda x: (x["backend"], x["problem"])),
            "done": {name: _ranges(numbers) for name, numbers in sorted(self.done.items())},
            "budgets": self.budgets,
        }

    def save(self, path: Path) -> None:
        """Write the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")


def _ranges(numbers: set[int]) -> list[list[int]]:
    """Sorted numbers as first and last of unbroken stretches."""
    found: list[list[int]] = []
    for at in sorted(numbers):
        if found and at == found[-1][1] + 1:
            found[-1][1] = at
        else:
            found.append([at, at])
    return found
