"""Looks apart, in processes of their own: a crash ends one, and in a fresh one no candidate sees what another left."""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from gradtruth.backends import get
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import Check, named
from gradtruth.verify.findings import PROCESS, Kind
from gradtruth.verify.minimise.finding import Calls, Finding, Shows, finder

__all__ = ["Worker", "finder_apart"]

_PATIENCE = 120.0  # seconds for one look


def finder_apart(
    backend: str,
    checks: tuple[Check, ...],
    *,
    tensor: str | None = None,
    kind: Kind | None = None,
    patience: float = _PATIENCE,
    memory: int | None = None,
    worker: Worker | None = None,
) -> Shows:
    """``finding.finder`` in processes of its own.

    The processes are forked from one that has imported this package and done nothing, so a fresh one costs some
    milliseconds, the import of the backend's library and, on a GPU, the start of CUDA. A script that uses it needs
    ``if __name__ == "__main__":``.

    Args:
        backend: its name.
        checks, tensor, kind, memory: as for ``finder``.
        patience: seconds after which a look is given up; that counts as a process that did not end well.
        worker: who answers all looks: cheap where the start of a process is not, but what one candidate leaves behind,
            later ones see, so ask about the result again without; None is a new process for every look.

    Returns:
        A function of calls. Where ``tensor`` is None, a process that did not end well is a finding: it raised.
    """
    question = _Question(backend, tuple(check.name for check in checks), tensor, kind, memory)

    def shows(calls: Calls) -> Finding | None:
        one = Worker() if worker is None else worker
        found = one.ask(question, calls, patience)
        if worker is None:
            one.end()
        if not isinstance(found, str):
            return found
        asked = tensor is None and kind in (None, Kind.RAISED)
        return Finding(PROCESS, None, Kind.RAISED, found) if asked else None

    return shows


@dataclass(frozen=True, slots=True)
class _Question:
    """What a process is asked about calls."""

    backend: str
    checks: tuple[str, ...]
    tensor: str | None
    kind: Kind | None
    memory: int | None


class Worker:
    """A process that answers one look after the other, about any backend; a new one follows where it dies."""

    def __init__(self) -> None:
        self._running: tuple[BaseProcess, Connection] | None = None

    def ask(self, question: _Question, calls: Calls, patience: float) -> Finding | str | None:
        """The answer; in words how the process ended, where it did."""
        process, here = self._started()
        try:
            here.send((question, str(calls[-1].device), [case.to_bytes() for case in calls]))
            if here.poll(patience):
                return here.recv()
            found = "it was not done in time"
        except (EOFError, ConnectionError):
            process.join()
            found = f"its process ended with {_ending(process.exitcode)}"
        self.end()
        return found

    def end(self) -> None:
        """End the process; the next look starts another."""
        if self._running is not None:
            process, here = self._running
            self._running = None
            here.close()
            process.kill()
            process.join()

    def _started(self) -> tuple[BaseProcess, Connection]:
        if self._running is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["gradtruth.verify.minimise.apart"])
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._running = process, here
        return self._running


def _serve(answers: Connection) -> None:
    """What the process does, until the other end is closed."""
    with suppress(EOFError):
        while True:
            question, device, data = answers.recv()
            answers.send(_answer(question, tuple(Case.from_bytes(x).to(device) for x in data)))


def _answer(question: _Question, calls: Calls) -> Finding | None:
    shows = finder(
        lambda: get(question.backend),
        named(question.checks),
        tensor=question.tensor,
        kind=question.kind,
        memory=question.memory,
    )
    return shows(calls)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
