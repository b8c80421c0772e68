"""Checks: what is asked of a backend about a case, one file each."""

from __future__ import annotations

from gradtruth.errors import InvalidProblem
from gradtruth.verify.checks.backward import BACKWARD
from gradtruth.verify.checks.backward_from_oracle import BACKWARD_FROM_ORACLE
from gradtruth.verify.checks.check import Check, Judged, NotClaimed, NotReached
from gradtruth.verify.checks.dropout_consistency import DROPOUT_CONSISTENCY
from gradtruth.verify.checks.forward import FORWARD
from gradtruth.verify.checks.lse_contract import LSE_CONTRACT
from gradtruth.verify.checks.shift_invariance import SHIFT_INVARIANCE
from gradtruth.verify.checks.subject import Run, Subject
from gradtruth.verify.checks.tile_merge import TILE_MERGE

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

CHECKS: tuple[Check, ...] = (
    *VALUES,
    TILE_MERGE,
    SHIFT_INVARIANCE,
    LSE_CONTRACT,
    DROPOUT_CONSISTENCY,
)
"""Every check, in the order in which they are run: values first, then what explains them."""


def named(names: tuple[str, ...]) -> tuple[Check, ...]:
    """The checks of these names, in the order of ``CHECKS``.

    Args:
        names: of checks, or of sets of them: "values", "quick", "all".

    Raises:
        InvalidProblem: nothing has this name.
    """
    sets = {
        "values": VALUES,
        "quick": tuple(check for check in CHECKS if check.quick),
        "all": CHECKS,
    }
    known = {check.name: (check,) for check in CHECKS} | sets
    for name in names:
        if name not in known:
            raise InvalidProblem(f"check is {name!r}, expected some of {', '.join(known)}")
    wanted = {check.name for name in names for check in known[name]}
    return tuple(check for check in CHECKS if check.name in wanted)
