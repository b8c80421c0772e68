"""Which checks of the doctor's programme find each mutant: ``python -m benchmarks.doctor_mutants [--quick] FILE``.

Every mutant of tests/mutants goes through the programme as a backend does, and the checks that find it are written as
JSON. With --against another such file, what was found there and is not any more is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch

from gradtruth.verify.checks import CHECKS
from gradtruth.verify.doctor.examination import examine, prepare
from gradtruth.verify.doctor.programme import PROGRAMME
from gradtruth.verify.findings import Row, Verdict
from gradtruth.verify.shelf import Shelf

_ROOMS = ("memory", "sequences", "masks", "heads", "terms", "numbers")
_BAD = (Verdict.WRONG, Verdict.ERROR)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true", help="the quick programme")
    parser.add_argument("--only", default="", help="names of mutants, with commas between them")
    parser.add_argument("--against", type=Path, help="an earlier file")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for room in _ROOMS:
        import_module(f"tests.mutants.{room}")
    catalogue = import_module("tests.mutants.catalogue").CATALOGUE
    names = given.only.split(",") if given.only else list(catalogue)
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found[name] = _found(catalogue[name].make(), Path(folder), quick=given.quick)
            print(f"{name}: {', '.join(found[name]) or 'nothing'}", flush=True)
    given.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return _compare(found, given.against)


def _found(mutant: object, folder: Path, *, quick: bool) -> list[str]:
    """Item and check, of each finding once."""
    items = [item for item in PROGRAMME if item.quick or not quick]
    checks = [check for check in CHECKS if check.quick and check.device is None]
    shelf = Shelf(folder, fills=True)
    if not any(folder.iterdir()):
        for item in items:
            prepare(item, checks, torch.device("cpu"), shelf)
    events = examine(items, [mutant], checks, torch.device("cpu"), Shelf(folder))
    rows = [event for event in events if isinstance(event, Row) and event.verdict in _BAD]
    return sorted({f"{row.case} {row.check}" for row in rows})


def _compare(found: dict[str, list[str]], earlier: Path | None) -> int:
    if earlier is None:
        return 0
    before = json.loads(earlier.read_text(encoding="utf-8"))
    lost = {name: sorted(set(before[name]) - set(found[name])) for name in found if name in before}
    lost = {name: gone for name, gone in lost.items() if gone}
    for name, gone in lost.items():
        print(f"{name} is no longer found by {', '.join(gone)}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
