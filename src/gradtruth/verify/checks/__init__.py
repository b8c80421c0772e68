"""Checks: what is asked of a backend about a case, one file each."""

from __future__ import annotations

from gradtruth.errors import InvalidProblem
from gradtruth.verify.checks.backward import BACKWARD
from gradtruth.verify.checks.backward_from_oracle import BACKWARD_FROM_ORACLE
from gradtruth.verify.checks.check import Check, Judged, NotClaimed, NotReached
from gradtruth.verify.checks.forward import FORWARD
from gradtruth.verify.checks.subject import Run, Subject

__all__ = [
    "CHECKS",
    "VALUES",
    "Check",
    "Judged",
    "NotClaimed",
    "NotReached",
    "Run",
    "Subject",
    "named",
]

VALUES: tuple[Check, ...] = (FORWARD, BACKWARD, BACKWARD_FROM_ORACLE)
"""The checks against the oracle."""

CHECKS: tuple[Check, ...] = (*VALUES,)
"""Every check, in the order in which they are run: values first, then what explains them."""


def named(names: tuple[str, ...]) -> tuple[Check, ...]:
    """The checks of these names, in the order of ``CHECKS``.

    Raises:
        InvalidProblem: no check has this name.
    """
    known = [check.name for check in CHECKS]
    for name in names:
        if name not in known:
            raise InvalidProblem(f"check is {name!r}, expected some of {', '.join(known)}")
    return tuple(check for check in CHECKS if check.name in names)
