"""An examination: every item of the programme through every backend and check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gradtruth.backends import Backend
from gradtruth.verify.checks import Check
from gradtruth.verify.doctor.programme import Item, case_of
from gradtruth.verify.engine import Event, verify_case
from gradtruth.verify.findings import SUPPORT, Row

__all__ = ["examine"]


def examine(
    items: Sequence[Item],
    backends: Sequence[Backend],
    checks: Sequence[Check],
    device: torch.device,
) -> Iterator[Event]:
    """Run the programme.

    A check that makes its own problems is asked once per backend, beside the first item that it supports.

    Args:
        items: of ``PROGRAMME``.
        backends: in the order of the report.
        checks: in the order of the report.
        device: where everything runs.

    Yields:
        A text when a step begins, a row when a verdict is known.
    """
    own = [check for check in checks if check.once]
    others = [check for check in checks if not check.once]
    examined: set[str] = set()
    for item in items if others else ():
        case = case_of(item.recipe, device)
        for event in verify_case(case, backends, name=item.name, checks=others):
            yield event
            if isinstance(event, Row) and event.check != SUPPORT:
                examined.add(event.backend)
    # Last, for they are dear, and one that breaks the device hides nothing behind it.
    waiting = [backend for backend in backends if backend.name in examined or not others]
    for item in items if own else ():
        if not waiting:
            return
        case = case_of(item.recipe, device)
        for event in verify_case(case, waiting, name=item.name, checks=own):
            refusal = isinstance(event, Row) and event.check == SUPPORT
            if not (refusal and others):  # told above
                yield event
            if isinstance(event, Row) and not refusal:
                waiting = [backend for backend in waiting if backend.name != event.backend]
