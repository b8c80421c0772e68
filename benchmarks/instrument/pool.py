"""The pieces in processes beside each other, each result stored as it comes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.instrument.results import load, merge, save
from benchmarks.instrument.tasks import Task, tasks

__all__ = ["run"]


def work(task: Task) -> tuple[Task, dict[str, Any], float]:
    """One piece in a worker process."""
    start = time.perf_counter()
    return task, task.run(), time.perf_counter() - start


def run(path: Path, parts: Sequence[str], workers: int, seconds: float) -> None:
    """All pieces that are not stored yet, until the time is used up."""
    start, results = time.perf_counter(), load(path)
    left = tasks(results, parts)
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, torch.set_num_threads, (1,)) as pool:
        for at, (task, found, took) in enumerate(pool.imap_unordered(work, left), 1):
            merge(results, task, found)
            save(path, results)
            spent = time.perf_counter() - start
            what = f"{task.part} {task.item} {task.family or ''} {len(task.mutants)}"
            print(f"{spent:.0f} s, {at} of {len(left)}: {what}, {took:.1f} s", flush=True)
            if spent > seconds:
                break
        pool.terminate()
