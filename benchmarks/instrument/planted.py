"""The planted faults, and what is asked about each: a matrix of answers.

A cell is "" where nothing was found, else the kinds of finding in the order of ``Kind``, e.g. "value nonzero";
"-" where the check is not reached or the kernel refuses the problem.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch
from tests.mutants.catalogue import CATALOGUE, Mutant

from benchmarks.instrument.probing import PROBES
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
    "probed",
    "values",
]

ROOMS = ("memory", "sequences", "masks", "heads", "terms", "numbers")
ITEMS: dict[str, Item] = {item.name: item for item in PROGRAMME}
QUICK = tuple(item.name for item in PROGRAMME if item.quick)
ASKED: tuple[Check, ...] = tuple(check for check in CHECKS if check.device is None)
LAWS = {"law A": "<q, dq>", "law B": "<v, dv>", "law C": "sum of dk"}  # how their findings begin
_LAW_CHECK = "conservation"
_VALUES = named(("forward", "backward"))
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


def by_check(item: str, mutants: Iterable[Mutant]) -> Cells:
    """Every check that a CPU can ask, and the laws one by one."""
    case = case_of(ITEMS[item].recipe)
    found: Cells = {}
    for name, rows in _asked(case, list(mutants), ASKED).items():
        cells = found[name] = {check: _cell(rows[check]) for check in rows}
        for law, text in LAWS.items():
            cells[law] = _cell(_of_law(rows[_LAW_CHECK], text))
    return found


def values(item: str, mutants: Iterable[Mutant], family: str | None = None) -> Cells:
    """A problem with the values of a family, its own by default, in one column named after either.

    Both halves against the oracle; "law" in a cell says that a conservation law alone would have found it.
    """
    checks = (*_VALUES, *named((_LAW_CHECK,)))
    return {
        name: {family or item: _cell([row for each in rows.values() for row in each])}
        for name, rows in _asked(_case(item, family), list(mutants), checks).items()
    }


def probed(item: str, mutants: Iterable[Mutant], family: str | None = None) -> Cells:
    """The same for the exact probes, which need no more than watching has."""
    found = _asked(_case(item, family), list(mutants), (PROBES,))
    return {name: {family or item: _cell(rows[PROBES.name])} for name, rows in found.items()}


def _case(item: str, family: str | None) -> Case:
    recipe = ITEMS[item].recipe
    return case_of(recipe if family is None else replace(recipe, family=family))


def _asked(
    case: Case, mutants: list[Mutant], checks: tuple[Check, ...]
) -> dict[str, dict[str, list[Row]]]:
    """The rows of every fault by check, against one oracle.

    Every check gets a fresh kernel, for a kernel may keep what an earlier check did.
    """
    torch.manual_seed(0)
    kernels, asked, place = [], {}, {}
    for mutant in mutants:
        for check in checks:
            kernel = mutant.make()
            kernel.name = f"{mutant.name} {check.name}"
            kernels.append(kernel)
            asked[kernel.name] = (check,)
            place[kernel.name] = mutant.name, check.name
    found = {mutant.name: {check.name: [] for check in checks} for mutant in mutants}
    for event in verify_case(case, kernels, name="planted", checks=lambda x: asked[x.name]):
        if isinstance(event, Row):
            name, check = place[event.backend]
            found[name][check].append(event)
    return found


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
