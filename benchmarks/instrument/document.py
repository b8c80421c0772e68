"""docs/instrument.md, written from the results and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.instrument.elementwise import SCALE, TOLERANCE
from benchmarks.instrument.planted import ASKED, FAMILIES, LAWS, QUICK, Cells, planted
from benchmarks.instrument.probing import COLUMNS, PROBES, ROWS
from benchmarks.instrument.sensitivity import DTYPES, lines

__all__ = ["render"]

_HEAD = """# What the instrument finds

Written by `python -m benchmarks.instrument` from `benchmarks/results/instrument.json`; a test fails where a budget,
a check or a planted fault is not the one that this was made with.
"""

_BY_CHECK = f"""Each fault on the doctor's problem that shows it: every check that a CPU can ask, each conservation law
by itself, and the exact probes of `gradtruth.watch` ({ROWS} rows and {COLUMNS} columns of every sequence and KV head).
**●** the check that the fault is there for, x found, . silent, - not reached, ? not run.
`compile_equals_eager` asks the library's own operators by name, so it reaches no planted fault. What a fault that reads
unwritten memory shows to other checks than `poisoned_memory` depends on what happens to lie there.
"""
_BY_FAMILY = """The same problems with the values of every family, one call. x found against the oracle (`forward`,
`backward`), L a conservation law alone finds it, P the probes alone find it, . silent, - refused. A fault that shows
only in memory, bits, strides or the order of calls is silent here whatever the values: the checks above are there for
it.
"""
_BY_PROBLEM = (
    "The doctor's quick problems with their own values, asked and marked in the same way.\n"
)
_SENSITIVITY = """The smallest factor on one (sequence, head) of a gradient that the check `backward` still finds, so
that the same distance below 1 is found too: at the least sensitive place of each input, with values that differ in
scale from sequence to sequence, head to head and row to row (family `heterogeneous`).
"""


_ALARMS = """Healthy backends over generated problems, judged as `gradtruth.testing.assert_verified` judges:
`python -m benchmarks.false_alarms`. Of the problems that a backend takes:
"""


def render(results: dict[str, Any], alarms: Sequence[dict[str, Any]] = ()) -> str:
    """The document.

    Args:
        results: budgets, and checks, families, problems, probes, elementwise and sensitivity as they were stored.
        alarms: results of searches for false alarms, one per device.
    """
    by_check = [*(check.name for check in ASKED), *LAWS, PROBES.name]
    probes = results["probes"]
    checks = {
        name: each | {PROBES.name: probes.get(name, {}).get(planted()[name].item)}
        for name, each in results["checks"].items()
    }
    parts = [
        _HEAD,
        _summary(results, checks),
        f"## Sensitivity\n\n{_SENSITIVITY}",
        _sensitivity(results["sensitivity"]),
        f"## False alarms\n\n{_ALARMS}",
        *map(_alarms, alarms),
        f"## By check\n\n{_BY_CHECK}",
        _matrix(checks, by_check),
        f"## By family\n\n{_BY_FAMILY}",
        _matrix(results["families"], list(FAMILIES), probes),
        f"## By problem\n\n{_BY_PROBLEM}",
        _matrix(results["problems"], list(QUICK), probes),
        "## The faults\n",
        _faults(results),
        "## The budgets' constants\n",
        _table(
            ["constant", "value"],
            [[name, f"{x:g}"] for name, x in results["budgets"].items() if " " not in name],
        ),
    ]
    return "\n".join(parts)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines_ = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines_) + "\n"


def _summary(results: dict[str, Any], checks: Cells) -> str:
    faults, families = planted(), results["families"]
    asked = [name for name in faults if name in checks]
    own = {
        name: m.check for name, m in faults.items() if m.finding in _words(checks, name, m.check)
    }
    counts = {
        "by the check that is there for it, as the kind of finding that it is": len(own),
        "by one call against the oracle": _count(checks, asked, ("forward", "backward")),
        "by one call against the oracle, with the values of some family": _count(
            families, list(families), FAMILIES, ignored="law"
        ),
        "by a conservation law": _count(checks, asked, LAWS),
        f"by {ROWS} rows and {COLUMNS} columns that are probed": _count(
            checks, asked, (PROBES.name,)
        ),
        f"by elementwise allclose with atol = rtol = {TOLERANCE:g} on {SCALE:g} * Gaussian inputs: out and every "
        "gradient of one call": sum(results["elementwise"].values()),
    }
    of = len(faults)
    text = _table(["found", f"of {of} planted faults"], [[k, str(v)] for k, v in counts.items()])
    left = of - min(len(asked), len(results["elementwise"]))
    unfinished = f"\n**Unfinished: {left} faults have not been asked about yet.**\n" if left else ""
    return text + unfinished


def _count(cells: Cells, names: list[str], columns: Iterable[str], ignored: str = "") -> int:
    """Of how many faults a column says something."""
    return sum(any(_words(cells, name, x) - {ignored} for x in columns) for name in names)


def _words(cells: Cells, name: str, column: str) -> set[str]:
    """The kinds in a cell."""
    return set((cells.get(name, {}).get(column) or "").replace("-", "").split())


def _sensitivity(found: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name in lines():
        if name in found:
            n, h = found[name]["at"]
            factor = _factor(found[name]["worst"])
            rows.append([*name.split(), factor, f"sequence {n}, head {h}"])
    head = ["input", "dtype", "gradient", "smallest factor found", "where"]
    by_dtype = {
        d: [x["worst"] for name, x in found.items() if name.split()[1] == d] for d in DTYPES
    }
    worst = [f"{_factor(max(all_))} in {dtype}" for dtype, all_ in by_dtype.items() if all_]
    return f"The least sensitive of all: {', '.join(worst)}.\n\n{_table(head, rows)}"


def _alarms(found: dict[str, Any]) -> str:
    rows = []
    for backend, by_dtype in found["counts"].items():
        for dtype, counts in by_dtype.items():
            right, alarms = counts.get("right", 0), counts.get("alarm", 0) + counts.get("raised", 0)
            rows.append([backend, dtype, str(right + alarms), str(right), str(alarms)])
    where = f"{found['machine']}, torch {found['versions']['torch']}, {found['problems']} problems"
    table = _table(["backend", "dtype", "problems", "right", "findings"], rows)
    return f"{where}:\n\n{table}"


def _factor(e: float) -> str:
    return "never" if math.isinf(e) else f"1 + {e:.2g}"


def _matrix(cells: Cells, columns: list[str], probes: Cells | None = None) -> str:
    """Rows of marks: of single checks, or with probes of values against oracle, laws and probes."""
    rows = []
    for name, mutant in planted().items():
        marks = []
        for x in columns:
            cell = cells.get(name, {}).get(x)
            words, alone = _words(cells, name, x), _words(probes or {}, name, x)
            if cell is None:
                marks.append("?")
            elif not words | alone:
                marks.append(cell or ".")
            elif probes is None:
                marks.append("**●**" if x == mutant.check else "x")
            else:
                parts = {"x": words - {"law"}, "L": words & {"law"}, "P": alone}
                marks.append("".join(mark for mark, found in parts.items() if found))
        rows.append([name, *marks])
    totals = [str(sum(bool(_words(cells, name, x)) for name in planted())) for x in columns]
    return _table(["fault", *columns], [*rows, ["**found**", *totals]])


def _faults(results: dict[str, Any]) -> str:
    head = ["fault", "kind", "what it does", "problem", "found by", "in", "as", "allclose finds it"]
    rows = [
        [
            *(name, m.kind, m.fault, m.item, m.check, m.tensor or "", m.finding),
            "yes" if results["elementwise"].get(name) else "no",
        ]
        for name, m in planted().items()
    ]
    return _table(head, rows)
