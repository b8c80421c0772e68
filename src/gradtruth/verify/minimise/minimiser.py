"""minimise: the smallest calls that still show a finding."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.minimise.finding import Calls, Finding, Shows
from gradtruth.verify.minimise.reductions import reduce_once
from gradtruth.verify.minimise.search import Budget, Exhausted, Search
from gradtruth.verify.minimise.size import size

__all__ = ["Minimised", "minimise"]


@dataclass(frozen=True, slots=True)
class Minimised:
    """What came out.

    Attributes:
        case: the case that shows the finding.
        preceding: calls that have to be made before it, in this order.
        finding: as the case shows it.
        steps: what was done to the given calls, in words.
        tried: how many times calls were looked at.
        seconds: how long it took.
        complete: no reduction is left that keeps the finding; False where the budget ended the search.
    """

    case: Case
    preceding: tuple[Case, ...]
    finding: Finding
    steps: tuple[str, ...]
    tried: int
    seconds: float
    complete: bool

    @property
    def calls(self) -> Calls:
        """All calls in their order."""
        return (*self.preceding, self.case)


def minimise(
    case: Case,
    shows: Shows,
    *,
    preceding: tuple[Case, ...] = (),
    confirm: tuple[int, int] = (1, 1),
    budget: Budget | None = None,
    progress: Callable[[str], None] | None = None,
    again: Shows | None = None,
) -> Minimised:
    """The smallest calls that show the same finding: the same check, tensor and kind.

    Smaller is what ``minimise.size.size`` says: fewer calls before fewer sequences, then heads, tokens, storage,
    channels, options, and simpler values. Reductions are tried in this order, each on all calls alike and then on
    each, from the smallest candidate up; what shows the finding is kept, and all begin again until none does. So the
    result is minimal for every single reduction, not the smallest that there is. Two things come out of turn, because
    they make all later looks cheap, or clear: short sequences, and values in closed form.

    Args:
        case: the judged call.
        shows: says whether calls show a finding, and which; see ``finding.finder``. Calls on whose reduced form it
            cannot be asked are for it to refuse with None.
        preceding: calls made before the case, where the finding needs them.
        confirm: (k, n): a flaky finding shows where it does in k of n looks.
        budget: how long it may take; what was found until then is returned.
        progress: told what is tried, once per candidate.
        again: a dearer question that the given calls are known to show the finding in, and the result must too, as one
            to a fresh process where ``shows`` asks one that lives on. Where it does not, the search goes back to
            where it does, and on from there with both. It may outlast the budget by a few such looks.

    Raises:
        InvalidProblem: the given calls do not show a finding, or confirm is not 1 <= k <= n.
    """
    wanted, looks = confirm
    if not 1 <= wanted <= looks:
        raise InvalidProblem(f"confirm is {confirm}, expected (k, n) with 1 <= k <= n")
    began, calls = time.perf_counter(), (*preceding, case)
    first, looked = _first(calls, shows, wanted, looks)
    search = Search(
        calls=calls,
        finding=first,
        shows=shows,
        confirm=confirm,
        budget=budget or Budget(),
        progress=progress or (lambda _: None),
        tried=looked,
        began=began,
    )
    complete = _reduce(search)
    if again is not None and search.go_back(again):
        search.shows = _both(shows, again)
        complete = _reduce(search)
    return Minimised(
        case=search.calls[-1],
        preceding=search.calls[:-1],
        finding=search.finding,
        steps=tuple(search.steps),
        tried=search.tried,
        seconds=time.perf_counter() - began,
        complete=complete,
    )


def _reduce(search: Search) -> bool:
    """Reduce until nothing does any more; False where the budget ended it."""
    complete = False
    with suppress(Exhausted):
        while not complete:
            before = size(search.calls)
            reduce_once(search)
            complete = size(search.calls) == before
    return complete


def _both(shows: Shows, again: Shows) -> Shows:
    """The cheap question, and the dear one where that shows something."""

    def ask(calls: Calls) -> Finding | None:
        found = shows(calls)
        return None if found is None else again(calls)

    return ask


def _first(calls: Calls, shows: Shows, wanted: int, looks: int) -> tuple[Finding, int]:
    """The finding that is to be kept, and how many looks it took; the first one that shows."""
    found: list[Finding] = []
    for at in range(looks):
        seen = shows(calls)
        if seen is not None and (not found or seen.same(found[0])):
            found.append(seen)
        if len(found) >= wanted:
            return found[0], at + 1
    what = f"{found[0]} shows" if found else "a finding shows"
    raise InvalidProblem(f"{what} in {len(found)} of {looks} looks, expected {wanted}")
