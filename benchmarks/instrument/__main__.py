"""Ask every check about every planted fault, measure sensitivities, and write docs/instrument.md.

    python -m benchmarks.instrument [--parts checks,families,problems,sensitivity,elementwise] [--seconds S]
    python -m benchmarks.instrument --render

The results are stored after every group, and groups that are stored are not run again: a run that was stopped goes
on where it was. Results made with other budgets are thrown away.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.instrument import elementwise, planted, sensitivity
from benchmarks.instrument.document import constants, render

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/instrument.json"
DOCUMENT = ROOT / "docs/instrument.md"
PARTS = ("sensitivity", "elementwise", "checks", "problems", "families")

Step = tuple[str, Callable[[], Any]]


def stored() -> dict[str, Any]:
    """Results of earlier runs with the same budgets; empty ones otherwise."""
    empty = {part: {} for part in PARTS} | {"sensitivity": [], "constants": constants(), "done": []}
    if not RESULTS.exists():
        return empty
    found = json.loads(RESULTS.read_text())
    return found if found["constants"] == constants() else empty


def steps(part: str) -> Iterator[Step]:
    """Names of the groups of a part, and how to run them."""
    groups = planted.groups()
    everyone = list(planted.planted().values())
    if part == "sensitivity":
        for item, dtype, tensor in product(
            sensitivity.INPUTS, sensitivity.DTYPES, sensitivity.GRADIENTS
        ):
            yield (
                f"{item} {dtype} {tensor}",
                lambda i=item, d=dtype, t=tensor: sensitivity.line(i, d, t),
            )
    elif part == "problems":
        for item in planted.QUICK:
            yield item, lambda item=item: planted.values(item, everyone)
    elif part == "families":
        for family in planted.FAMILIES:
            for item, mutants in groups.items():
                yield (
                    f"{family} {item}",
                    lambda i=item, m=mutants, f=family: planted.values(i, m, f),
                )
    else:
        ask = planted.by_check if part == "checks" else elementwise.caught
        for item, mutants in groups.items():
            yield item, lambda i=item, m=mutants: ask(i, m)


def merge(results: dict[str, Any], part: str, item: str, found: Any) -> None:
    """Put what a group found where it belongs."""
    if part == "sensitivity":
        results[part].append(found)
    elif part == "elementwise":
        healthy = found.pop("")
        results[part] |= found | ({f"healthy {item}": True} if healthy else {})
    else:
        for name, cells in found.items():
            results[part].setdefault(name, {}).update(cells)


def run(parts: list[str], seconds: float) -> None:
    """All groups that are not stored yet, until the time is used up."""
    start, results = time.perf_counter(), stored()
    for part in parts:
        for name, call in steps(part):
            if f"{part} {name}" in results["done"]:
                continue
            if time.perf_counter() - start > seconds:
                return
            merge(results, part, name, call())
            results["done"].append(f"{part} {name}")
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(f"{time.perf_counter() - start:.0f} s: {part} {name}", flush=True)


def main() -> None:
    """Run what is missing, and write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--render", action="store_true", help="only write the document")
    given = parser.parse_args()
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts is {sorted(unknown)}, expected some of {', '.join(PARTS)}")
    if not given.render:
        run(given.parts, given.seconds)
    DOCUMENT.write_text(render(stored()))


if __name__ == "__main__":
    main()
