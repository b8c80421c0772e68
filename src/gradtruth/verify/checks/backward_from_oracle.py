"""backward-from-oracle: the gradients from the oracle's out and lse. Wrong here: the backward is, not the forward."""

from __future__ import annotations

from collections.abc import Iterator

from gradtruth.verify.checks.check import Check, Judged, NotClaimed
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import against_oracle
from gradtruth.verify.trial import run_backward

__all__ = ["BACKWARD_FROM_ORACLE"]


def _run(subject: Subject) -> Iterator[Judged | NotClaimed]:
    """The backward took the forward's saved rows of another step, right only beside that very forward.

    huggingface/diffusers#14265: a ring's backward used the keys of step 0 at each step.
    """
    if not subject.claims.foreign_lse:
        yield NotClaimed("foreign_lse: its backward needs its own forward")
        return
    standard = subject.standard
    trial = run_backward(subject.case, subject.backend, standard.given)
    yield from against_oracle(subject, trial, standard.foreign)


BACKWARD_FROM_ORACLE = Check("backward-from-oracle", _run)
