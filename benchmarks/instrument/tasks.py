"""What is to be done, in pieces of a few seconds: a piece knows what results it is for and runs in any process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.instrument import elementwise, planted, probing, sensitivity

__all__ = ["PARTS", "Task", "columns", "tasks"]

PARTS = ("checks", "families", "problems", "probes", "elementwise", "sensitivity")
_TOGETHER = {"checks": 2, "problems": 12, "probes": 12}  # faults in one piece

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of one part.

    Attributes:
        part: one of ``PARTS``.
        item: the problem.
        mutants: names of faults; of "sensitivity" a dtype and a gradient.
        family: of values; None for the problem's own.
    """

    part: str
    item: str
    mutants: tuple[str, ...]
    family: str | None = None

    def run(self) -> Results:
        """Results by name."""
        if self.part == "sensitivity":
            return {
                " ".join((self.item, *self.mutants)): sensitivity.line(self.item, *self.mutants)
            }
        known = planted.planted()
        mutants = [known[name] for name in self.mutants]
        if self.part == "checks":
            return planted.by_check(self.item, mutants)
        if self.part == "elementwise":
            return elementwise.caught(self.item, mutants)
        if self.part == "probes":
            return planted.probed(self.item, mutants, self.family)
        return planted.values(self.item, mutants, self.family)


def columns(part: str, item: str) -> set[str]:
    """The cells of one fault, by the problem that shows it."""
    if part == "checks":
        return {*(check.name for check in planted.ASKED), *planted.LAWS}
    if part == "probes":
        return {item, *planted.FAMILIES, *planted.QUICK}
    return set(planted.FAMILIES if part == "families" else planted.QUICK)


def tasks(results: Mapping[str, Results], parts: Sequence[str] = PARTS) -> list[Task]:
    """What the results do not hold yet; the long pieces first."""
    return [task for part in PARTS if part in parts for task in _tasks(part, results[part])]


def _tasks(part: str, found: Results) -> Iterator[Task]:
    groups = {item: [x.name for x in each] for item, each in planted.groups().items()}
    if part == "sensitivity":
        for name in sensitivity.lines():
            if name not in found:
                item, *rest = name.split()
                yield Task(part, item, tuple(rest))
    elif part == "elementwise":
        for item, names in groups.items():
            yield from _pieces(part, item, [x for x in names if x not in found])
    elif part == "checks":
        for item, names in groups.items():
            left = [x for x in names if set(found.get(x, {})) != columns(part, item)]
            yield from _pieces(part, item, left)
    elif part != "probes" or probing.there():
        yield from _values(part, found, groups)


def _values(part: str, found: Results, groups: dict[str, list[str]]) -> Iterator[Task]:
    """Problems, each with its own faults, in the values of every family; and all faults on the quick ones."""
    if part in ("families", "probes"):
        for family in planted.FAMILIES:
            for item, names in groups.items():
                left = [x for x in names if family not in found.get(x, {})]
                yield from _pieces(part, item, left, family)
    for item in planted.ITEMS:
        names = list(planted.planted()) if item in planted.QUICK else groups.get(item, [])
        if part == "problems" and item not in planted.QUICK:
            continue
        if part in ("problems", "probes"):
            yield from _pieces(part, item, [x for x in names if item not in found.get(x, {})])


def _pieces(part: str, item: str, names: list[str], family: str | None = None) -> Iterator[Task]:
    step = _TOGETHER.get(part, len(names))
    for first in range(0, len(names), step or 1):
        yield Task(part, item, tuple(names[first : first + step]), family)
