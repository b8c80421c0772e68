"""Ranges: which numbers are meant by "0,10-20,100-:50"."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gradtruth.errors import InvalidProblem

__all__ = ["Ranges"]

_ITEM = re.compile(r"(\d{1,18})(?:(-)(\d{1,18})?(?::(\d{1,18}))?)?")
_FORM = "numbers and ranges like 0,10-20,100-:50"


@dataclass(frozen=True, slots=True)
class Ranges:
    """A set of non-negative numbers.

    Attributes:
        parts: (first, last, stride); last is included, None is no end.
    """

    parts: tuple[tuple[int, int | None, int], ...]

    @staticmethod
    def of(name: str, given: str | int | Iterable[int]) -> Ranges:
        """The set that is meant by a text, a number or numbers.

        Args:
            name: of the argument, for errors.
            given: "N" is one number, "A-B" all from A to B, "A-" all from A, ":S" behind a range every S-th of
                it; items are separated by commas. Or an int, or ints.

        Raises:
            InvalidProblem: none of these, or a range that is empty.
        """
        if isinstance(given, str):
            return Ranges(tuple(_part(name, given, item.strip()) for item in given.split(",")))
        numbers = (given,) if isinstance(given, int) else tuple(given)
        if not numbers or any(type(n) is not int or n < 0 for n in numbers):
            raise InvalidProblem(f"{name} is {given!r}, expected non-negative ints or {_FORM}")
        return Ranges(tuple((n, n, 1) for n in numbers))

    def __contains__(self, number: int) -> bool:
        return any(
            number >= first and (last is None or number <= last) and (number - first) % stride == 0
            for first, last, stride in self.parts
        )


def _part(name: str, text: str, item: str) -> tuple[int, int | None, int]:
    found = _ITEM.fullmatch(item)
    if found is None:
        raise InvalidProblem(f"{name} is {text!r}, expected {_FORM}")
    first, dash, last, stride = found.groups()
    start, step = int(first), int(stride or 1)
    end = start if dash is None else None if last is None else int(last)
    if end is not None and end < start:
        raise InvalidProblem(
            f"{name} has {item!r}, expected a range that does not end before it starts"
        )
    if step == 0:
        raise InvalidProblem(f"{name} has {item!r}, expected a stride of at least 1")
    return start, end, step
