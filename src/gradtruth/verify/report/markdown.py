"""Markdown: a report to paste into an issue or a README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradtruth.verify.doctor.matrix import Matrix
from gradtruth.verify.findings import Run
from gradtruth.verify.report.cells import COLUMNS, SUMMARY, cells, conclusion, summary
from gradtruth.verify.report.matrix import NAMES, finding_line, matrix_lines, notes, time_line

__all__ = ["markdown"]


def markdown(run: Run, found: Matrix | None = None) -> str:
    """The run as Markdown: the doctor's matrix and findings or a summary and every row; machine and versions."""
    if found is not None:
        return _examination(run, found)
    problems = dict.fromkeys((row.case, row.problem, row.case_id[:12]) for row in run.rows)
    parts = [
        "# Attention verification",
        conclusion(run.rows),
        _table(SUMMARY, summary(run.rows)),
        "## Cases",
        _table(("case", "problem", "sha256"), problems),
        "## Every tensor",
        "rel_l2 is |got - oracle| / |oracle|; used is the largest share of the measured budget in any (sequence, "
        "head), right up to 1; worst is that (sequence, head).",
        _table(COLUMNS, [cells(row) for row in run.rows]),
        "## Machine",
        _table(("fact", "value"), [(name, str(value)) for name, value in run.facts.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def _examination(run: Run, found: Matrix) -> str:
    parts = ["# Attention examined", conclusion(run.rows), _table(*matrix_lines(found))]
    for title, columns, lines in notes(found):
        parts += [f"## {title}", _table(columns, lines)]
    parts += ["## Findings"]
    lines = [finding_line(finding) for finding in found.findings]
    parts += [_table(NAMES, lines) if lines else "None."]
    why = [(name, str(facts.get("why", ""))) for name, facts in run.cases.items()]
    parts += ["## Problems", _table(("case", "why"), why), "## Machine"]
    parts += [_table(("fact", "value"), [(name, str(value)) for name, value in run.facts.items()])]
    parts += [time_line(run)] if time_line(run) else []
    return "\n\n".join(parts) + "\n"


def _table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [tuple(names), ("---",) * len(names), *lines]
    return "\n".join("| " + " | ".join(map(_escape, row)) + " |" for row in rows)


def _escape(text: str) -> str:
    for mark in ("\\", "|", "*", "`"):
        text = text.replace(mark, f"\\{mark}")
    return text.replace("<", "&lt;")
