"""A finding that memory or earlier calls bring about, as calls that show it alone: they can be reduced and replayed."""

from __future__ import annotations

from collections.abc import Callable

from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import VALUES, Check
from gradtruth.verify.checks.call_order import related
from gradtruth.verify.minimise.finding import Calls, Finding, Shows
from gradtruth.verify.minimise.memory import BYTES, CLEAN

__all__ = ["explicit", "in_memory"]


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


def in_memory(
    case: Case, finding: Finding, ask: Callable[[tuple[Check, ...], int], Shows]
) -> Finding | None:
    """The finding as it shows in one call, where fresh memory holds a known byte.

    What a kernel reads before it writes is 0 in a fresh process and anything later: such a finding comes and goes with
    the process, and with filled memory it stays.

    Args:
        case: the judged call.
        finding: about it, or about calls that end with it.
        ask: makes the question to the backend about the tensor, from checks and the byte.

    Returns:
        What a check of values finds; None where the call is right in filled memory, or wrong in cleared memory too:
        then memory has no part in it.
    """
    checks = VALUES if finding.check not in {check.name for check in VALUES} else ()
    checks = checks or tuple(check for check in VALUES if check.name == finding.check)
    for byte in BYTES:
        found = ask(checks, byte)((case,))
        if found is not None:
            return found if ask(checks, CLEAN)((case,)) is None else None
    return None
