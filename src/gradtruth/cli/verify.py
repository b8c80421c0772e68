"""``gradtruth verify``: captured cases through backends, against the oracle."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gradtruth.backends import ORDER, get
from gradtruth.cli.device import device_of
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.cases.provenance import machine_facts
from gradtruth.verify.engine import steps_of, verify_case
from gradtruth.verify.findings import Row, Run, exit_code
from gradtruth.verify.report.console import print_verification
from gradtruth.verify.report.html import html
from gradtruth.verify.report.jsonl import write_json
from gradtruth.verify.report.markdown import markdown

__all__ = ["verify"]

_REPORTS: dict[str, Callable[[Run], str]] = {".html": html, ".htm": html, ".md": markdown}


def verify(
    files: Annotated[
        list[Path], typer.Argument(metavar="CASE...", help="Case files.", show_default=False)
    ],
    backend: Annotated[str, typer.Option(help=f"all, or one of {', '.join(ORDER)}.")] = "all",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write all rows; a name in .jsonl gives JSON lines."
        ),
    ] = None,
    report_file: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write a report to read: .html or .md."),
    ] = None,
) -> None:
    """Say for which of these cases which backend is right, forward and backward.

    Exit codes: 0 verified, 1 findings, 2 usage, 3 unsupported.
    """
    where = device_of(device)
    backends = [get(name) for name in (ORDER if backend == "all" else (backend,))]
    _check_targets(json_file, report_file, files)
    cases = {name: Case.load(path) for name, path in _names(files).items()}
    rows: list[Row] = []
    with _progress(len(cases) * steps_of(backends)) as advance:
        for name, case in cases.items():
            for event in verify_case(case.to(where), backends, name=name):
                if isinstance(event, Row):
                    rows.append(event)
                else:
                    advance(event)
    run = Run(
        rows=tuple(rows),
        facts=machine_facts(where),
        cases={name: dict(case.provenance) for name, case in cases.items()},
    )
    print_verification(run.rows, sys.stdout)
    if json_file is not None:
        write_json(run, json_file)
    if report_file is not None:
        report_file.write_text(_REPORTS[report_file.suffix](run), encoding="utf-8")
    raise typer.Exit(exit_code(rows, named=backend != "all"))


def _names(files: list[Path]) -> dict[str, Path]:
    """A name per file: its stem, or the whole path where stems are alike."""
    stems = [path.stem for path in files]
    return {
        stem if stems.count(stem) == 1 else str(path): path
        for stem, path in zip(stems, files, strict=True)
    }


def _check_targets(json_file: Path | None, report_file: Path | None, cases: list[Path]) -> None:
    """What would fail after the work, or write over a case, fails before it."""
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


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr while a terminal is there to show it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)

        def advance(what: str) -> None:
            progress.update(task, advance=1, description=what.replace("[", r"\["))

        yield advance
