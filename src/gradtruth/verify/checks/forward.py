"""forward: out, lse and max_logit against the oracle."""

from __future__ import annotations

from collections.abc import Iterator

from gradtruth.verify.checks.check import Check, Judged
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import against_oracle

__all__ = ["FORWARD"]


def _run(subject: Subject) -> Iterator[Judged]:
    """The running maximum stayed 0 after a fully masked block, so rows of large negative logits came out as 0.

    Dao-AILab/flash-attention#2082.
    """
    yield from against_oracle(subject, subject.first.forward, subject.standard.own)


FORWARD = Check("forward", _run)
