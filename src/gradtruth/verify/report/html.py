"""HTML: one file to read in a browser, without scripts and without anything from the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradtruth.verify.findings import Measured, Row, Run
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

__all__ = ["html"]

_MAX_BARS = 256
_HEIGHT = 48.0
_BAR = 7
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


def html(run: Run) -> str:
    """The run as one HTML page.

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
        summary=summary(run.rows),
        names=COLUMNS,
        rows=[cells(row) for row in run.rows],
        charts=[_chart(row) for row in run.rows if row.heads],
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
