"""Tally: what a capture saw, and what it left out and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gradtruth.verify.capture.budget import Budget, shown_bytes
from gradtruth.verify.capture.selection import Place

__all__ = ["NO_BACKWARD", "Seen", "Tally"]

NO_BACKWARD = "no backward came"
_MOST_REASONS, _MOST_LAYERS = 50, 4096
_OTHERS = "other reasons"
_LISTED = 8


@dataclass(slots=True)
class Seen:
    """One layer's calls through one entry point.

    Attributes:
        index, layer, entry: see ``Place``.
        problem: label of the first call's problem.
        calls: how many.
        differentiable: how many of them a backward could follow.
    """

    index: int
    layer: str
    entry: str
    problem: str
    calls: int = 0
    differentiable: int = 0


@dataclass(slots=True)
class Tally:
    """Counts.

    Attributes:
        seen: by layer and entry point.
        unselected: calls that the selection leaves out by layer, step, call or rank.
        other_entries: entry points that it leaves out to their calls; what these call themselves is looked at.
        skipped: reasons to calls that were wanted and cannot be saved.
        dropped: limits to calls that were wanted and did not fit.
    """

    seen: dict[tuple[str, str], Seen] = field(default_factory=dict)
    unselected: int = 0
    other_entries: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    _indices: dict[str, int] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Calls that were understood."""
        return sum(one.calls for one in self.seen.values())

    def index(self, layer: str) -> int:
        """The layer's number, in the order of first calls."""
        return self._indices.setdefault(layer, len(self._indices))

    def see(self, place: Place, problem: str, *, differentiable: bool) -> None:
        """A call was made."""
        key = (place.layer, place.entry)
        if key not in self.seen and len(self.seen) >= _MOST_LAYERS:
            key = ("", _OTHERS)
        if key not in self.seen:
            self.seen[key] = Seen(place.index, *key, problem)
        self.seen[key].calls += 1
        self.seen[key].differentiable += differentiable

    def skip(self, reason: str) -> None:
        """A wanted call cannot be saved."""
        known = reason in self.skipped or len(self.skipped) < _MOST_REASONS
        self.skipped[reason if known else _OTHERS] += 1

    def summary(self, folder: str | None = None, budget: Budget | None = None) -> str:
        """What was saved and what was not, a line each."""
        seen = f"{self.calls} attention calls seen"
        lines = [seen]
        if budget is not None:
            lines = [f"{budget.cases} cases, {shown_bytes(budget.bytes)} in {folder}; {seen}"]
        lines += [f"dropped {n}: {limit}" for limit, n in self.dropped.most_common()]
        lines += [f"skipped {n}: {reason}" for reason, n in self.skipped.most_common()]
        if self.unselected:
            lines.append(f"not selected: {self.unselected}")
        if self.other_entries:
            found = (f"{name} ({count})" for name, count in self.other_entries.most_common())
            lines.append(f"other entry points: {', '.join(found)}")
        saved = budget is not None and budget.cases
        if self.unselected and not saved and not self.skipped:
            names = [one.layer or "(no module)" for one in self.seen.values()]
            shown = ", ".join(dict.fromkeys(names[:_LISTED]))
            lines.append(f"layers seen: {shown}{' ...' if len(names) > _LISTED else ''}")
        return "\n".join(lines)

    def facts(self) -> dict[str, Any]:
        """The same as data."""
        return {
            "calls": self.calls,
            "unselected": self.unselected,
            "other_entries": dict(self.other_entries),
            "dropped": dict(self.dropped),
            "skipped": dict(self.skipped),
        }

    def table(self) -> str:
        """Layers in the order of their first calls."""
        rows = [("index", "layer", "entry", "calls", "differentiable", "problem of the first")]
        rows += [
            (str(one.index), one.layer or "-", one.entry, str(one.calls), str(one.differentiable), one.problem)
            for one in sorted(self.seen.values(), key=lambda one: one.index)
        ]  # fmt: skip
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
