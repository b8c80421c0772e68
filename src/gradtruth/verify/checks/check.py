"""What a check is: a question to one backend about one case, and the forms that its answers have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.findings import ErrorMap, Kind, Measured

__all__ = ["Answer", "Check", "Judged", "NotClaimed", "NotReached"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One thing that was looked at.

    Attributes:
        tensor: its name; None for the call as a whole.
        kind: of the fault; None where it is right.
        breaks: the claim that the fault breaks, a field of ``Claims``. A backend that does not make this claim is
            not wrong. None: the fault is one of values, which no backend may get wrong.
        detail: in words.
        whole, worst, heads: the numbers, where there are some.
        errors: where in a wrong tensor they are.
    """

    tensor: str | None = None
    kind: Kind | None = None
    breaks: str | None = None
    detail: tuple[str, ...] = ()
    whole: Measured | None = None
    worst: Measured | None = None
    heads: tuple[Measured, ...] = ()
    errors: ErrorMap | None = None


@dataclass(frozen=True, slots=True)
class NotReached:
    """The check says nothing about this case, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotClaimed:
    """The check asks for what the backend does not promise: ``reason`` begins with the claim's name."""

    reason: str


def _none(case: Case) -> Mapping[str, Case]:
    """No cases."""
    del case
    return {}


Answer = Judged | NotReached | NotClaimed


@dataclass(frozen=True, slots=True)
class Check:
    """A question.

    Attributes:
        name: in reports and on the command line.
        run: asks it. No answer at all means that everything looked at was right. The docstring of the function
            tells the real fault for which the check exists.
        quick: cheap enough for a first look.
        device: "cuda" where only a GPU has what it looks at.
        once: it makes its own problems, so one case per backend says all.
        any_dropout: it says something where the backend's keep mask is not the library's own.
        derived: the cases that it makes of a case and holds against an oracle of their own, by the key under which
            ``Standard.derived`` keeps it. The same for every backend, so that they can be computed beforehand.
    """

    name: str
    run: Callable[[Subject], Iterable[Answer]]
    quick: bool = True
    device: str | None = None
    once: bool = False
    any_dropout: bool = False
    derived: Callable[[Case], Mapping[str, Case]] = _none

    @property
    def fault(self) -> str:
        """The real fault that it exists for."""
        return (self.run.__doc__ or "").strip()
