"""docs/instrument.md, written from the results and nothing else."""

from __future__ import annotations

import math
import re
from types import ModuleType
from typing import Any

from benchmarks.instrument.elementwise import SCALE, TOLERANCE
from benchmarks.instrument.planted import ASKED, FAMILIES, LAWS, QUICK, planted
from gradtruth.verify.checks import verdicts
from gradtruth.verify.truth import budget, rounding

__all__ = ["constants", "render"]

_HEAD = """# What the instrument finds

Written by `python -m benchmarks.instrument` from `benchmarks/results/instrument.json`; a test fails where a budget,
a check or a planted fault is not the one that this was made with.
"""


def constants() -> dict[str, float]:
    """Every number that a budget is made of, by module and name."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": value
        for module in (budget, rounding, verdicts)
        for name, value in _numbers(module)
    }


def render(results: dict[str, Any]) -> str:
    """The document.

    Args:
        results: constants, sensitivity, checks, families, problems and elementwise, as the run stored them.
    """
    parts = [
        _HEAD,
        _summary(results),
        _sensitivity(results["sensitivity"]),
        _matrix("By check", _BY_CHECK, results["checks"], [*(c.name for c in ASKED), *LAWS]),
        _matrix("By family", _BY_FAMILY, results["families"], list(FAMILIES)),
        _matrix("By problem", _BY_PROBLEM, results["problems"], list(QUICK)),
        _faults(results),
        _constants(results["constants"]),
    ]
    return "\n".join(parts)


_LEGEND = (
    "**●** the check that the fault is there for, x found, . silent, - not reached, ? not run."
)
_BY_CHECK = (
    f"Each fault on the doctor's problem that shows it, every check that a CPU can ask.\n{_LEGEND}"
)
_BY_FAMILY = (
    "The same problems with the values of every family, one call against the oracle (`forward`, `backward`): x found, "
    "L found and a conservation law alone would have found it, . silent."
)
_BY_PROBLEM = "The doctor's quick problems, asked and marked in the same way."


def _summary(results: dict[str, Any]) -> str:
    faults = planted()
    asked = [name for name in faults if name in results["checks"]]
    own = [name for name in asked if _named(results, name)]
    first = [name for name in asked if _values(results["checks"][name])]
    compared = [name for name in faults if name in results["elementwise"]]
    usual = [name for name in compared if results["elementwise"][name]]
    text = (
        f"{len(own)} of {len(asked)} planted faults are found by the check that is there for them. One call against "
        f"the oracle finds {len(first)} of {len(asked)}. An elementwise allclose with atol = rtol = {TOLERANCE:g} on "
        f"{SCALE:g} * Gaussian inputs, on the same problems, finds {len(usual)} of {len(compared)}.\n"
    )
    left = len(faults) - min(len(asked), len(compared))
    return text + (
        f"\n**Unfinished: {left} faults have not been asked about yet.**\n" if left else ""
    )


def _named(results: dict[str, Any], name: str) -> bool:
    mutant = planted()[name]
    return mutant.finding in results["checks"].get(name, {}).get(mutant.check, "").split()


def _values(cells: dict[str, str]) -> bool:
    return any(cells.get(check, "").strip("-") for check in ("forward", "backward"))


def _sensitivity(lines: list[dict[str, Any]]) -> str:
    rows = [
        f"| {x['input']} | {x['dtype']} | {x['tensor']} | {_factor(x['worst'])} | "
        f"sequence {x['at'][0]}, head {x['at'][1]} |"
        for x in lines
    ]
    return "\n".join(
        [
            "## Sensitivity\n",
            "The smallest factor on one (sequence, head) of a gradient that the check `backward` still finds, so that "
            "the same distance below 1 is found too: at the least sensitive place.\n",
            "| input | dtype | gradient | smallest factor found | where |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _factor(e: float) -> str:
    return "never" if math.isinf(e) else f"1 + {e:.2g}"


def _matrix(title: str, text: str, cells: dict[str, dict[str, str]], columns: list[str]) -> str:
    rows = []
    for name, mutant in planted().items():
        own = mutant.check if title == "By check" else None
        marks = [_mark(cells.get(name, {}).get(x), own=x == own, laws=own is None) for x in columns]
        rows.append(f"| {name} | {' | '.join(marks)} |")
    totals = [str(sum(bool(c.get(x, "").strip("-")) for c in cells.values())) for x in columns]
    return "\n".join(
        [
            f"## {title}\n",
            f"{text}\n",
            f"| fault | {' | '.join(columns)} |",
            f"| --- |{' --- |' * len(columns)}",
            *rows,
            f"| **found** | {' | '.join(totals)} |",
            "",
        ]
    )


def _mark(cell: str | None, *, own: bool, laws: bool) -> str:
    if cell is None:
        return "?"
    if cell in ("", "-"):
        return cell or "."
    if own:
        return "**●**"
    return "L" if laws and "law" in cell.split() else "x"


def _faults(results: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {m.kind} | {m.fault} | {m.item} | {m.check} | {m.tensor or ''} | {m.finding} | "
        f"{'yes' if results['elementwise'].get(name) else 'no'} |"
        for name, m in planted().items()
    ]
    return "\n".join(
        [
            "## The faults\n",
            "| fault | kind | what it does | problem | found by | in | as | allclose finds it |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _constants(found: dict[str, float]) -> str:
    rows = [f"| {name} | {value:g} |" for name, value in found.items()]
    return "\n".join(
        ["## The budgets' constants\n", "| constant | value |", "| --- | --- |", *rows, ""]
    )


def _numbers(module: ModuleType) -> list[tuple[str, float]]:
    return [
        (name, float(value))
        for name, value in sorted(vars(module).items())
        if re.fullmatch(r"_?[A-Z][A-Z_]*", name) and type(value) in (int, float)
    ]
