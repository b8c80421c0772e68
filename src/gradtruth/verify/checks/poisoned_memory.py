"""poisoned_memory: what fresh memory holds before it is written changes no bit."""

from __future__ import annotations

from collections.abc import Iterator

from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Run, Subject
from gradtruth.verify.checks.verdicts import bits, differences, unanswered
from gradtruth.verify.memory.filled import filled_memory

__all__ = ["POISONED_MEMORY"]

_LOW, _HIGH = 0x00, 0xFF


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """dk and dv were read from a workspace that nothing had cleared: right in a fresh process, wrong in training.

    NVIDIA/TransformerEngine#2448, #2186. The call is made twice, with every allocation filled with the byte 0x00 and
    with 0xff (NaN in every float), and the results must be the same bits.
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    runs: list[Run] = []
    for byte in (_LOW, _HIGH):
        with filled_memory(subject.case.device, byte) as how:
            runs.append(subject.run())
        if how.nothing:
            yield NotReached(how.nothing)
            return
    low, high = (run.tensors for run in runs)
    what = f"the run with memory of 0x00, where it is 0xff ({how.words})"
    values = list(differences(subject, high, low, what))
    yield from values
    named = {answer.tensor for answer in values}
    rest = {name: tensor for name, tensor in high.items() if name not in named}
    if subject.claims.deterministic:
        yield from bits(rest, low, what, "pure")


POISONED_MEMORY = Check("poisoned_memory", _run)
