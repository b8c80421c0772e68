"""The subject of a check: a case and a backend, and the runs that checks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from gradtruth.backends import Backend
from gradtruth.core.support import Claims
from gradtruth.core.tensors import Forward
from gradtruth.verify.cases.case import Case
from gradtruth.verify.standard import Standard
from gradtruth.verify.trial import Trial, run_backward, run_forward, support_of

__all__ = ["Run", "Subject"]


@dataclass(frozen=True, slots=True)
class Run:
    """A forward and the backward from it.

    Attributes:
        forward, backward: the two trials; None where the one before it failed.
    """

    forward: Trial
    backward: Trial | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that came back in the right form, by name."""
        found = dict(self.forward.tensors)
        return found if self.backward is None else found | self.backward.tensors

    @property
    def error(self) -> str | None:
        """What was raised, in words."""
        return self.forward.error or (self.backward.error if self.backward else None)


@dataclass(slots=False, eq=False)
class Subject:
    """One backend and one case.

    Attributes:
        case: on the device that it runs on.
        backend: one that supports the case's problem there.
        standard: the case's, shared by all backends.
        repeats: how often a check of chance repeats a call.
        preceding: cases whose calls are made, forward and backward, before every run of the case.
    """

    case: Case
    backend: Backend
    standard: Standard
    repeats: int = 3
    preceding: tuple[Case, ...] = field(default=())

    @cached_property
    def claims(self) -> Claims:
        """What the backend promises for this problem."""
        return self.backend.claims(self.case.problem, self.case.device)

    @cached_property
    def first(self) -> Run:
        """The first run, which checks compare others with."""
        return self.run()

    def run(self, case: Case | None = None) -> Run:
        """A fresh forward and backward, of the case or of another one, on tensors of its own."""
        for before in self.preceding if case is None else ():
            self.run(before)
        case = case or self.case
        forward = run_forward(case, self.backend)
        given = forward.returned
        backward = run_backward(case, self.backend, given) if isinstance(given, Forward) else None
        return Run(forward, backward)

    def supports(self, case: Case) -> str | None:
        """Why the backend does not take another case; None where it does."""
        reasons = support_of(case, self.backend).reasons
        return "; ".join(map(str, reasons)) or None
