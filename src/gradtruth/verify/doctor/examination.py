"""An examination: every item of the programme through every backend and check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gradtruth.backends import Backend
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import BACKWARD_FROM_ORACLE, Check
from gradtruth.verify.doctor.programme import Item, case_of
from gradtruth.verify.engine import Event, verify_case
from gradtruth.verify.findings import SUPPORT, Row
from gradtruth.verify.shelf import Shelf
from gradtruth.verify.standard import Standard

__all__ = ["examine", "prepare"]

_HOST = torch.device("cpu")
"""Where results are judged: problems are small, and a GPU is slow at many small steps that the host waits for."""


def examine(
    items: Sequence[Item],
    backends: Sequence[Backend],
    checks: Sequence[Check],
    device: torch.device,
    shelf: Shelf | None = None,
) -> Iterator[Event]:
    """Run the programme.

    A check that makes its own problems is asked once per backend, beside the first item that it supports.

    Args:
        items: of ``PROGRAMME``.
        backends: in the order of the report.
        checks: in the order of the report.
        device: where backends run.
        shelf: where ``prepare`` has put what results are held against.

    Yields:
        A text when a step begins, a row when a verdict is known.
    """
    own = [check for check in checks if check.once]
    others = [check for check in checks if not check.once]
    examined: set[str] = set()
    for item in items if others else ():
        for event in _verified(item, backends, others, device, shelf):
            yield event
            if isinstance(event, Row) and event.check != SUPPORT:
                examined.add(event.backend)
    # Last, for they are dear, and one that breaks the device hides nothing behind it.
    waiting = [backend for backend in backends if backend.name in examined or not others]
    for item in items if own else ():
        if not waiting:
            return
        for event in _verified(item, waiting, own, device, shelf):
            refusal = isinstance(event, Row) and event.check == SUPPORT
            if not (refusal and others):  # told above
                yield event
            if isinstance(event, Row) and not refusal:
                waiting = [backend for backend in waiting if backend.name != event.backend]


def prepare(item: Item, checks: Sequence[Check], device: torch.device, shelf: Shelf) -> None:
    """Compute what the results of an item are held against, and those of every case that checks make of it.

    Args:
        item: of ``PROGRAMME``.
        checks: that will be asked.
        device: where backends will run.
        shelf: one that fills.
    """
    here = device.type == "cpu"
    case = case_of(item.recipe, _HOST)
    standard = _standard(item, case, shelf)
    standard.prepare(yardstick=here, foreign=BACKWARD_FROM_ORACLE in checks)
    for check in checks:
        for key, derived in check.derived(case).items():
            standard.derived(key, derived).prepare(yardstick=here, foreign=False)


def _verified(
    item: Item,
    backends: Sequence[Backend],
    checks: Sequence[Check],
    device: torch.device,
    shelf: Shelf | None,
) -> Iterator[Event]:
    case = case_of(item.recipe, device)
    standard = _standard(item, case, shelf)
    return verify_case(case, backends, name=item.name, checks=checks, standard=standard)


def _standard(item: Item, case: Case, shelf: Shelf | None) -> Standard:
    return Standard(case, where=_HOST, shelf=shelf, name=item.name)
