"""Rows as text, the same words in every report."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gradtruth.verify.findings import SUPPORT, Measured, Row, Verdict

__all__ = [
    "COLUMNS",
    "SUMMARY",
    "cells",
    "conclusion",
    "number",
    "one_line",
    "place",
    "refused_by_all",
    "share",
    "summary",
]

COLUMNS = (
    "case",
    "backend",
    "check",
    "tensor",
    "verdict",
    "rel_l2",
    "budget",
    "used",
    "cosine",
    "norm_ratio",
    "worst",
    "worst_rel_l2",
    "worst_budget",
    "worst_cosine",
    "worst_norm_ratio",
    "kind",
    "detail",
)
_MAIN = ("forward", "backward", "backward-from-oracle")
_OTHERS = "other checks"
SUMMARY = ("case", "backend", *_MAIN, _OTHERS)
_EMPTY = "-"
# The graver hides the milder.
_GRAVITY = (
    Verdict.ERROR,
    Verdict.WRONG,
    Verdict.REFUSES,
    Verdict.RIGHT,
    Verdict.NOT_CLAIMED,
    Verdict.NOT_REACHED,
)


def cells(row: Row) -> tuple[str, ...]:
    """The row's text for each of ``COLUMNS``; what does not apply is "-"."""
    whole, worst = row.whole, row.worst
    return (
        row.case,
        row.backend,
        row.check,
        row.tensor or _EMPTY,
        row.verdict.value,
        number(whole and whole.relative_l2),
        number(whole and whole.budget),
        share(whole and whole.used),
        _fixed(whole and whole.cosine, 6),
        _fixed(whole and whole.norm_ratio, 4),
        place(worst),
        number(worst and worst.relative_l2),
        number(worst and worst.budget),
        _fixed(worst and worst.cosine, 6),
        _fixed(worst and worst.norm_ratio, 4),
        row.kind.value if row.kind else _EMPTY,
        one_line("; ".join(row.detail)) or _EMPTY,
    )


def summary(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """One line per case and backend: the gravest verdict of each main check, and of all others together."""
    found: dict[tuple[str, str], dict[str, Verdict]] = {}
    for row in rows:
        checks = found.setdefault((row.case, row.backend), {})
        own = row.check if row.check in _MAIN else _OTHERS
        for check in (*_MAIN, _OTHERS) if row.check == SUPPORT else (own,):
            before = checks.get(check, row.verdict)
            checks[check] = min(before, row.verdict, key=_GRAVITY.index)
    return [
        (*key, *(checks[check].value if check in checks else _EMPTY for check in SUMMARY[2:]))
        for key, checks in found.items()
    ]


def refused_by_all(rows: Iterable[Row]) -> dict[str, str]:
    """The backends that refuse every case, each with its reason for the first."""
    rows = list(rows)
    taken = {row.backend for row in rows if row.verdict is not Verdict.REFUSES}
    refused: dict[str, str] = {}
    for row in rows:
        if row.backend not in taken:
            refused.setdefault(row.backend, one_line("; ".join(row.detail)) or _EMPTY)
    return refused


def conclusion(rows: Iterable[Row]) -> str:
    """How many rows have which verdict, in one line."""
    verdicts = [row.verdict for row in rows]
    return ", ".join(f"{verdicts.count(verdict)} {verdict.value}" for verdict in Verdict)


def number(value: float | None) -> str:
    """A small positive number: "3.1e-03"."""
    return _EMPTY if value is None else f"{value:.2e}"


def share(value: float | None) -> str:
    """A share of the budget: "0.52x", "3e+06x"."""
    if value is None:
        return _EMPTY
    return f"{value:.2f}x" if value < 1000 else f"{value:.0e}x"


def place(part: Measured | None) -> str:
    """Which (sequence, head): "n1,h3"."""
    if part is None or (part.sequence is None and part.head is None):
        return _EMPTY
    names = [f"n{part.sequence}"] if part.sequence is not None else []
    names += [f"h{part.head}"] if part.head is not None else []
    return ",".join(names)


def one_line(text: str) -> str:
    """The text without line breaks and control characters: it comes from files and from other libraries."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def _fixed(value: float | None, digits: int) -> str:
    if value is None:
        return _EMPTY
    return f"{value:.{digits}f}" if math.isfinite(value) and abs(value) < 1e4 else f"{value:.2e}"
