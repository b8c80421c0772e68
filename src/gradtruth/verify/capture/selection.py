"""Selection: which calls are wanted, by layer, step, number within the step, rank and entry point."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gradtruth.errors import InvalidProblem
from gradtruth.verify.capture.ranges import Ranges

__all__ = ["Place", "Selection"]

Numbers = str | int | Iterable[int] | None
Names = str | int | Iterable[str | int] | None

_NUMERIC = re.compile(r"\d[\d:-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a run a call was made.

    Attributes:
        layer: qualified name of the module, "" outside every module.
        index: number of that layer, in the order in which layers made their first call.
        step: steps that had ended before.
        call: number of this call among those of its layer in its step.
        rank: of the process, None where nobody knows.
        entry: name of the entry point.
    """

    layer: str
    index: int
    step: int
    call: int
    rank: int | None
    entry: str


@dataclass(frozen=True, slots=True)
class Selection:
    """What is wanted; None is everything.

    Attributes:
        layer_names: patterns for names (``fnmatch``).
        layer_indices: numbers of layers.
        step, call, rank: numbers.
        entry: patterns for names of entry points, or for their last parts.
    """

    layer_names: tuple[str, ...] | None = None
    layer_indices: Ranges | None = None
    step: Ranges | None = None
    call: Ranges | None = None
    rank: Ranges | None = None
    entry: tuple[str, ...] | None = None

    @staticmethod
    def of(
        *,
        layer: Names = None,
        step: Numbers = None,
        call: Numbers = None,
        rank: Numbers = None,
        entry: str | Iterable[str] | None = None,
    ) -> Selection:
        """The selection of what a user gave.

        Args:
            layer: names, patterns ("*.layers.3.*") or indices ("0-3"); a text may hold several, with commas.
            step: see ``Ranges.of``; so are call and rank.
            entry: patterns of entry points; a text may hold several.

        Raises:
            InvalidProblem: none of these; names the argument.
        """
        names, indices = _layers(layer)
        return Selection(
            layer_names=names,
            layer_indices=indices,
            step=None if step is None else Ranges.of("step", step),
            call=None if call is None else Ranges.of("call", call),
            rank=None if rank is None else Ranges.of("rank", rank),
            entry=_texts("entry", entry),
        )

    def takes_step(self, step: int) -> bool:
        """Whether any call of this step can be wanted."""
        return self.step is None or step in self.step

    def takes_entry(self, entry: str) -> bool:
        """Whether any call through this entry point can be wanted."""
        return self.entry is None or _matches(entry, self.entry)

    def takes(self, place: Place) -> bool:
        """Whether the call made there is wanted. An unknown rank counts as 0."""
        return (
            self._takes_layer(place)
            and self.takes_step(place.step)
            and (self.call is None or place.call in self.call)
            and (self.rank is None or (place.rank or 0) in self.rank)
            and self.takes_entry(place.entry)
        )

    def _takes_layer(self, place: Place) -> bool:
        if self.layer_names is None and self.layer_indices is None:
            return True
        if self.layer_indices is not None and place.index in self.layer_indices:
            return True
        return any(fnmatchcase(place.layer, pattern) for pattern in self.layer_names or ())


def _matches(entry: str, patterns: tuple[str, ...]) -> bool:
    last = re.split(r"[.:]", entry)[-1]
    return any(fnmatchcase(entry, one) or fnmatchcase(last, one) for one in patterns)


def _layers(given: Names) -> tuple[tuple[str, ...] | None, Ranges | None]:
    """Patterns and indices."""
    if given is None:
        return None, None
    items: list[str] = []
    for item in (given,) if isinstance(given, str | int) else given:
        if isinstance(item, bool) or not isinstance(item, str | int):
            raise InvalidProblem(f"layer has {item!r}, expected names, patterns or indices")
        items += [part.strip() for part in str(item).split(",")]
    if not items or "" in items:
        raise InvalidProblem(f"layer is {given!r}, expected names, patterns or indices")
    numeric = [item for item in items if _NUMERIC.fullmatch(item)]
    names = tuple(item for item in items if item not in numeric)
    indices = Ranges.of("layer", ",".join(numeric)) if numeric else None
    return names or None, indices


def _texts(name: str, given: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    items = given.split(",") if isinstance(given, str) else list(given)
    if not items or any(not isinstance(item, str) or not item.strip() for item in items):
        raise InvalidProblem(f"{name} is {given!r}, expected texts")
    return tuple(item.strip() for item in items)
