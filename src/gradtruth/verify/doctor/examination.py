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
    seen: set[str] = set()

    def wanted(backend: Backend) -> list[Check]:
        return [check for check in checks if not (check.once and backend.name in seen)]

    for item in items:
        case = case_of(item.recipe, device)
        for event in verify_case(case, backends, name=item.name, checks=wanted):
            yield event
            if isinstance(event, Row) and event.check != SUPPORT:
                seen.add(event.backend)
