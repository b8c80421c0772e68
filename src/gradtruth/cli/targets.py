"""Files that a command writes: checked before the work, written after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gradtruth.errors import InvalidProblem
from gradtruth.verify.doctor.matrix import Matrix
from gradtruth.verify.findings import Run
from gradtruth.verify.report.html import html
from gradtruth.verify.report.jsonl import write_json
from gradtruth.verify.report.junit import junit
from gradtruth.verify.report.markdown import markdown

__all__ = ["check_targets", "write_reports"]

_REPORTS: dict[str, Callable[[Run, Matrix | None], str]] = {
    ".html": html,
    ".htm": html,
    ".md": markdown,
    ".xml": lambda run, _: junit(run),
}


def check_targets(json_file: Path | None, report_file: Path | None, cases: list[Path]) -> None:
    """What would fail after the work, or write over a case, fails before it.

    Raises:
        InvalidProblem: a name that no file can be written to, or of a kind that is not known.
    """
    if report_file is not None and report_file.suffix not in _REPORTS:
        raise InvalidProblem(
            f"--report is {str(report_file)!r}, expected a name in {', '.join(_REPORTS)}"
        )
    for option, path in (("--json", json_file), ("--report", report_file)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InvalidProblem(
                f"{option} is {str(path)!r}, expected a file in a folder that exists"
            )
        taken = {case.resolve() for case in cases}
        if option == "--report" and json_file is not None:
            taken.add(json_file.resolve())
        if path is not None and path.resolve() in taken:
            raise InvalidProblem(
                f"{option} is {str(path)!r}, expected a file that is neither a case nor another result"
            )


def write_reports(
    run: Run, json_file: Path | None, report_file: Path | None, found: Matrix | None = None
) -> None:
    """Write what was asked for."""
    if json_file is not None:
        write_json(run, json_file)
    if report_file is not None:
        report_file.write_text(_REPORTS[report_file.suffix](run, found), encoding="utf-8")
