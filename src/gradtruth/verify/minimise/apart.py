"""Looks apart, in processes of their own: a crash ends one, and in a fresh one no candidate sees what another left."""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from gradtruth.backends import get
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import Check, named
from gradtruth.verify.findings import PROCESS, Kind
from gradtruth.verify.minimise.finding import Calls, Finding, Shows, finder

__all__ = ["finder_apart"]

_PATIENCE = 120.0  # seconds for one look


def finder_apart(
    backend: str,
    checks: tuple[Check, ...],
    *,
    tensor: str | None = None,
    kind: Kind | None = None,
    patience: float = _PATIENCE,
    fresh: bool = True,
    memory: int | None = None,
) -> Shows:
    """``finding.finder`` in processes of its own.

    The processes are forked from one that has imported this package and done nothing, so a fresh one costs some
    milliseconds, the import of the backend's library and, on a GPU, the start of CUDA. A script that uses it needs
    ``if __name__ == "__main__":``.

    Args:
        backend: its name.
        checks, tensor, kind, memory: as for ``finder``.
        patience: seconds after which a look is given up; that counts as a process that did not end well.
        fresh: a new process for every look. Otherwise one answers all, and is replaced where it did not end well:
            cheap where the start is not, but what one candidate leaves behind, later ones see; so ask about the
            result again with a fresh one.

    Returns:
        A function of calls. Where ``tensor`` is None, a process that did not end well is a finding: it raised.
    """
    question = _Question(backend, tuple(check.name for check in checks), tensor, kind, memory)
    workers: list[_Worker] = []  # the one that is kept

    def shows(calls: Calls) -> Finding | None:
        worker = workers.pop() if workers else _Worker(question)
        found = worker.ask(calls, patience)
        if fresh or isinstance(found, str):
            worker.end()
        else:
            workers.append(worker)
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


class _Worker:
    """A process that answers one look after the other."""

    def __init__(self, question: _Question) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["gradtruth.verify.minimise.apart"])
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(question, there), daemon=True)
        self._process.start()
        there.close()

    def ask(self, calls: Calls, patience: float) -> Finding | str | None:
        """The answer; in words how the process ended, where it did."""
        try:
            self._here.send((str(calls[-1].device), [case.to_bytes() for case in calls]))
            return self._here.recv() if self._here.poll(patience) else "it was not done in time"
        except (EOFError, ConnectionError):
            self._process.join()
            return f"its process ended with {_ending(self._process.exitcode)}"

    def end(self) -> None:
        """End the process."""
        self._here.close()
        self._process.kill()
        self._process.join()


def _serve(question: _Question, answers: Connection) -> None:
    """What the process does, until the other end is closed."""
    shows = finder(
        lambda: get(question.backend),
        named(question.checks),
        tensor=question.tensor,
        kind=question.kind,
        memory=question.memory,
    )
    with suppress(EOFError):
        while True:
            device, data = answers.recv()
            answers.send(shows(tuple(Case.from_bytes(part).to(device) for part in data)))


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
