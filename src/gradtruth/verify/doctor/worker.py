"""What the doctor's processes do: each writes what it finds at once, so nothing is lost where it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradtruth.backends import get
from gradtruth.backends.peers.compiling import compiling_seconds, watch_compilers
from gradtruth.verify.checks import named
from gradtruth.verify.doctor.examination import examine, prepare
from gradtruth.verify.doctor.programme import PROGRAMME
from gradtruth.verify.findings import Row, Verdict
from gradtruth.verify.lost import lost
from gradtruth.verify.shelf import Shelf

__all__ = ["LOST", "Part", "examine_part", "prepare_item"]

LOST = 86  # exit code of a process whose GPU answers no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one process examines.

    Attributes:
        backend, cases, checks: names.
        device: "cpu", "cuda", "cuda:1".
        threads: on the CPU; 0 is as many as torch takes.
        folder: of the shelf.
        target: the file that is written; what the process says goes beside it, to a name in .txt.
    """

    backend: str
    cases: tuple[str, ...]
    checks: tuple[str, ...]
    device: str
    threads: int
    folder: Path
    target: Path


def examine_part(part: Part) -> None:
    """Write JSON lines: a text where a step begins, an object for a row, a number for the seconds of compiling."""
    _settle(part.target.with_suffix(".txt"), part.threads)
    device = torch.device(part.device)
    watch_compilers(triton=device.type == "cuda")
    if device.type == "cuda":
        # There are as many processes as cores; helpers of each would only take them from the others.
        import torch._inductor.config as inductor

        inductor.compile_threads = 1
    items = [item for item in PROGRAMME if item.name in part.cases]
    backend, compiled = get(part.backend), 0.0
    with part.target.open("w", encoding="utf-8") as lines:
        for event in examine(items, [backend], named(part.checks), device, Shelf(part.folder)):
            found: list[Any] = [event.to_json() if isinstance(event, Row) else event]
            if compiling_seconds() > compiled:
                compiled = compiling_seconds()
                found.append(compiled)
            lines.writelines(json.dumps(entry, allow_nan=False) + "\n" for entry in found)
            lines.flush()
            if isinstance(event, Row) and event.verdict is Verdict.ERROR and lost(device):
                os._exit(LOST)  # not even tidying up would succeed


def prepare_item(name: str, checks: tuple[str, ...], device: str, folder: Path) -> None:
    """Fill the shelf for one item. What is missing afterwards is computed where it is needed."""
    _settle(folder / f"{name}.txt", 1)
    item = next(item for item in PROGRAMME if item.name == name)
    prepare(item, named(checks), torch.device(device), Shelf(folder, fills=True))


def _settle(said: Path, threads: int) -> None:
    """Send everything that the process says to a file, and leave ^C to the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    with said.open("w", encoding="utf-8") as stream:
        for own in (sys.stdout, sys.stderr):
            own.flush()
            os.dup2(stream.fileno(), own.fileno())
    if threads:
        torch.set_num_threads(threads)
