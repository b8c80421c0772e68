"""What is to be done, in pieces of a few seconds: a piece knows what results it is for and runs in any process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.instrument import elementwise, planted, sensitivity

__all__ = ["PARTS", "Task", "columns", "tasks"]

PARTS = ("checks", "families", "problems", "elementwise", "sensitivity")
_TOGETHER = {"checks": 2, "problems": 12}  # faults in one piece

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of one part.

    Attributes:
        part: one of ``PARTS``.
        item: the problem.
        mutants: names of faults; of "sensitivity" a dtype and a gradient.
        family: of values, where the part is "families".
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
        return planted.values(self.item, mutants, self.family)


def columns(part: str) -> set[str]:
    """The cells of one fault."""
    if part == "checks":
        return {*(check.name for check in planted.ASKED), *planted.LAWS, planted.PROBED}
    return set(planted.FAMILIES if part == "families" else planted.QUICK)


def tasks(results: Mapping[str, Results], parts: Sequence[str] = PARTS) -> list[Task]:
    """What the results do not hold yet; the long pieces first."""
    return [task for part in PARTS if part in parts for task in _tasks(part, results[part])]


def _tasks(part: str, found: Results) -> Iterator[Task]:
    groups = {item: [x.name for x in each] for item, each in planted.groups().items()}
    everyone = list(planted.planted())
    if part == "sensitivity":
        for name in sensitivity.lines():
            if name not in found:
                item, *rest = name.split()
                yield Task(part, item, tuple(rest))
    elif part == "elementwise":
        for item, names in groups.items():
            yield from _pieces(part, item, [x for x in names if x not in found])
    elif part == "families":
        for family in planted.FAMILIES:
            for item, names in groups.items():
                left = [x for x in names if family not in found.get(x, {})]
                yield from _pieces(part, item, left, family)
    elif part == "problems":
        for item in planted.QUICK:
            yield from _pieces(part, item, [x for x in everyone if item not in found.get(x, {})])
    else:
        for item, names in groups.items():
            left = [x for x in names if set(found.get(x, {})) != columns(part)]
            yield from _pieces(part, item, left)


def _pieces(part: str, item: str, names: list[str], family: str | None = None) -> Iterator[Task]:
    step = _TOGETHER.get(part, len(names))
    for first in range(0, len(names), step or 1):
        yield Task(part, item, tuple(names[first : first + step]), family)
