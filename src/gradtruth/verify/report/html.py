"""HTML: one file to read in a browser, without scripts and without anything from the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradtruth.verify.doctor.matrix import Matrix
from gradtruth.verify.findings import ErrorMap, Measured, Row, Run
from gradtruth.verify.report.cells import (
    COLUMNS,
    SUMMARY,
    cells,
    conclusion,
    number,
    place,
    share,
    summary,
)
from gradtruth.verify.report.matrix import NAMES, finding_line, matrix_lines, notes

__all__ = ["html"]

_MAX_BARS = 256
_HEIGHT = 48.0
_BAR = 7
_SQUARE = 9
_MARGIN = 60  # for the names of the lines of a heat map
_MAX_HEATS = 40
_DECADES = 2.0  # the scale of the bars runs from 1e-2 to 1e+2 of the budget


@dataclass(frozen=True, slots=True)
class _Bar:
    """One (sequence, head) of a chart."""

    x: int
    y: float
    height: float
    over: bool
    title: str


@dataclass(frozen=True, slots=True)
class _Chart:
    """How much of its budget each (sequence, head) of a row used."""

    title: str
    over: bool
    width: int
    bars: Sequence[_Bar]
    left_out: int


@dataclass(frozen=True, slots=True)
class _Cell:
    """One square of a heat map."""

    x: int
    y: int
    color: str
    title: str


@dataclass(frozen=True, slots=True)
class _Heat:
    """Where in a wrong tensor its errors are."""

    title: str
    width: int
    height: int
    labels: Sequence[tuple[int, str]]
    cells: Sequence[_Cell]
    left_out: int


def html(run: Run, found: Matrix | None = None) -> str:
    """The run as one HTML page.

    Args:
        run: rows and facts.
        found: the doctor's matrix, to stand first.

    Raises:
        ModuleNotFoundError: jinja2 is not installed.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("gradtruth.verify.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    problems = {row.case: (row.problem, row.case_id) for row in run.rows}
    return environment.get_template("template.html.j2").render(
        conclusion=conclusion(run.rows),
        summary_names=SUMMARY,
        summary=summary(run.rows) if found is None else [],
        names=COLUMNS,
        rows=[cells(row) for row in run.rows if found is None or row.kind],
        charts=[_chart(row) for row in run.rows if row.heads and (found is None or row.kind)],
        heats=[_heat(row, row.errors) for row in run.rows if row.errors][:_MAX_HEATS],
        matrix=None if found is None else matrix_lines(found),
        finding_names=NAMES,
        findings=[] if found is None else [finding_line(finding) for finding in found.findings],
        notes=[] if found is None else notes(found),
        problems=problems,
        run=run,
        height=_HEIGHT,
    )


def _chart(row: Row) -> _Chart:
    shown = row.heads
    if len(shown) > _MAX_BARS:
        shown = sorted(shown, key=lambda part: _order(part.used), reverse=True)[:_MAX_BARS]
    return _Chart(
        title=f"{row.case}: {row.backend} {row.check} {row.tensor}, {row.verdict.value}",
        over=any(not part.used <= 1 for part in row.heads),
        width=_BAR * len(shown),
        bars=[_bar(at, part) for at, part in enumerate(shown)],
        left_out=len(row.heads) - len(shown),
    )


def _heat(row: Row, errors: ErrorMap) -> _Heat:
    """One square per (sequence, head) and step of positions, from white (1e-4) to red (1 and more)."""
    squares = [
        _Cell(
            _MARGIN + _SQUARE * column,
            _SQUARE * line,
            _color(value),
            f"{errors.labels[line]}, from position {column * errors.step}: error {number(value)}",
        )
        for line, values in enumerate(errors.values)
        for column, value in enumerate(values)
    ]
    return _Heat(
        title=f"{row.case}: {row.backend} {row.check} {row.tensor}, {errors.step} positions a square",
        width=_MARGIN + _SQUARE * max(map(len, errors.values), default=0),
        height=_SQUARE * len(errors.values),
        labels=[(_SQUARE * (at + 1) - 1, label) for at, label in enumerate(errors.labels)],
        cells=squares,
        left_out=errors.left_out,
    )


def _color(value: float) -> str:
    if not math.isfinite(value):
        return "#000"
    share = (math.log10(min(max(value, 1e-4), 1.0)) + 4.0) / 4.0
    return f"rgb({255 - round(47 * share)}, {round(250 * (1 - share))}, {round(245 * (1 - share))})"


def _order(used: float) -> float:
    return math.inf if math.isnan(used) else used


def _bar(at: int, part: Measured) -> _Bar:
    used = _order(part.used)
    decades = math.log10(min(max(used, 10**-_DECADES), 10**_DECADES))
    height = max(1.0, _HEIGHT * (decades + _DECADES) / (2 * _DECADES))
    title = (
        f"{place(part)}: {share(part.used)} of the budget, relative L2 {number(part.relative_l2)}"
    )
    return _Bar(_BAR * at, round(_HEIGHT - height, 1), round(height, 1), used > 1, title)
