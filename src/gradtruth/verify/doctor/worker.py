"""A worker: one backend's examination in a process of its own, every step and row written as soon as it is known.

``python -m gradtruth.verify.doctor.worker FILE DEVICE THREADS BACKEND CASES CHECKS``; cases and checks have
commas between them.
"""

from __future__ import annotations

import json
import sys

import torch

from gradtruth.backends import get
from gradtruth.verify.checks import named
from gradtruth.verify.doctor.examination import examine
from gradtruth.verify.doctor.programme import PROGRAMME
from gradtruth.verify.findings import Row

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Examine one backend and write JSON lines: a text where a step begins, an object for a row."""
    target, device, threads, backend, cases, checks = arguments
    if int(threads):
        torch.set_num_threads(int(threads))
    items = [item for item in PROGRAMME if item.name in cases.split(",")]
    with open(target, "w", encoding="utf-8") as lines:
        for event in examine(
            items, [get(backend)], named(tuple(checks.split(","))), torch.device(device)
        ):
            found = event.to_json() if isinstance(event, Row) else event
            lines.write(json.dumps(found, allow_nan=False) + "\n")
            lines.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
