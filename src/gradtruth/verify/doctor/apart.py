"""Backends examined apart, each in a process of its own: one that breaks the device or hangs ends only its own part."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from gradtruth.verify.findings import PROCESS, Kind, Row, Verdict, row_of_json

__all__ = ["Apart", "examine_apart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How to examine apart.

    Attributes:
        device: "cuda", "cuda:1", "cpu".
        cases, checks: names.
        jobs: how many processes at once.
        threads: of a process on the CPU; 0 is as many as torch takes.
        patience: seconds for one backend.
    """

    device: str
    cases: Sequence[str]
    checks: Sequence[str]
    jobs: int = 4
    threads: int = 0
    patience: float = 600.0


def examine_apart(backends: Sequence[str], how: Apart) -> Iterator[str | list[Row]]:
    """Yields a text when a backend is done, and at last all rows, in the order of the backends."""
    found: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(how.jobs) as pool:
        futures = {
            pool.submit(_examined, name, Path(folder) / f"{at}.jsonl", how): name
            # The last ones compile, so they begin first.
            for at, name in reversed(list(enumerate(backends)))
        }
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            yield futures[future]
    yield [row for name in backends for row in found[name]]


def _examined(name: str, target: Path, how: Apart) -> list[Row]:
    """The rows of one backend, those before its process died included."""
    command = [sys.executable, "-W", "ignore", "-m", "gradtruth.verify.doctor.worker", str(target)]
    command += [how.device, str(how.threads), name, ",".join(how.cases), ",".join(how.checks)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=how.patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        # Slow is not wrong: what it was not asked is not reached.
        ended, verdict = f"it was not done after {how.patience:g} s", Verdict.NOT_REACHED
    else:
        ended = "" if done.returncode == 0 else _last_words(done.returncode, done.stderr)
        verdict = Verdict.ERROR
    rows, step = _written(target)
    return [*rows, _end(name, rows, step, (ended, verdict))] if ended else rows


def _end(name: str, rows: list[Row], step: str, end: tuple[str, Verdict]) -> Row:
    """The row of a process that did not end well, under the case that it was at."""
    case = step.partition(":")[0] or "programme"
    same = next((row for row in rows if row.case == case), None)
    ended, verdict = end
    return Row(
        case=case,
        case_id=same.case_id if same else "",
        problem=same.problem if same else "",
        backend=next((row.backend for row in rows if row.backend != "oracle"), name),
        check=PROCESS,
        verdict=verdict,
        kind=Kind.RAISED if verdict is Verdict.ERROR else None,
        detail=(f"its process ended{f' in {step}' if step else ''}: {ended}",),
    )


def _written(target: Path) -> tuple[list[Row], str]:
    """The rows, and the last step that began."""
    if not target.exists():
        return [], ""
    lines = target.read_text(encoding="utf-8").split("\n")[:-1]  # a line that was cut has no end
    found = [json.loads(line) for line in lines]
    steps = [entry for entry in found if isinstance(entry, str)]
    rows = [row_of_json(entry) for entry in found if not isinstance(entry, str)]
    return rows, steps[-1] if steps else ""


def _last_words(code: int, text: str) -> str:
    """The last line that looks like an error, else the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "free()" in line or "error" in line]
    last = (errors or lines or ["it said nothing"])[-1]
    return f"exit code {code}, {last.strip()[:300]}"
