"""determinism: two runs give the same bits, idle and under load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import bits, unanswered
from gradtruth.verify.findings import Kind

__all__ = ["DETERMINISM"]


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """29 of 30 runs of a backward that was asked to be deterministic differed in dQ.

    Dao-AILab/flash-attention#2244. Every second run is made under load: products on another stream of a GPU, in another
    thread of a CPU.
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    seen: set[str | None] = set()
    for at in range(subject.repeats):
        loaded = at % 2 == 1
        with _load(subject.case.device, wanted=loaded):
            run = subject.run()
        what = f"the first run, in run {at + 2}{' under load' if loaded else ''}"
        if run.error is not None:
            yield Judged(kind=Kind.RAISED, detail=(f"differs from {what}: {run.error}",))
            return
        for answer in bits(run.tensors, subject.first.tensors, what, "deterministic"):
            if answer.tensor not in seen:
                seen.add(answer.tensor)
                yield answer


@contextmanager
def _load(device: torch.device, *, wanted: bool) -> Iterator[None]:
    """Work beside the call, so that blocks and threads are scheduled in another order."""
    if not wanted:
        yield
    elif device.type == "cuda":
        with _stream(device):
            yield
    elif device.type == "cpu":
        with _thread():
            yield
    else:
        yield


@contextmanager
def _stream(device: torch.device) -> Iterator[None]:
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        x = torch.ones(2048, 2048, device=device)
        for _ in range(8):
            x = (x @ x).clamp_(max=1.0)
    yield
    stream.synchronize()


@contextmanager
def _thread() -> Iterator[None]:
    done = threading.Event()

    def work() -> None:
        x = torch.ones(128, 128)
        while not done.is_set():
            x = (x @ x).clamp_(max=1.0)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        yield
    finally:
        done.set()
        worker.join()


DETERMINISM = Check("determinism", _run)
