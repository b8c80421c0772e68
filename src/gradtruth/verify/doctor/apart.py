"""Backends examined apart, in processes of their own: one that breaks the device or hangs ends only its own part.

No process ever examines two backends. A backend's programme is cut into a few parts, which are dealt to as many
processes as suit the machine; what results are held against is computed once, before, in processes that run no such
backend.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gradtruth.backends import get
from gradtruth.verify.checks import named
from gradtruth.verify.doctor.deal import Deal
from gradtruth.verify.doctor.programme import PROGRAMME
from gradtruth.verify.doctor.worker import LOST, Part, examine_part, prepare_item
from gradtruth.verify.findings import PROCESS, SUPPORT, Kind, Row, Verdict, row_of_json

__all__ = ["Apart", "Examined", "examine_apart", "parts_of", "steps_apart"]

_PARTS = 3  # of a backend's programme: enough to deal evenly, few enough that the start of a process does not count
_PARTS_ON_A_GPU = {
    "flex": 12,
    "flash_attn_4": 10,
    "flash_attn_3": 4,
    "aten_cudnn_varlen": 4,
    "fla": 4,
    "te_module": 4,
    "te_fused": 4,
    "cudnn": 4,
    "sdpa_flash": 1,
    "sdpa_efficient": 1,
    "sdpa_cudnn": 1,
    "sdpa_nested": 1,
    "flash_attn_2": 2,
    "xformers": 2,
}  # those that compile take most of the time, and the start of a process is long beside those that take few problems
_STOPPED = "it was stopped"
_LOST_WORDS = "an error on the GPU that no later call of a process survives"
_GRACE = 5.0  # seconds for killed processes to be gone
_AT_ONCE = 4  # processes of checks that make problems of their own: they take up to 12 GiB of a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How to examine apart.

    Attributes:
        device: "cuda", "cuda:1", "cpu".
        cases, checks: names.
        jobs: how many processes at once.
        threads: of a process on the CPU; 0 is as many as torch takes.
        patience: seconds for one process.
    """

    device: str
    cases: Sequence[str]
    checks: Sequence[str]
    jobs: int = 4
    threads: int = 0
    patience: float = 600.0


@dataclass(frozen=True, slots=True)
class Examined:
    """The result.

    Attributes:
        rows: in the order of backends, cases and checks.
        compiling: seconds that it would have been done earlier if nothing had been compiled: by how much the
            longest row of processes is longer than the longest without their compilation.
    """

    rows: list[Row]
    compiling: float


