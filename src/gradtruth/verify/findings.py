"""What a verification finds, as data: rows with one verdict each, and what a run of rows means."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from typing import Any

__all__ = [
    "PROCESS",
    "SUPPORT",
    "ExitCode",
    "Kind",
    "Measured",
    "Row",
    "Run",
    "Verdict",
    "exit_code",
    "row_of_json",
]


class Verdict(StrEnum):
    """The answer of a row."""

    RIGHT = "right"
    WRONG = "WRONG"
    REFUSES = "refuses"
    NOT_CLAIMED = "not claimed"
    NOT_REACHED = "not reached"
    ERROR = "error"


class Kind(StrEnum):
    """What sort of fault a finding is.

    ``VALUE`` beyond the budget, ``NONFINITE`` NaN or Inf where a number belongs, ``NOT_ZERO`` something where
    nothing contributes, ``BITS`` two results that must be equal are not, ``WRITTEN`` memory of others written,
    ``FORM`` a missing tensor or a wrong shape or dtype, ``LAW`` a conservation law, ``RAISED`` an exception.
    """

    VALUE = "value"
    NONFINITE = "nonfinite"
    NOT_ZERO = "nonzero"
    BITS = "bits"
    WRITTEN = "written"
    FORM = "form"
    LAW = "law"
    RAISED = "raised"


SUPPORT = "support"
"""In place of the name of a check, where a backend was only asked."""

PROCESS = "process"
"""In place of the name of a check, where a process did not end well."""


class ExitCode(IntEnum):
    """What the command returns."""

    VERIFIED = 0
    FINDINGS = 1
    USAGE = 2
    UNSUPPORTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A tensor, or its part in one (sequence, head), against the oracle.

    Attributes:
        relative_l2: |got - oracle| / |oracle|; inf where only the oracle is 0.
        cosine, norm_ratio: None where the oracle's norm is not well above rounding.
        used: the largest share of the budget that any part used up; right iff at most 1.
        budget: the relative L2 that was allowed.
        sequence, head: which part, None for the whole tensor.
    """

    relative_l2: float
    cosine: float | None
    norm_ratio: float | None
    used: float
    budget: float
    sequence: int | None = None
    head: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorMap:
    """Relative errors by place.

    Attributes:
        labels: per row "n1,h3".
        step: how many positions of a sequence one column stands for.
        values: per row and column |error| / root mean square of the tensor there; inf where it is no number. A row
            ends where its sequence does.
        left_out: rows beyond the first 64, the ones with the largest errors kept.
    """

    labels: tuple[str, ...]
    step: int
    values: tuple[tuple[float, ...], ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        case, case_id, problem: name of the case, SHA-256 of its file, label of its problem.
        backend: its name.
        check: name of the check, or ``SUPPORT``.
        tensor: out, lse, dq, dk, dv, dbias or dsoftmax_offset; None when the row is about the whole check.
        verdict: the answer.
        kind: of the fault, where there is one.
        whole: the tensor against the oracle.
        worst: the (sequence, head) that used most of its budget.
        heads: all (sequence, head).
        errors: where in the tensor its errors are, of a wrong one.
        detail: reasons of a refusal, text of an error, what is wrong in words.
        seconds: time of the check.
    """

    case: str
    case_id: str
    problem: str
    backend: str
    check: str
    verdict: Verdict
    kind: Kind | None = None
    tensor: str | None = None
    whole: Measured | None = None
    worst: Measured | None = None
    heads: tuple[Measured, ...] = ()
    errors: ErrorMap | None = None
    detail: tuple[str, ...] = ()
    seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as JSON knows it: every field, inf and NaN as text."""
        return {f.name: _encode(getattr(self, f.name)) for f in fields(self)}


def row_of_json(found: dict[str, Any]) -> Row:
    """The inverse of ``Row.to_json``."""
    given = dict(found)
    given["kind"] = None if given["kind"] is None else Kind(given["kind"])
    given["verdict"] = Verdict(given["verdict"])
    for name in ("whole", "worst"):
        given[name] = None if given[name] is None else _measured(given[name])
    given["heads"] = tuple(map(_measured, given["heads"]))
    given["errors"] = None if given["errors"] is None else _error_map(given["errors"])
    given["detail"] = tuple(given["detail"])
    return Row(**given)


def exit_code(rows: Iterable[Row], *, named: bool) -> ExitCode:
    """What the rows mean together.

    Args:
        rows: all rows of a run.
        named: the user named one backend, so its refusal is the answer.
    """
    found = {row.verdict for row in rows}
    if found & {Verdict.WRONG, Verdict.ERROR}:
        return ExitCode.FINDINGS
    if Verdict.RIGHT not in found or (named and Verdict.REFUSES in found):
        return ExitCode.UNSUPPORTED
    return ExitCode.VERIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that a report shows.

    Attributes:
        rows: in the order in which they were found.
        facts: machine and versions.
        cases: provenance per case name.
    """

    rows: tuple[Row, ...]
    facts: dict[str, str | int] = field(default_factory=dict)
    cases: dict[str, dict[str, str | int]] = field(default_factory=dict)


def _encode(value: Any) -> Any:
    if isinstance(value, Measured | ErrorMap):
        return {f.name: _encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_encode(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _measured(found: dict[str, Any]) -> Measured:
    given = dict(found)
    for name in ("relative_l2", "cosine", "norm_ratio", "used", "budget"):
        given[name] = None if given[name] is None else float(given[name])
    return Measured(**given)


def _error_map(found: dict[str, Any]) -> ErrorMap:
    values = tuple(tuple(map(float, line)) for line in found["values"])
    return ErrorMap(**(found | {"labels": tuple(found["labels"]), "values": values}))
