"""backward: the gradients, from the backend's own forward, against the oracle."""

from __future__ import annotations

from collections.abc import Iterator

from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import against_oracle

__all__ = ["BACKWARD"]


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """dQ was five times too large at head_dim 256 as soon as the batch held two sequences, forward and loss normal.

    NVIDIA/TransformerEngine#3216.
    """
    backward = subject.first.backward
    if backward is None:
        yield NotReached("its forward gave nothing to start from")
        return
    yield from against_oracle(subject, backward, subject.standard.own)


BACKWARD = Check("backward", _run)