def parts_of(backend: str, how: Apart) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """How a backend's programme is cut: cases and checks of each process.

    Cases stay in order, several to a process, so that one call can spoil a later one as it would in training. Checks
    that make problems of their own come last, in a process of their own.
    """
    asked = named(tuple(how.checks))
    own = tuple(check.name for check in asked if check.once)
    others = tuple(check.name for check in asked if not check.once)
    many = _PARTS if how.device == "cpu" else _PARTS_ON_A_GPU.get(backend, _PARTS)
    size = max(1, -(-len(how.cases) // many))
    slices = [tuple(how.cases[at : at + size]) for at in range(0, len(how.cases), size)]
    found = [(cases, others) for cases in slices] if others else []
    return [*found, (tuple(how.cases), own)] if own else found


def examine_apart(backends: Sequence[str], how: Apart) -> Iterator[str | Examined]:
    """Yields a text when a process is done, and at last the result."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        processes = _Processes(how, Path(folder))
        parts = {name: _parts(name, at, how, Path(folder)) for at, name in enumerate(backends)}
        with Deal(how.jobs) as deal, _interruptible(partial(_stop, deal, processes)):
            found, names = _dealt(deal, processes, parts)
            for future in as_completed(names):
                if not future.cancelled():
                    future.result()
                    yield names[future]
            rows = [row for name in backends for row in _told(name, found[name])]
    yield Examined(rows, processes.clock.compiling())


def _stop(deal: Deal, processes: _Processes) -> None:
    deal.close(cancel=True)
    processes.stop()


@contextmanager
def _interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """A ^C stops, so that what is known is told; a second one, as ``timeout`` sends it, changes nothing.

    Args:
        stop: called in a thread of its own, since a handler may find any lock held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: threading.Thread(target=stop).start())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_Found = dict[str, list[Future[list[Row]]]]


def _dealt(
    deal: Deal, processes: _Processes, parts: dict[str, list[Part]]
) -> tuple[_Found, dict[Future[Any], str]]:
    """Deal everything: what is held against first, then those that are cut into most parts, for they take longest.

    Returns:
        Futures of the rows by backend, and of all the name.
    """
    how = processes.how
    shelved = {
        name: deal.add(partial(processes.prepare, name)) for name in _dearest_first(how.cases)
    }
    found: _Found = {name: [] for name in parts}
    order = list(parts)
    # Of those with as many parts the last ones compile, so they begin first.
    for name in sorted(parts, key=lambda name: (len(parts[name]), order.index(name)), reverse=True):
        for part in parts[name]:
            waits = [shelved[case] for case in part.cases]
            may_begin = partial(processes.may_begin, part, waits)
            found[name].append(deal.add(partial(processes.examine, part), may_begin))
    names: dict[Future[Any], str] = {future: name for name, future in shelved.items()}
    names |= {future: name for name, futures in found.items() for future in futures}
    deal.close(cancel=False)
    return found, names


def _parts(backend: str, at: int, how: Apart, folder: Path) -> list[Part]:
    """The parts of a backend, each with a file of its own."""
    return [
        Part(
            backend=backend,
            cases=cases,
            checks=checks,
            device=how.device,
            threads=how.threads,
            folder=folder,
            target=folder / f"{at}-{n}.jsonl",
        )
        for n, (cases, checks) in enumerate(parts_of(backend, how))
    ]


def _told(name: str, futures: list[Future[list[Row]]]) -> list[Row]:
    """The rows of one backend, and that parts of it never began."""
    done = [future for future in futures if not future.cancelled()]
    rows = [row for future in done for row in future.result()]
    if len(done) == len(futures):
        return rows
    missing = f"{len(futures) - len(done)} of {len(futures)} parts of the programme did not begin"
    return [*rows, _end(name, rows, "", (missing, Verdict.NOT_REACHED))]


def steps_apart(backends: Sequence[str], how: Apart) -> int:
    """How many texts ``examine_apart`` yields."""
    return len(how.cases) + sum(len(parts_of(name, how)) for name in backends)


@dataclass(slots=True)
class _Clock:
    """What every row of processes, one after the other, took: (all, compiling) seconds by thread."""

    spent: dict[int, tuple[float, float]] = field(default_factory=dict)

    def add(self, seconds: float, compiling: float) -> None:
        """A process of this thread's row is done."""
        before = self.spent.get(threading.get_ident(), (0.0, 0.0))
        self.spent[threading.get_ident()] = before[0] + seconds, before[1] + compiling

    def compiling(self) -> float:
        """By how much it would have been done earlier without compilation.

        By as much as each row's share of it, where the rest is dealt anew; or where one row is the longest because it
        compiled, by how much it is longer than the longest without compilation.
        """
        if not self.spent:
            return 0.0
        longest = max(whole for whole, _ in self.spent.values())
        tail = longest - max(whole - part for whole, part in self.spent.values())
        return max(tail, sum(part for _, part in self.spent.values()) / len(self.spent))


class _Processes:
    """Runs the processes."""

    def __init__(self, how: Apart, folder: Path) -> None:
        self.how, self.folder, self.clock = how, folder, _Clock()
        self._large: set[Path] = set()
        self._stopped = threading.Event()
        self._alive: set[BaseProcess] = set()
        # Forked from a process that has imported everything and done nothing, so a start costs next to nothing.
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else None
        self._context = multiprocessing.get_context(method)
        if method is not None:
            self._context.set_forkserver_preload(["gradtruth.verify.doctor.worker"])

    def prepare(self, name: str) -> None:
        """Fill the shelf for one item, as far as that goes."""
        start = time.perf_counter()
        self._run(prepare_item, (name, tuple(self.how.checks), self.how.device, self.folder))
        self.clock.add(time.perf_counter() - start, 0.0)

    def may_begin(self, part: Part, waits: list[Future[None]]) -> bool:
        """Whether what it is held against is there, and few others take as much memory; then it is one of these."""
        if not all(shelved.done() for shelved in waits):
            return False
        if not _once(part):
            return True
        # One thread at a time asks, so none comes between.
        free = len(self._large) < _AT_ONCE
        if free:
            self._large.add(part.target)
        return free

    def examine(self, part: Part) -> list[Row]:
        """The rows of one part, those before its process died included."""
        once = _once(part)
        rows: list[Row] = []
        try:
            rest: Part | None = part
            while rest is not None:
                found, rest = self._examined(rest, once=once)
                rows += found
        finally:
            self._large.discard(part.target)
        if once and len(parts_of(part.backend, self.how)) > 1:
            # Refusals are told by the other parts.
            rows = [row for row in rows if row.check != SUPPORT]
        return rows

    def stop(self) -> None:
        """End all processes; what they have written counts."""
        self._stopped.set()
        for process in tuple(self._alive):
            process.kill()

    def _examined(self, part: Part, *, once: bool) -> tuple[list[Row], Part | None]:
        """The rows of one process, and what is left where it died."""
        start = time.perf_counter()
        code = self._run(examine_part, (part,))
        rows, step, compiling = _written(part.target)
        self.clock.add(time.perf_counter() - start, compiling)
        if code == 0:
            return rows, None
        if code is None or self._stopped.is_set():
            # Slow is not wrong: what it was not asked is not reached.
            why = _STOPPED if self._stopped.is_set() else self._late()
            return [*rows, _end(part.backend, rows, step, (why, Verdict.NOT_REACHED))], None
        if code == LOST:
            # The row before says what raised.
            ended = (
                f"{_LOST_WORDS}; what follows on this problem was not asked",
                Verdict.NOT_REACHED,
            )
        else:
            said = part.target.with_suffix(".txt").read_text(encoding="utf-8", errors="replace")
            ended = _last_words(code, said), Verdict.ERROR
        return [*rows, _end(part.backend, rows, step, ended)], _rest(part, step, once=once)

    def _late(self) -> str:
        return f"it was not done after {self.how.patience:g} s"

    def _run(self, target: Callable[..., None], arguments: tuple) -> int | None:
        """The exit code of a process; None where it was not done in time."""
        process = self._context.Process(target=target, args=arguments)
        process.start()
        self._alive.add(process)
        late = time.monotonic() + self.how.patience
        while process.exitcode is None and time.monotonic() < late and not self._stopped.is_set():
            process.join(1.0)
        code = process.exitcode
        process.kill()
        process.join(_GRACE)  # a driver may hold it for longer
        self._alive.discard(process)
        return code


def _once(part: Part) -> bool:
    """Whether its checks make problems of their own."""
    return all(check.once for check in named(part.checks))


def _rest(part: Part, step: str, *, once: bool) -> Part | None:
    """What of a part comes after the problem (for checks with problems of their own: the check) of a step."""
    case, _, asked = step.partition(": ")
    check = asked.rpartition(" ")[2]
    target = part.target.with_name(f"{part.target.stem}+.jsonl")
    if once and check in part.checks:
        checks = part.checks[part.checks.index(check) + 1 :]
        return replace(part, checks=checks, target=target) if checks else None
    if not once and case in part.cases:
        cases = part.cases[part.cases.index(case) + 1 :]
        return replace(part, cases=cases, target=target) if cases else None
    return None


def _dearest_first(names: Sequence[str]) -> list[str]:
    """Cases, those with the most scores first."""
    problems = {item.name: item.recipe.problem for item in PROGRAMME}
    sizes = {
        name: problems[name].num_heads * problems[name].seqlen_q * problems[name].seqlen_kv
        for name in names
    }
    return sorted(names, key=lambda name: -sizes[name])


def _end(name: str, rows: list[Row], step: str, end: tuple[str, Verdict]) -> Row:
    """The row of a process that did not end well, under the case that it was at."""
    case = step.partition(":")[0] or "programme"
    same = next((row for row in rows if row.case == case), None)
    ended, verdict = end
    return Row(
        case=case,
        case_id=same.case_id if same else "",
        problem=same.problem if same else "",
        backend=get(name).name,
        check=PROCESS,
        verdict=verdict,
        kind=Kind.RAISED if verdict is Verdict.ERROR else None,
        detail=(f"its process ended{f' in {step}' if step else ''}: {ended}",),
    )


def _written(target: Path) -> tuple[list[Row], str, float]:
    """The rows, the last step that began, and the seconds of compiling."""
    if not target.exists():
        return [], "", 0.0
    lines = target.read_text(encoding="utf-8").split("\n")[:-1]  # a line that was cut has no end
    found = [json.loads(line) for line in lines]
    steps = [entry for entry in found if isinstance(entry, str)]
    rows = [row_of_json(entry) for entry in found if isinstance(entry, dict)]
    seconds = [entry for entry in found if isinstance(entry, float)]
    return rows, steps[-1] if steps else "", seconds[-1] if seconds else 0.0


def _last_words(code: int, text: str) -> str:
    """The last line that looks like an error, else the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "free()" in line or "error" in line]
    last = (errors or lines or ["it said nothing"])[-1]
    return f"exit code {code}, {last.strip()[:300]}"
