"""The search: reductions from the largest to the smallest, kept while the finding shows, as delta debugging does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations

from gradtruth.errors import InvalidProblem
from gradtruth.verify.edits.arrangement import restrided
from gradtruth.verify.minimise.finding import Calls, Finding, Shows
from gradtruth.verify.minimise.size import digest, size

__all__ = ["Budget", "Exhausted", "Search"]

_SINGLES, _PAIRS = 16, 8  # items of which every single one, and every pair, is tried


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a search may take.

    Attributes:
        evaluations: how often calls may be looked at.
        seconds: no look begins after so many.
    """

    evaluations: int = 5000
    seconds: float = 300.0


class Exhausted(Exception):
    """The budget is used up."""


@dataclass(slots=True, eq=False)
class Search:
    """Where a search stands.

    Attributes:
        calls: the smallest that show the finding so far.
        finding: what they show.
        shows: the question.
        confirm: (k, n): calls show the finding where they do in k of n looks.
        budget: how long it may take.
        progress: told what is tried.
        steps: what was done to get here.
        tried: looks so far.
        began: when, for the budget.
        before: the calls and findings that it has been at, as many as steps.
        keep_strides: the finding needs memory that is not contiguous: edits keep the strides that there are.
    """

    calls: Calls
    finding: Finding
    shows: Shows
    confirm: tuple[int, int]
    budget: Budget
    progress: Callable[[str], None]
    steps: list[str] = field(default_factory=list)
    tried: int = 0
    began: float = field(default_factory=time.perf_counter)
    before: list[tuple[Calls, Finding]] = field(default_factory=list)
    keep_strides: bool = False
    _seen: set[str] = field(default_factory=set)

    def attempt(self, what: str, build: Callable[[Calls], Calls]) -> bool:
        """Go to what ``build`` makes of the calls, if that is smaller and shows the finding.

        An edit that the calls do not allow raises InvalidProblem, and is not an attempt.

        Raises:
            Exhausted: the budget is used up.
        """
        try:
            candidate = self._restrided(build(self.calls))
        except InvalidProblem:
            return False
        if size(candidate) >= size(self.calls):
            return False
        mark = digest(candidate)
        if mark in self._seen:
            return False
        self._seen.add(mark)
        self.progress(what)
        found = self.look(candidate)
        if found is None:
            return False
        self.before.append((self.calls, self.finding))
        self.calls, self.finding = candidate, found
        self.steps.append(what)
        return True

    def look(self, calls: Calls) -> Finding | None:
        """The finding, where the calls show it in k of n looks.

        Raises:
            Exhausted: the budget is used up.
        """
        wanted, looks = self.confirm
        last, count = None, 0
        for at in range(looks):
            if looks - at < wanted - count:
                return None
            if (
                self.tried >= self.budget.evaluations
                or time.perf_counter() - self.began > self.budget.seconds
            ):
                raise Exhausted
            self.tried += 1
            found = self.shows(calls)
            if found is not None and found.same(self.finding):
                last, count = found, count + 1
                if count >= wanted:
                    return last
        return None

    def subset(self, what: str, count: int, build: Callable[[Calls, list[int]], Calls]) -> None:
        """Find few of ``count`` items that suffice: one, two, then ever smaller parts left out.

        Args:
            what: the items, for the steps.
            count: how many there are.
            build: the calls with only the items of these numbers.
        """

        def tried(items: list[int]) -> bool:
            return self.attempt(f"{what} {items}", lambda calls: build(calls, items))

        every = list(range(count))
        if count < 2 or any(tried([n]) for n in every[:_SINGLES]):
            return
        few = count <= _PAIRS
        if few and count > 2 and any(tried(list(pair)) for pair in combinations(every, 2)):
            return
        parts = 2
        while count > 1:
            step = -(-count // parts)
            for at in range(0, count, step):
                rest = [n for n in range(count) if not at <= n < at + step]
                if rest and tried(rest):
                    count, parts = len(rest), max(2, parts - 1)
                    break
            else:
                if step == 1:
                    return
                parts = min(count, 2 * parts)

    def least(
        self, what: str, high: int, build: Callable[[Calls, int], Calls], low: int = 1
    ) -> bool:
        """Find a small number in [low, high) that suffices: doubled from below, then bisected.

        Small candidates are cheap to look at, and large ones are not; so it starts from below.
        """

        def tried(number: int) -> bool:
            return self.attempt(f"{what} {number}", lambda calls: build(calls, number))

        failed, number = low - 1, low
        while number < high and not tried(number):
            failed, number = number, max(1, 2 * number)
        if number >= high:
            return False
        good = number
        while good - failed > 1:
            middle = (good + failed) // 2
            if tried(middle):
                good = middle
            else:
                failed = middle
        return True

    def go_back(self, shows: Shows) -> bool:
        """Back to the last calls on the way here that another question shows the finding in.

        It is taken to show in all calls up to some point, and in those that were given: so few are looked at.

        Returns:
            Whether anything was taken back.
        """

        def holds(at: int) -> bool:
            self.tried += 1
            found = shows(way[at][0])
            return found is not None and found.same(self.finding)

        way = [*self.before, (self.calls, self.finding)]
        if len(way) == 1 or holds(len(way) - 1):
            return False
        good, bad = 0, len(way) - 1
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if holds(middle) else (good, middle)
        self.calls, self.finding = way[good]
        del self.steps[good:], self.before[good:]
        self._seen.clear()
        return True

    def _restrided(self, calls: Calls) -> Calls:
        """Memory as it was, where the finding needs it so."""
        if not self.keep_strides or len(calls) != len(self.calls):
            return calls
        return tuple(
            restrided(new, old) if new.problem.layout == old.problem.layout else new
            for new, old in zip(calls, self.calls, strict=True)
        )
