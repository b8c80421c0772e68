"""poisoned_memory: what fresh memory holds before it is written changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from gradtruth.verify.checks.again import same
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import differences, unanswered
from gradtruth.verify.findings import Kind
from gradtruth.verify.memory.filled import filled_memory

__all__ = ["POISONED_MEMORY"]

_LOW, _HIGH = 0x00, 0xFF


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """dk and dv were read from a workspace that nothing had cleared: right in a fresh process, wrong in training.

    NVIDIA/TransformerEngine#2448, #2186. The call is made twice, with every allocation filled with the byte 0x00 and
    with 0xff (NaN in every float), and the results must be the same bits; and the numbers those of the first run.
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    low, high = (_filled(subject, byte) for byte in (_LOW, _HIGH))
    if low.nothing or high.nothing:
        yield NotReached(low.nothing or high.nothing)
        return
    for filled in (low, high):
        if filled.error is not None:
            text = f"with memory of {filled.byte:#04x} ({filled.words}): {filled.error}"
            yield Judged(kind=Kind.RAISED, detail=(text,))
            return
    what = f"the run with memory of 0x00, where it is 0xff ({high.words})"
    found = list(same(subject, high.tensors, low.tensors, what))
    yield from found
    named = {answer.tensor for answer in found}
    rest = {name: tensor for name, tensor in low.tensors.items() if name not in named}
    what = f"the first run, where memory is 0x00 ({low.words})"
    yield from differences(subject, rest, subject.first.tensors, what)


@dataclass(frozen=True, slots=True)
class _Filled:
    """A run with filled memory."""

    byte: int
    tensors: dict[str, Tensor]
    error: str | None
    words: str
    nothing: str


def _filled(subject: Subject, byte: int) -> _Filled:
    """A run with filled memory; without the dispatch mode where the backend does not run under it."""
    found = _once(subject, byte, operators=True)
    return found if found.error is None else _once(subject, byte, operators=False)


def _once(subject: Subject, byte: int, *, operators: bool) -> _Filled:
    with filled_memory(subject.case.device, byte, operators=operators) as how:
        run = subject.run()
    # Copies outside the pool, which then goes.
    tensors = {name: tensor.clone() for name, tensor in run.tensors.items()}
    return _Filled(byte, tensors, run.error, how.words, how.nothing)


POISONED_MEMORY = Check("poisoned_memory", _run)
