"""``gradtruth verify``: captured cases through backends, against the oracle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gradtruth.backends import ORDER, get
from gradtruth.cli.device import device_of
from gradtruth.cli.progress import progress
from gradtruth.cli.targets import (
    JSON,
    REPORT,
    JsonFile,
    ReportFile,
    check_targets,
    write_reports,
)
from gradtruth.verify.cases.case import Case
from gradtruth.verify.cases.provenance import machine_facts
from gradtruth.verify.checks import named
from gradtruth.verify.engine import steps_of, unreached, verify_case
from gradtruth.verify.findings import Row, Run, exit_code
from gradtruth.verify.lost import lost
from gradtruth.verify.report.console import print_verification

__all__ = ["verify"]


def verify(
    files: Annotated[
        list[Path], typer.Argument(metavar="CASE...", help="Case files.", show_default=False)
    ],
    backend: Annotated[
        str,
        typer.Option(
            help=f"all, or some of {', '.join(ORDER)}, or module:function, separated by commas."
        ),
    ] = "all",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    checks: Annotated[
        str,
        typer.Option(
            help="values (against the oracle), quick, all, or names of checks, separated by commas."
        ),
    ] = "values,exact_zeros,conservation",
    json_file: JsonFile = None,
    report_file: ReportFile = None,
) -> None:
    """Say for which of these cases which backend is right, forward and backward.

    Exit codes: 0 verified, 1 findings, 2 usage, 3 unsupported.
    """
    where = device_of(device)
    backends = [get(name) for name in (ORDER if backend == "all" else backend.split(","))]
    asked = named(tuple(checks.split(",")))
    check_targets({JSON: json_file, REPORT: report_file}, files)
    cases = {name: Case.load(path) for name, path in _names(files).items()}
    rows: list[Row] = []
    with progress(len(cases) * steps_of(backends, asked)) as advance:
        for name, case in cases.items():
            if lost(where):
                rows.append(unreached(case, name))
                continue
            for event in verify_case(case.to(where), backends, name=name, checks=asked):
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
    write_reports(run, json_file, report_file)
    raise typer.Exit(exit_code(rows, named=backend != "all"))


def _names(files: list[Path]) -> dict[str, Path]:
    """A name per file: its stem, or the whole path where stems are alike."""
    stems = [path.stem for path in files]
    return {
        stem if stems.count(stem) == 1 else str(path): path
        for stem, path in zip(stems, files, strict=True)
    }
