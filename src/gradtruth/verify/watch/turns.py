"""Turns: which calls of a watched step are looked at, where there are more than a step has time for."""

from __future__ import annotations

from gradtruth.errors import InvalidProblem

__all__ = ["Turns"]


class Turns:
    """The calls of a step take turns, in the order in which they come; in the first watched step all are looked at.

    With L calls in a step and ``calls`` of them in each watched step, every call is looked at once in
    ceil(L / calls) watched steps. Ranks begin at different calls.

    Args:
        calls: how many in each watched step; None is all.

    Raises:
        InvalidProblem: calls is no positive int.
    """

    def __init__(self, calls: int | None) -> None:
        if calls is not None and (type(calls) is not int or calls < 1):
            raise InvalidProblem(f"calls is {calls!r}, expected a positive int or None")
        self._calls = calls
        self._number = 0  # of the next call in this step
        self._total = 0  # calls of the watched step before
        self._first = 0  # of this step's turn

    def begin(self) -> None:
        """A watched step begins."""
        if self._total and self._calls is not None:
            self._first += self._calls
        self._total, self._number = self._number or self._total, 0

    def due(self, rank: int) -> bool:
        """Whether the next call is looked at.

        Args:
            rank: of this process.
        """
        number, self._number = self._number, self._number + 1
        if self._calls is None or self._total <= self._calls:
            return True
        return (number - self._first - rank * self._calls) % self._total < self._calls
