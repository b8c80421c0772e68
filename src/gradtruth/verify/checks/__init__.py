"""Checks: what is asked of a backend about a case, one file each."""

from __future__ import annotations

from gradtruth.errors import InvalidProblem
from gradtruth.verify.checks.allocator_churn import ALLOCATOR_CHURN
from gradtruth.verify.checks.autograd_contract import AUTOGRAD_CONTRACT
from gradtruth.verify.checks.backward import BACKWARD
from gradtruth.verify.checks.backward_from_oracle import BACKWARD_FROM_ORACLE
from gradtruth.verify.checks.batch_permutation import BATCH_PERMUTATION
from gradtruth.verify.checks.batch_slice import BATCH_SLICE
from gradtruth.verify.checks.call_order import CALL_ORDER
from gradtruth.verify.checks.check import Check, Judged, NotClaimed, NotReached
from gradtruth.verify.checks.compile_equals_eager import COMPILE_EQUALS_EAGER
from gradtruth.verify.checks.conservation import CONSERVATION
from gradtruth.verify.checks.determinism import DETERMINISM
from gradtruth.verify.checks.dropout_consistency import DROPOUT_CONSISTENCY
from gradtruth.verify.checks.exact_zeros import EXACT_ZEROS
from gradtruth.verify.checks.forward import FORWARD
from gradtruth.verify.checks.gqa_expand import GQA_EXPAND
from gradtruth.verify.checks.graph_stream import GRAPH_STREAM
from gradtruth.verify.checks.head_slice import HEAD_SLICE
from gradtruth.verify.checks.inputs_unchanged import INPUTS_UNCHANGED
from gradtruth.verify.checks.large_offsets import LARGE_OFFSETS
from gradtruth.verify.checks.launch_limits import LAUNCH_LIMITS
from gradtruth.verify.checks.lse_contract import LSE_CONTRACT
from gradtruth.verify.checks.mask_equivalents import MASK_EQUIVALENTS
from gradtruth.verify.checks.outside_unchanged import OUTSIDE_UNCHANGED
from gradtruth.verify.checks.poisoned_memory import POISONED_MEMORY
from gradtruth.verify.checks.shielded import SHIELDED
from gradtruth.verify.checks.shift_invariance import SHIFT_INVARIANCE
from gradtruth.verify.checks.strides import STRIDES
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
    CONSERVATION,
    BATCH_SLICE,
    BATCH_PERMUTATION,
    HEAD_SLICE,
    GQA_EXPAND,
    MASK_EQUIVALENTS,
    TILE_MERGE,
    SHIFT_INVARIANCE,
    LSE_CONTRACT,
    DROPOUT_CONSISTENCY,
    EXACT_ZEROS,
    SHIELDED,
    STRIDES,
    INPUTS_UNCHANGED,
    OUTSIDE_UNCHANGED,
    AUTOGRAD_CONTRACT,
    DETERMINISM,
    CALL_ORDER,
    POISONED_MEMORY,
    ALLOCATOR_CHURN,
    GRAPH_STREAM,
    COMPILE_EQUALS_EAGER,
    LAUNCH_LIMITS,
    LARGE_OFFSETS,
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
