"""A finding of the check call_order as calls that are written out, so that they can be reduced and replayed."""

from __future__ import annotations

from collections.abc import Callable

from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import VALUES, Check
from gradtruth.verify.checks.call_order import related
from gradtruth.verify.minimise.finding import Calls, Finding, Shows

__all__ = ["explicit"]


def explicit(case: Case, ask: Callable[[tuple[Check, ...]], Shows]) -> tuple[Calls, Finding] | None:
    """Calls of which the last one is wrong against the oracle, and is right when it is made alone.

    Args:
        case: that call_order finds something about.
        ask: makes the question to the backend about the tensor, from checks.

    Returns:
        The calls and what a check of values finds; None where no related call before the case brings it about, or
        where the case is wrong by itself by now.
    """
    shows = ask(VALUES[:2])
    if shows((case,)) is not None:
        return None
    try:
        others = related(case).values()
    except InvalidProblem:
        return None
    for other in others:
        found = shows((other, case))
        if found is not None:
            return (other, case), found
    return None
