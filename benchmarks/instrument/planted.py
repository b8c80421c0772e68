"""The planted faults, and what is asked about each: a matrix of answers.

A cell is "" where nothing was found, else the kinds of finding in the order of ``Kind``, e.g. "value nonzero";
"-" where the check is not reached or the kernel refuses the problem.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tests.mutants.catalogue import CATALOGUE, Mutant

from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import CHECKS, Check, named
from gradtruth.verify.doctor.programme import PROGRAMME, Item, case_of
from gradtruth.verify.engine import verify_case
from gradtruth.verify.findings import Kind, Row, Verdict
from gradtruth.verify.suite.families import FAMILIES

__all__ = [
    "ASKED",
    "FAMILIES",
    "ITEMS",
    "LAWS",
    "QUICK",
    "Cells",
    "by_check",
    "groups",
    "planted",
    "values",
]

ROOMS = ("memory", "sequences", "masks", "heads", "terms", "numbers")
ITEMS: dict[str, Item] = {item.name: item for item in PROGRAMME}
QUICK = tuple(item.name for item in PROGRAMME if item.quick)
ASKED: tuple[Check, ...] = tuple(check for check in CHECKS if check.device is None)
LAWS = {"law A": "<q, dq>", "law B": "<v, dv>", "law C": "sum of dk"}  # how their findings begin
_LAW_CHECK = "conservation"
_VALUES = named(("forward", "backward", _LAW_CHECK))
_FOUND = (Verdict.WRONG, Verdict.ERROR)
_SILENT = (Verdict.REFUSES, Verdict.NOT_REACHED)

Cells = dict[str, dict[str, str]]
"""By fault, then by column."""


def planted() -> dict[str, Mutant]:
    """All planted faults by name."""
    for room in ROOMS:
        importlib.import_module(f"tests.mutants.{room}")
    return CATALOGUE


def groups() -> dict[str, list[Mutant]]:
    """The faults by the problem that shows them: they share its oracle."""
    found = defaultdict(list)
    for mutant in planted().values():
        found[mutant.item].append(mutant)
    return dict(found)


def by_check(item: str, mutants: Iterable[Mutant], checks: Iterable[Check] = ASKED) -> Cells:
    """Their problem, every check that a CPU can ask, and the laws one by one.

    Every check gets fresh kernels, for a kernel may keep what an earlier check did.
    """
    case, mutants = case_of(ITEMS[item].recipe), list(mutants)
    found: Cells = {mutant.name: {} for mutant in mutants}
    for check in checks:
        for name, rows in _asked(case, mutants, (check,)).items():
            found[name][check.name] = _cell(rows)
            if check.name == _LAW_CHECK:
                found[name] |= {law: _cell(_of_law(rows, text)) for law, text in LAWS.items()}
    return found


def values(item: str, mutants: Iterable[Mutant], family: str | None = None) -> Cells:
    """A problem with the values of a family, its own by default, in one column named after either.

    Both halves against the oracle; "law" in a cell says that a conservation law alone would have found it.
    """
    recipe = ITEMS[item].recipe
    case = case_of(recipe if family is None else replace(recipe, family=family))
    asked = _asked(case, list(mutants), _VALUES)
    return {name: {family or item: _cell(rows)} for name, rows in asked.items()}


def _asked(case: Case, mutants: list[Mutant], checks: tuple[Check, ...]) -> dict[str, list[Row]]:
    """The rows of every fault."""
    found: dict[str, list[Row]] = {mutant.name: [] for mutant in mutants}
    for row in _rows(case, [_kernel(mutant) for mutant in mutants], checks):
        found[row.backend].append(row)
    return found


def _rows(case: Case, kernels: list, checks: tuple[Check, ...]) -> Iterator[Row]:
    for event in verify_case(case, kernels, name="planted", checks=checks):
        if isinstance(event, Row):
            yield event


def _kernel(mutant: Mutant) -> object:
    """A fresh kernel under the name of its fault."""
    kernel = mutant.make()
    kernel.name = mutant.name
    return kernel


def _of_law(rows: list[Row], text: str) -> list[Row]:
    """The rows of one law, and those that say that none was asked."""
    return [
        row for row in rows if row.verdict in _SILENT or "".join(row.detail[:1]).startswith(text)
    ]


def _cell(rows: list[Row]) -> str:
    kinds = {row.kind for row in rows if row.verdict in _FOUND}
    if kinds:
        return " ".join(kind.value for kind in Kind if kind in kinds)
    return "-" if rows and all(row.verdict in _SILENT for row in rows) else ""
