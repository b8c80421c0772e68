"""A finding that is to be kept, and the question whether calls show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradtruth.backends import Backend
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import Check, Judged
from gradtruth.verify.engine import find
from gradtruth.verify.findings import PROCESS, Kind
from gradtruth.verify.minimise.memory import with_memory
from gradtruth.verify.trial import support_of

__all__ = ["Calls", "Finding", "Shows", "finder"]

Calls = tuple[Case, ...]
"""Calls in their order, a forward and a backward each; the last one is the one that is judged."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong.

    Attributes:
        check: name of the check that says so.
        tensor: where; None where the call as a whole is wrong.
        kind: of the fault.
        detail: in words, with numbers; another detail is the same finding.
        memory: the byte that fresh memory held when it showed; None as the allocator hands it out.
    """

    check: str
    tensor: str | None
    kind: Kind
    detail: str = ""
    memory: int | None = None

    def same(self, other: Finding) -> bool:
        """The same fault: check, tensor and kind, and of an error that is raised its type."""
        mine, theirs = ((x.check, x.tensor, x.kind, x._error) for x in (self, other))
        return mine == theirs

    @property
    def _error(self) -> str:
        """The type of the error that a call raised: what a smaller case runs into is often another."""
        raised = self.kind is Kind.RAISED and self.check != PROCESS
        return self.detail.partition(":")[0] if raised else ""

    def __str__(self) -> str:
        where = self.tensor or "the call"
        if self.memory is not None:
            where += f", where fresh memory holds {self.memory:#04x}"
        return f"{self.check}: {where}: {self.kind.value}" + (
            f": {self.detail}" if self.detail else ""
        )


Shows = Callable[[Calls], Finding | None]
"""Whether calls show a finding: the finding, or None."""


def finder(
    make: Callable[[], Backend],
    checks: tuple[Check, ...],
    *,
    tensor: str | None = None,
    kind: Kind | None = None,
    memory: int | None = None,
) -> Shows:
    """The question to a backend.

    Args:
        make: the backend, asked for once per question. A backend with a memory of its own should be a new one
            each time; of one that lives as long as the process, earlier questions are earlier calls.
        checks: asked in this order until one answers.
        tensor: the finding must be in it; None is any, the first one that a check names.
        kind: of the fault; None is any.
        memory: the byte that fresh memory holds in every call; None as the allocator hands it out.
            For checks of values.

    Returns:
        A function of calls. A refusal, of any of the calls, and a check that fails are None.
    """

    def shows(calls: Calls) -> Finding | None:
        backend = with_memory(make(), memory)
        *preceding, case = calls
        if not all(support_of(before, backend).ok for before in preceding):
            return None
        for check in checks:
            for answer in _answers(case, backend, check, tuple(preceding)):
                wanted = (tensor in (None, answer.tensor)) and kind in (None, answer.kind)
                if wanted and answer.kind is not None:
                    text = answer.detail[0] if answer.detail else ""
                    return Finding(check.name, answer.tensor, answer.kind, text, memory)
        return None

    return shows


def _answers(
    case: Case, backend: Backend, check: Check, preceding: tuple[Case, ...]
) -> list[Judged]:
    if check.device not in (None, case.device.type):
        return []
    try:
        return find(case, backend, check, preceding=preceding)
    except Exception:  # noqa: BLE001 - a check that cannot look at a reduced case does not show the finding
        return []
