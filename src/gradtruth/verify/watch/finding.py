"""Finding: one tensor of one attention call of a training run that is wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["Finding", "WrongAttention", "WrongAttentionWarning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One tensor of one call that is wrong.

    Attributes:
        step: of the training, see ``watch``.
        layer: qualified name of the module that made the call, "" outside every module.
        entry: name of the entry point, as in ``interception.table``.
        call: number of the call among those of its layer in its step.
        tensor: out, lse, dq, dk or dv. Where only a law says so, and no probe can tell which: "dq, dk" or "out, dv".
        sequence, head: the worst place; dk and dv have KV heads.
        places: how many (sequence, head) of those that were looked at are wrong.
        text: what was measured, and what is allowed.
        problem: label of the call's problem.
        rank: of the process, None outside a process group.
        case: the file that the call was written to.
    """

    step: int
    layer: str
    entry: str
    call: int
    tensor: str
    sequence: int
    head: int
    places: int
    text: str
    problem: str
    rank: int | None = None
    case: Path | None = None

    def with_case(self, path: Path | None) -> Finding:
        """The same, written to a file."""
        return replace(self, case=path)

    def __str__(self) -> str:
        """One line: when, where, what."""
        rank = "" if self.rank is None else f"rank {self.rank}, "
        more = f" and {self.places - 1} more" if self.places > 1 else ""
        saved = "" if self.case is None else f"; written to {self.case}"
        return (
            f"{rank}step {self.step}, layer {self.layer or 'none'} ({self.entry}): {self.tensor} is wrong in "
            f"sequence {self.sequence}, head {self.head}{more}: {self.text} ({self.problem}){saved}"
        )


class WrongAttention(RuntimeError):
    """An attention call of the training is wrong.

    Attributes:
        finding: which, and how.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class WrongAttentionWarning(UserWarning):
    """An attention call of the training is wrong."""
