"""docs/instrument.md, written from the results and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.instrument.elementwise import SCALE, TOLERANCE
from benchmarks.instrument.planted import ASKED, FAMILIES, LAWS, PROBED, QUICK, planted
from benchmarks.instrument.probing import COLUMNS, ROWS
from benchmarks.instrument.sensitivity import DTYPES, lines

__all__ = ["render"]

_HEAD = """# What the instrument finds

Written by `python -m benchmarks.instrument` from `benchmarks/results/instrument.json`; a test fails where a budget,
a check or a planted fault is not the one that this was made with.
"""

_BY_CHECK = f"""Each fault on the doctor's problem that shows it: every check that a CPU can ask, each conservation law
by itself, and the exact probes of `gradtruth.watch` ({ROWS} rows and {COLUMNS} columns of every sequence and KV head).
**●** the check that the fault is there for, x found, . silent, - not reached, ? not run.
`compile_equals_eager` asks the library's own operators by name, so it reaches no planted fault.
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
        results: budgets, sensitivity, checks, families, problems and elementwise, as the run stored them.
        alarms: results of searches for false alarms, one per device.
    """
    by_check = [*(check.name for check in ASKED), *LAWS, PROBED]
    parts = [
        _HEAD,
        _summary(results),
        f"## Sensitivity\n\n{_SENSITIVITY}",
        _sensitivity(results["sensitivity"]),
        f"## False alarms\n\n{_ALARMS}",
        *map(_alarms, alarms),
        f"## By check\n\n{_BY_CHECK}",
        _matrix(results["checks"], by_check, own=True),
        f"## By family\n\n{_BY_FAMILY}",
        _matrix(results["families"], list(FAMILIES)),
        f"## By problem\n\n{_BY_PROBLEM}",
        _matrix(results["problems"], list(QUICK)),
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


def _summary(results: dict[str, Any]) -> str:
    faults, checks = planted(), results["checks"]
    asked = [name for name in faults if name in checks]
    counts = {
        "by the check that is there for it": sum(_named(results, name) for name in asked),
        "by any check": sum(any(_hit(x) for x in checks[name].values()) for name in asked),
        "by one call against the oracle": sum(
            _hit(checks[name].get("forward")) or _hit(checks[name].get("backward"))
            for name in asked
        ),
        "by a conservation law": sum(_hit(checks[name].get("conservation")) for name in asked),
        "by the probes": sum(_hit(checks[name].get(PROBED)) for name in asked),
        "by one call with the values of some family": sum(
            any("L" in m or "P" in m or "x" in m for m in map(_mark, each.values()))
            for name, each in results["families"].items()
        ),
        f"by elementwise allclose, atol = rtol = {TOLERANCE:g}, on {SCALE:g} * Gaussian inputs, "
        "out and every gradient of one call": sum(results["elementwise"].values()),
    }
    of = len(faults)
    text = _table(["found", f"of {of} planted faults"], [[k, str(v)] for k, v in counts.items()])
    left = of - min(len(asked), len(results["elementwise"]))
    unfinished = f"\n**Unfinished: {left} faults have not been asked about yet.**\n" if left else ""
    return text + unfinished


def _hit(cell: str | None) -> bool:
    """Something was found."""
    return bool((cell or "").strip("-"))


def _named(results: dict[str, Any], name: str) -> bool:
    mutant = planted()[name]
    return mutant.finding in results["checks"].get(name, {}).get(mutant.check, "").split()


def _sensitivity(found: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name in lines():
        if name in found:
            n, h = found[name]["at"]
            factor = _factor(found[name]["worst"])
            rows.append([*name.split(), factor, f"sequence {n}, head {h}"])
    head = ["input", "dtype", "gradient", "smallest factor found", "where"]
    worst = {
        dtype: max((x["worst"] for name, x in found.items() if dtype in name), default=math.nan)
        for dtype in DTYPES
    }
    text = ", ".join(f"{_factor(e)} in {dtype}" for dtype, e in worst.items())
    return f"Over all of them: {text}.\n\n{_table(head, rows)}"


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


def _matrix(cells: dict[str, dict[str, str]], columns: list[str], *, own: bool = False) -> str:
    rows = []
    for name, mutant in planted().items():
        mine = {x: cells.get(name, {}).get(x) for x in columns}
        marks = [
            "**●**" if own and x == mutant.check and _hit(cell) else _mark(cell, plain=own)
            for x, cell in mine.items()
        ]
        rows.append([name, *marks])
    totals = [str(sum(_hit(each.get(x)) for each in cells.values())) for x in columns]
    return _table(["fault", *columns], [*rows, ["**found**", *totals]])


def _mark(cell: str | None, *, plain: bool = False) -> str:
    if cell is None:
        return "?"
    if cell in ("", "-"):
        return cell or "."
    if plain:
        return "x"
    words = set(cell.split())
    marks = {"law": "L", "probe": "P"}
    oracle = "x" if words - set(marks) else ""
    return oracle + "".join(mark for word, mark in marks.items() if word in words)


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
