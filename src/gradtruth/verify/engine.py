"""The engine: one case through backends and checks; every answer becomes a row with a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gradtruth.backends import Backend
from gradtruth.core.support import Claims
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import CHECKS, Check, Judged, NotClaimed, NotReached, Subject
from gradtruth.verify.findings import SUPPORT, Kind, Row, Verdict
from gradtruth.verify.lost import lost
from gradtruth.verify.standard import Standard
from gradtruth.verify.trial import support_of

__all__ = ["Event", "find", "steps_of", "unreached", "verify_case"]

Event = Row | str
"""A row, or the name of a step that begins."""


def steps_of(backends: Sequence[Backend], checks: Sequence[Check] = CHECKS) -> int:
    """How many steps ``verify_case`` names at most."""
    return 1 + len(checks) * len(backends)


_LOST = "an error of an earlier call on this GPU, which no later call of a process survives"


def unreached(case: Case, name: str) -> Row:
    """The row of a case that no backend can be asked about, since the GPU is lost (``verify.lost``)."""
    return Row(
        case=name,
        case_id=case.id,
        problem=case.problem.label(),
        backend="oracle",
        check=SUPPORT,
        verdict=Verdict.NOT_REACHED,
        detail=(_LOST,),
    )


def verify_case(
    case: Case,
    backends: Sequence[Backend],
    *,
    name: str,
    checks: Sequence[Check] | Callable[[Backend], Sequence[Check]] = CHECKS,
    preceding: tuple[Case, ...] = (),
    standard: Standard | None = None,
) -> Iterator[Event]:
    """Run a case on its device through backends and checks, and judge what they return.

    The oracle and the yardstick run once. Each run of a backend gets tensors of its own; a backend that raises
    is a finding and ends only its own check.

    Args:
        case: problem, tensors and upstream gradients.
        backends: in the order of the rows.
        name: of the case, for the rows.
        checks: in the order of the rows; a function that says which, where backends differ.
        preceding: cases whose calls precede every call of the case.
        standard: of the case; by default one on its device.

    Yields:
        A text when a step begins, a row when a verdict is known.
    """
    blank = Row(
        case=name,
        case_id=case.id,
        problem=case.problem.label(),
        backend="oracle",
        check=SUPPORT,
        verdict=Verdict.ERROR,
    )
    standard = standard or Standard(case)
    try:
        yield f"{name}: oracle"
        _ = standard.own
    except Exception as error:  # noqa: BLE001 - one case must not hide the others
        yield replace(blank, detail=(_words(error),))
        return
    for backend in backends:
        if lost(case.device):
            yield replace(blank, backend=backend.name, verdict=Verdict.NOT_REACHED, detail=(_LOST,))
            continue
        subject = Subject(case, backend, standard, preceding=preceding)
        asked = checks(backend) if callable(checks) else checks
        yield from _Examination(replace(blank, backend=backend.name), subject, asked).run()


def find(
    case: Case, backend: Backend, check: Check, *, preceding: tuple[Case, ...] = ()
) -> list[Judged]:
    """What one check finds wrong with one backend: empty where nothing is, or where it refuses the case."""
    if not support_of(case, backend).ok:
        return []
    subject = Subject(case, backend, Standard(case), preceding=preceding)
    answers = check.run(subject)
    return [
        answer
        for answer in answers
        if isinstance(answer, Judged) and answer.kind and not _unclaimed(answer, subject.claims)
    ]


@dataclass(frozen=True, slots=True)
class _Examination:
    """One case, one backend."""

    blank: Row
    subject: Subject
    checks: Sequence[Check]

    def run(self) -> Iterator[Event]:
        """All checks, as far as the backend takes the problem."""
        refusal = self._refusal()
        if refusal is not None:
            yield refusal
            return
        foreign = self._foreign_dropout()
        if foreign is not None:
            yield foreign
        broken = False
        for check in self.checks:
            if foreign is not None and not check.any_dropout:
                continue
            if broken and lost(self.subject.case.device):
                row = replace(self.blank, check=check.name, detail=(_LOST,))
                yield replace(row, verdict=Verdict.NOT_REACHED)
                continue
            yield f"{self.blank.case}: {self.blank.backend} {check.name}"
            for row in self._asked(check):
                broken = broken or row.verdict is Verdict.ERROR
                yield row

    def _refusal(self) -> Row | None:
        """Why the backend is not asked."""
        case, backend = self.subject.case, self.subject.backend
        try:
            support = support_of(case, backend)
            if not support.ok:
                reasons = tuple(map(str, support.reasons))
                return replace(self.blank, verdict=Verdict.REFUSES, detail=reasons)
            _ = self.subject.claims
        except Exception as error:  # noqa: BLE001 - that it raises is a finding, whatever it raises
            return replace(self.blank, verdict=Verdict.ERROR, detail=(_words(error),))
        return None

    def _foreign_dropout(self) -> Row | None:
        """That its results are not comparable with the oracle's, which draws the library's own keep mask."""
        case, claims = self.subject.case, self.subject.claims
        if case.problem.spec.dropout_p not in (0.0, 1.0) and not claims.global_dropout:
            text = "global_dropout: it drops other weights than the oracle"
            return replace(self.blank, verdict=Verdict.NOT_CLAIMED, detail=(text,))
        return None

    def _asked(self, check: Check) -> Iterator[Row]:
        """The rows of one check."""
        blank = replace(self.blank, check=check.name)
        device = self.subject.case.device.type
        if check.device is not None and check.device != device:
            reason = f"it needs a {check.device} device, the case is on {device}"
            yield replace(blank, verdict=Verdict.NOT_REACHED, detail=(reason,))
            return
        start = time.perf_counter()
        try:
            answers = list(check.run(self.subject))
        except Exception as error:  # noqa: BLE001 - one check must not hide the others
            yield replace(blank, verdict=Verdict.ERROR, kind=Kind.RAISED, detail=(_words(error),))
            return
        seconds = time.perf_counter() - start
        rows = [self._row(blank, answer) for answer in answers]
        for row in rows or [replace(blank, verdict=Verdict.RIGHT)]:
            yield replace(row, seconds=seconds)

    def _row(self, blank: Row, answer: Judged | NotReached | NotClaimed) -> Row:
        if isinstance(answer, NotReached):
            return replace(blank, verdict=Verdict.NOT_REACHED, detail=(answer.reason,))
        if isinstance(answer, NotClaimed):
            return replace(blank, verdict=Verdict.NOT_CLAIMED, detail=(answer.reason,))
        verdict, detail = Verdict.RIGHT, answer.detail
        if answer.kind is not None:
            verdict = Verdict.ERROR if answer.kind is Kind.RAISED else Verdict.WRONG
            if _unclaimed(answer, self.subject.claims):
                verdict, detail = (
                    Verdict.NOT_CLAIMED,
                    (f"{answer.breaks}: {detail[0]}", *detail[1:]),
                )
        return replace(
            blank,
            verdict=verdict,
            kind=answer.kind,
            tensor=answer.tensor,
            detail=detail,
            whole=answer.whole,
            worst=answer.worst,
            heads=answer.heads,
            errors=answer.errors,
        )


def _unclaimed(answer: Judged, claims: Claims) -> bool:
    return answer.breaks is not None and not getattr(claims, answer.breaks)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
