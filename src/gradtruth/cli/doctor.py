"""``gradtruth doctor``: which attention on this machine is right, and for what."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from gradtruth.backends import ORDER, Backend, get
from gradtruth.backends.peers.compiling import compiling_seconds, watch_compilers
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
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.provenance import machine_facts
from gradtruth.verify.checks import CHECKS, Check, named
from gradtruth.verify.doctor.apart import Apart, Examined, examine_apart, steps_apart
from gradtruth.verify.doctor.examination import examine
from gradtruth.verify.doctor.matrix import matrix
from gradtruth.verify.doctor.programme import PROGRAMME, Item, case_of
from gradtruth.verify.engine import steps_of
from gradtruth.verify.findings import PROCESS, Row, Run, Verdict, exit_code
from gradtruth.verify.report.matrix import print_matrix

__all__ = ["doctor"]

_MOST_ON_A_GPU = 16
"""Processes; each takes some 600 MiB of the device before it does anything."""


def doctor(
    backend: Annotated[
        str,
        typer.Option(help="all, or names of backends or module:function, separated by commas."),
    ] = "all",
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N; by default a GPU where there is one.")
    ] = "auto",
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A short programme: less than a minute on two cores."),
    ] = False,
    checks: Annotated[
        str, typer.Option(help="all, or names of checks, separated by commas.")
    ] = "all",
    cases: Annotated[
        str, typer.Option(help="all, or names of problems of the programme, separated by commas.")
    ] = "all",
    jobs: Annotated[
        int,
        typer.Option(
            min=-1,
            help="Processes at once, each with a part of one backend's programme; 0 is all in this one. "
            "By default as many as there are cores, up to 16 on a GPU.",
        ),
    ] = -1,
    patience: Annotated[float, typer.Option(min=1, help="Seconds for one process.")] = 600.0,
    list_: Annotated[
        bool, typer.Option("--list", help="Print the programme and its checks, and exit.")
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write a case file for every problem with a finding."),
    ] = None,
    json_file: JsonFile = None,
    report_file: ReportFile = None,
) -> None:
    """Examine every attention backend of this machine, forward and backward, and say what is wrong with which.

    Exit codes: 0 verified, 1 findings, 2 usage, 3 unsupported.
    """
    items = _items(cases, quick=quick)
    asked = CHECKS if checks == "all" else named(tuple(checks.split(",")))
    asked = tuple(check for check in asked if check.quick or not quick)
    if list_:
        _print_programme(items, [check.name for check in asked])
        return
    where = (
        device_of("cuda" if torch.cuda.is_available() else "cpu")
        if device == "auto"
        else device_of(device)
    )
    names = list(ORDER) if backend == "all" else backend.split(",")
    backends = [get(name) for name in names]
    check_targets({JSON: json_file, REPORT: report_file}, [])
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    how = Apart(
        device=str(where),
        cases=[item.name for item in items],
        checks=[check.name for check in asked],
        jobs=jobs,
        patience=patience,
    )
    how = _shared_out(how, where) if jobs < 0 and len(names) > 1 else how
    if how.jobs > 0:
        rows, compiling = _apart(names, items, how)
    else:
        rows, compiling = _together(items, backends, asked, where)
    facts = machine_facts(where)
    facts["seconds"] = round(time.perf_counter() - start)
    facts["seconds_compiling"] = round(compiling)
    run = Run(rows=tuple(rows), facts=facts, cases={item.name: {"why": item.why} for item in items})
    found = matrix(run.rows)
    if save is not None:
        wanted = {case for finding in found.findings for case in finding.cases}
        for item in items:
            if item.name in wanted:
                case_of(item.recipe, where).save(save / f"{item.name}.safetensors")
    print_matrix(found, run, sys.stdout, saved=save)
    write_reports(run, json_file, report_file, found)
    raise typer.Exit(exit_code(rows, named=False))


def _together(
    items: list[Item], backends: list[Backend], checks: tuple[Check, ...], device: torch.device
) -> tuple[list[Row], float]:
    """Rows, and the seconds of compiling."""
    rows: list[Row] = []
    watch_compilers(triton=device.type == "cuda")
    before = compiling_seconds()
    step = ""
    with progress(len(items) * steps_of(backends, checks)) as advance:
        try:
            for event in examine(items, backends, checks, device):
                if isinstance(event, Row):
                    rows.append(event)
                else:
                    step = event
                    advance(event)
        except KeyboardInterrupt:
            # What is known is told.
            rows.append(_stopped(step, rows, backends))
    return rows, compiling_seconds() - before


def _stopped(step: str, rows: list[Row], backends: list[Backend]) -> Row:
    """The row of an examination that was stopped in a step."""
    case, _, asked = step.partition(": ")
    same = next((row for row in rows if row.case == case), None)
    name = asked.rpartition(" ")[0]
    known = any(backend.name == name for backend in backends)
    return Row(
        case=case or "programme",
        case_id=same.case_id if same else "",
        problem=same.problem if same else "",
        backend=name if known else backends[-1].name,
        check=PROCESS,
        verdict=Verdict.NOT_REACHED,
        detail=(f"it was stopped in {step}; what follows was not asked",),
    )


def _shared_out(how: Apart, where: torch.device) -> Apart:
    """As many processes as suit the device."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    jobs = min(cores, _MOST_ON_A_GPU) if where.type == "cuda" else cores
    return replace(how, jobs=jobs, threads=1)


def _apart(names: list[str], items: list[Item], how: Apart) -> tuple[list[Row], float]:
    """Every backend in processes of its own; on a CPU those that refuse everything are only asked why, here."""
    refusing = [] if how.device != "cpu" else [name for name in names if _refuses(name, items)]
    able = [name for name in names if name not in refusing]
    refusals: list[Row] = []
    if refusing:
        checks = named(tuple(how.checks))
        refusals, _ = _together(items, list(map(get, refusing)), checks, torch.device(how.device))
    found = Examined([], 0.0)
    with progress(steps_apart(able, how)) as advance:
        for event in examine_apart(able, how):
            if isinstance(event, str):
                advance(event)
            else:
                found = event
    return [*found.rows, *refusals], found.compiling


def _refuses(name: str, items: list[Item]) -> bool:
    device = torch.device("cpu")
    return not any(get(name).supports(item.recipe.problem, device).ok for item in items)


def _items(cases: str, *, quick: bool) -> list[Item]:
    known = [item for item in PROGRAMME if item.quick or not quick]
    if cases == "all":
        return known
    names = cases.split(",")
    for name in names:
        if name not in [item.name for item in known]:
            raise InvalidProblem(
                f"--cases has {name!r}, expected some of {', '.join(item.name for item in known)}"
            )
    return [item for item in known if item.name in names]


def _print_programme(items: list[Item], checks: list[str]) -> None:
    width = max(len(item.name) for item in items)
    for item in items:
        print(f"{item.name.ljust(width)}  {item.recipe.label()}: {item.why}")
    print(f"\nchecks: {', '.join(checks)}")
