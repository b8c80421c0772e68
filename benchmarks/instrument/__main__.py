"""Ask every check about every planted fault, measure sensitivities, and write docs/instrument.md.

    python -m benchmarks.instrument [--workers W] [--seconds S] [--parts checks,families] [--results FILE]
    python -m benchmarks.instrument --render

Results are stored as they come, and what is stored is not run again: a run that was stopped goes on where it was, and
a new fault is all that runs. Results made with other budgets are thrown away.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.instrument.document import render
from benchmarks.instrument.pool import run
from benchmarks.instrument.results import alarms, load
from benchmarks.instrument.tasks import PARTS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/instrument.json"
DOCUMENT = ROOT / "docs/instrument.md"


def main() -> None:
    """Run what is missing, and write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--render", action="store_true", help="only write the document")
    given = parser.parse_args()
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts is {sorted(unknown)}, expected some of {', '.join(PARTS)}")
    if not given.render:
        run(given.results, given.parts, given.workers, given.seconds)
    given.document.write_text(render(load(given.results), alarms(RESULTS.parent)))


if __name__ == "__main__":
    main()
