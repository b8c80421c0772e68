"""Looks apart, each in a process of its own: no candidate sees what another left behind, and a crash ends one."""

from __future__ import annotations

import multiprocessing
import signal
from functools import partial
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
) -> Shows:
    """``finding.finder`` with a fresh process for every look.

    The processes are forked from one that has imported this package and done nothing, so a look costs some
    milliseconds more, and on a GPU the start of CUDA. A script that uses it needs ``if __name__ == "__main__":``.

    Args:
        backend: its name.
        checks, tensor, kind: as for ``finder``.
        patience: seconds after which a look is given up; that counts as a process that did not end well.

    Returns:
        A function of calls. Where ``tensor`` is None, a process that did not end well is a finding: it raised.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gradtruth.verify.minimise.apart"])
    ask = partial(_look, backend, tuple(check.name for check in checks), tensor, kind)

    def shows(calls: Calls) -> Finding | None:
        here, there = context.Pipe(duplex=False)
        device = str(calls[-1].device)
        data = [case.to_bytes() for case in calls]
        process = context.Process(target=ask, args=(device, data, there), daemon=True)
        process.start()
        there.close()
        try:
            found = here.recv() if here.poll(patience) else "it was not done in time"
        except EOFError:
            process.join()
            found = f"its process ended with {_ending(process.exitcode)}"
        finally:
            here.close()
            process.kill()
            process.join()
        if not isinstance(found, str):
            return found
        asked = tensor is None and kind in (None, Kind.RAISED)
        return Finding(PROCESS, None, Kind.RAISED, found) if asked else None

    return shows


def _look(
    backend: str,
    checks: tuple[str, ...],
    tensor: str | None,
    kind: Kind | None,
    device: str,
    data: list[bytes],
    answer: Connection,
) -> None:
    """What the process does."""
    calls = tuple(Case.from_bytes(part).to(device) for part in data)
    shows = finder(lambda: get(backend), named(checks), tensor=tensor, kind=kind)
    answer.send(shows(calls))


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
