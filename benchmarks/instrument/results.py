"""The stored results: one file, the same whatever the order in which the pieces came in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.instrument.budgets import budgets, same
from benchmarks.instrument.tasks import PARTS, Task

__all__ = ["alarms", "load", "merge", "save"]


def load(path: Path) -> dict[str, Any]:
    """Results of earlier runs with the budgets of today; empty ones otherwise."""
    empty: dict[str, Any] = {part: {} for part in PARTS} | {"budgets": budgets()}
    if not path.exists():
        return empty
    found = json.loads(path.read_text())
    return found if same(found.get("budgets", {}), empty["budgets"]) else empty


def alarms(folder: Path) -> list[dict[str, Any]]:
    """The newest search for false alarms on each device, on the CPU first."""
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob("*-false-alarms-*.json")):
        newest[path.stem.rpartition("-")[2]] = path
    return [json.loads(newest[device].read_text()) for device in sorted(newest)]


def merge(results: dict[str, Any], task: Task, found: dict[str, Any]) -> None:
    """Put what a piece found where it belongs."""
    part = results[task.part]
    for name, cells in found.items():
        if task.part in ("elementwise", "sensitivity"):
            part[name] = cells
        else:
            part.setdefault(name, {}).update(cells)


def save(path: Path, results: dict[str, Any]) -> None:
    """Write the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
