"""Files that a command writes: checked before the work, written after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from gradtruth.errors import InvalidProblem
from gradtruth.verify.doctor.matrix import Matrix
from gradtruth.verify.findings import Run
from gradtruth.verify.report.html import html
from gradtruth.verify.report.jsonl import write_json
from gradtruth.verify.report.junit import junit
from gradtruth.verify.report.markdown import markdown

__all__ = ["JSON", "REPORT", "JsonFile", "ReportFile", "check_targets", "write_reports"]

JSON, REPORT = "--json", "--report"

JsonFile = Annotated[
    Path | None,
    typer.Option(JSON, metavar="FILE", help="Write all rows; a name in .jsonl gives JSON lines."),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(REPORT, metavar="FILE", help="Write a report: .html, .md, or .xml for JUnit."),
]

_REPORTS: dict[str, Callable[[Run, Matrix | None], str]] = {
    ".html": html,
    ".htm": html,
    ".md": markdown,
    ".xml": lambda run, _: junit(run),
}


def check_targets(targets: Mapping[str, Path | None], cases: Iterable[Path]) -> None:
    """What would fail after the work, or write over a case, fails before it.

    Args:
        targets: options to the files that they name.
        cases: files that are read.

    Raises:
        InvalidProblem: a name that no file can be written to, that is taken, or for a report of an unknown kind.
    """
    taken = {case.resolve() for case in cases}
    for option, path in targets.items():
        if path is None:
            continue
        if option == REPORT and path.suffix not in _REPORTS:
            raise InvalidProblem(
                f"{option} is {str(path)!r}, expected a name in {', '.join(_REPORTS)}"
            )
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise InvalidProblem(
                f"{option} is {str(path)!r}, expected a file in a folder that exists"
            )
        if path.resolve() in taken:
            raise InvalidProblem(
                f"{option} is {str(path)!r}, expected a file that is neither a case nor another result"
            )
        taken.add(path.resolve())


def write_reports(
    run: Run, json_file: Path | None, report_file: Path | None, found: Matrix | None = None
) -> None:
    """Write what was asked for."""
    if json_file is not None:
        write_json(run, json_file)
    if report_file is not None:
        report_file.write_text(_REPORTS[report_file.suffix](run, found), encoding="utf-8")
