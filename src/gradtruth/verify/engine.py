"""The engine: one case through backends, half by half, each tensor against the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradtruth.backends import Backend, get
from gradtruth.core.support import Claims
from gradtruth.core.tensors import Forward
from gradtruth.verify.cases.case import Case
from gradtruth.verify.findings import Measured, Part, Row, Verdict
from gradtruth.verify.trial import Trial, run_backward, run_forward, wanted_of
from gradtruth.verify.truth import budget, oracle
from gradtruth.verify.truth.rounding import Magnitude

__all__ = ["Event", "steps_of", "verify_case"]

Event = Row | str
"""A row, or the name of a step that begins."""

_YARDSTICK = "unfused"
_STEPS_PER_CASE = 2
_STEPS_PER_BACKEND = 3


def steps_of(backends: Sequence[Backend]) -> int:
    """How many steps ``verify_case`` names at most."""
    return _STEPS_PER_CASE + _STEPS_PER_BACKEND * len(backends)


def verify_case(case: Case, backends: Sequence[Backend], *, name: str) -> Iterator[Event]:
    """Run a case on its device through backends and judge what they return.

    The oracle and the yardstick run once. Each run of a backend gets tensors of its own; a backend that raises
    is a finding and ends only its own part.

    Args:
        case: problem, tensors and upstream gradients.
        backends: in the order of the rows.
        name: of the case, for the rows.

    Yields:
        A text when a step begins, a row when a verdict is known.
    """
    blank = Row(
        case=name,
        case_id=case.id,
        problem=case.problem.label(),
        backend="oracle",
        part=Part.SUPPORT,
        verdict=Verdict.ERROR,
    )
    try:
        yield f"{name}: oracle"
        truth = _Truth.of(case)
        yield f"{name}: yardstick"
        yardsticks = _yardsticks(case, truth)
    except Exception as error:  # noqa: BLE001 - one case must not hide the others
        yield replace(blank, detail=(_words(error),))
        return
    for backend in backends:
        yield from _Examination(
            case, replace(blank, backend=backend.name), backend, truth, yardsticks
        ).run()


@dataclass(frozen=True, slots=True)
class _Truth:
    """What the oracle says, per part.

    Attributes:
        given: the oracle's out and lse rounded to the dtypes of a forward.
        values, magnitudes: per part and tensor name.
    """

    given: Forward
    values: Mapping[Part, Mapping[str, Tensor]]
    magnitudes: Mapping[Part, Mapping[str, Magnitude]]

    @staticmethod
    def of(case: Case) -> _Truth:
        """Ask the oracle: forward and backward, and the backward from its own rounded out and lse."""
        problem, inputs, wanted = case.problem, case.inputs, wanted_of(case)
        common = (problem, inputs, case.dout, case.dlse, wanted)
        forward, grads = oracle.evaluate(*common, device=case.device)
        given = Forward(
            out=forward.out.to(problem.torch_dtype),
            lse=forward.lse.to(problem.accumulate_dtype),
        )
        foreign = oracle.backward(*common, forward=(given.out, given.lse), device=case.device)
        found = {Part.FORWARD: forward, Part.BACKWARD: grads, Part.FOREIGN: foreign}
        return _Truth(
            given,
            {part: dict(result.items()) for part, result in found.items()},
            {part: result.magnitudes for part, result in found.items()},
        )


def _yardsticks(case: Case, truth: _Truth) -> dict[Part, dict[str, Tensor]]:
    """What the yardstick returns, per part; NaN, which allows nothing, where it fails."""
    backend = get(_YARDSTICK)
    forward = run_forward(case, backend)
    trials = {Part.FORWARD: forward, Part.FOREIGN: run_backward(case, backend, truth.given)}
    if isinstance(forward.returned, Forward):
        trials[Part.BACKWARD] = run_backward(case, backend, forward.returned)
    return {
        part: {
            name: trials[part].tensors.get(name, torch.full_like(value, torch.nan))
            if part in trials
            else torch.full_like(value, torch.nan)
            for name, value in values.items()
        }
        for part, values in truth.values.items()
    }


@dataclass(frozen=True, slots=True)
class _Examination:
    """One case, one backend."""

    case: Case
    blank: Row
    backend: Backend
    truth: _Truth
    yardsticks: Mapping[Part, Mapping[str, Tensor]]

    def run(self) -> Iterator[Event]:
        """All parts, as far as the backend gets."""
        yield self._step(Part.FORWARD)
        claims = self._claims()
        if isinstance(claims, Row):
            yield claims
            return
        if self.case.problem.spec.dropout_p not in (0.0, 1.0) and not claims.global_dropout:
            yield self._row(
                Part.SUPPORT,
                Verdict.NOT_CLAIMED,
                "global_dropout: it drops other weights than the oracle",
            )
            return
        forward = run_forward(self.case, self.backend)
        yield from self._judge(Part.FORWARD, forward)
        yield self._step(Part.BACKWARD)
        if isinstance(forward.returned, Forward):
            trial = run_backward(self.case, self.backend, forward.returned)
            yield from self._judge(Part.BACKWARD, trial)
        yield self._step(Part.FOREIGN)
        if claims.foreign_lse:
            trial = run_backward(self.case, self.backend, self.truth.given)
            yield from self._judge(Part.FOREIGN, trial)
        else:
            yield self._row(
                Part.FOREIGN, Verdict.NOT_CLAIMED, "foreign_lse: its backward needs its own forward"
            )

    def _step(self, part: Part) -> str:
        return f"{self.blank.case}: {self.backend.name} {part.value}"

    def _claims(self) -> Claims | Row:
        """The claims of a backend that supports the problem, or why there are none."""
        problem, device = self.case.problem, self.case.device
        try:
            support = self.backend.supports(problem, device)
            if not support.ok:
                return self._row(Part.SUPPORT, Verdict.REFUSES, *map(str, support.reasons))
            return self.backend.claims(problem, device)
        except Exception as error:  # noqa: BLE001 - that it raises is a finding, whatever it raises
            return self._row(Part.SUPPORT, Verdict.ERROR, _words(error))

    def _row(self, part: Part, verdict: Verdict, *detail: str) -> Row:
        return replace(self.blank, part=part, verdict=verdict, detail=detail)

    def _judge(self, part: Part, trial: Trial) -> Iterator[Row]:
        """The rows of one run."""
        blank = replace(self.blank, part=part, seconds=trial.seconds)
        if trial.error is not None:
            yield replace(blank, verdict=Verdict.ERROR, detail=(trial.error,))
            return
        for name, text in trial.wrong.items():
            yield replace(blank, tensor=name, verdict=Verdict.WRONG, detail=(text,))
        for name, tensor in trial.tensors.items():
            yield self._compared(replace(blank, tensor=name), tensor)

    def _compared(self, blank: Row, tensor: Tensor) -> Row:
        """The row of one tensor."""
        part, name = blank.part, blank.tensor or ""
        rows = budget.compare(
            self.case.problem,
            self.case.inputs,
            name,
            tensor,
            self.truth.values[part][name],
            self.truth.magnitudes[part][name],
            self.yardsticks[part][name],
        )
        if not rows:
            return replace(blank, verdict=Verdict.RIGHT, detail=("it has no elements",))
        found = budget.summarise(rows)
        wrong = [row for row in rows if not row.passed]
        detail = (found.worst.finding,) if wrong else ()
        if len(wrong) > 1:
            detail += (f"{len(wrong)} of {len(rows)} (sequence, head) are wrong",)
        return replace(
            blank,
            verdict=Verdict.WRONG if wrong else Verdict.RIGHT,
            whole=_measured(found.norms, found.worst.used),
            worst=_measured_part(found.worst),
            heads=tuple(map(_measured_part, rows)),
            detail=detail,
        )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _measured_part(row: budget.Row) -> Measured:
    return _measured(row.norms, row.used, row.sequence, row.head)


def _measured(
    norms: budget.Norms, used: float, sequence: int | None = None, head: int | None = None
) -> Measured:
    return Measured(
        relative_l2=norms.relative_l2,
        cosine=norms.cosine,
        norm_ratio=norms.norm_ratio,
        used=used,
        budget=norms.budget,
        sequence=sequence,
        head=head,
    )
