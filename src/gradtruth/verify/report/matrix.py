"""The doctor's matrix on the console: checks by backends, then every finding with its advice."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from gradtruth.verify.doctor.matrix import Finding, Matrix
from gradtruth.verify.findings import PROCESS, SUPPORT, Run
from gradtruth.verify.report.cells import conclusion, one_line
from gradtruth.verify.report.console import print_table

__all__ = ["NAMES", "finding_line", "matrix_lines", "notes", "print_matrix", "time_line"]

NAMES = ("backend", "check", "tensor", "kind", "cases", "what", "advice")
_SHOWN_CASES = 3


def print_matrix(found: Matrix, run: Run, stream: TextIO, *, saved: Path | None = None) -> None:
    """Print the matrix, the backends that refuse everything, the findings and how to look at one."""
    names, lines = matrix_lines(found)
    print_table(names, lines, stream)
    for title, columns, rows in notes(found):
        stream.write(f"\n{title[0].lower()}{title[1:]}:\n")
        print_table(columns, rows, stream)
    stream.write(f"\n{len(found.findings)} findings\n")
    if found.findings:
        print_table(NAMES, [finding_line(finding) for finding in found.findings], stream)
    first = next((f for f in found.findings if f.check not in (PROCESS, SUPPORT)), None)
    if first is not None:
        folder = saved or "FOLDER"
        hint = "" if saved else "add --save FOLDER, then: "
        stream.write(
            f"\nto look closer: {hint}gradtruth minimise {folder}/{first.cases[0]}.safetensors "
            f"--backend {first.backend} --check {first.check}\n"
        )
    versions = ", ".join(f"{name} {value}" for name, value in run.facts.items() if name in _FACTS)
    stream.write(f"\n{conclusion(run.rows)}\n{versions}\n")
    if time_line(run):
        stream.write(f"{time_line(run)}\n")


_FACTS = ("device", "gpu", "torch", "cuda", "cudnn", "triton", "gradtruth")


def matrix_lines(found: Matrix) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Names of the columns and lines: one per check, one column per backend that takes something."""
    shown = [at for at, name in enumerate(found.backends) if name not in found.refusals]
    names = ("check", *(found.backends[at] for at in shown))
    lines = [
        (check, *(cells[at] for at in shown))
        for check, cells in zip(found.checks, found.cells, strict=True)
    ]
    refused = ("problems refused", *("{} of {}".format(*found.refused[name]) for name in names[1:]))
    return names, [*lines, refused]


def notes(found: Matrix) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """What the cells leave out, as tables with a title and names of columns; none is empty.

    Backends that refuse every problem, with the commonest reason, and those that were stopped, with where; checks that
    said nothing, with why; guarantees that are not claimed.
    """
    stopped = (found.refusals | found.unfinished).items()
    tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = [
        (
            "Not examined, or not to the end",
            ("backend", "why"),
            [(name, one_line(text)) for name, text in stopped],
        ),
        (
            "Not reached",
            ("check", "backends", "why"),
            [(check, ", ".join(names), one_line(why)) for check, names, why in found.unreached],
        ),
        (
            "Guarantees that are not claimed",
            ("backend", "guarantees"),
            [(name, ", ".join(claims)) for name, claims in found.unclaimed.items()],
        ),
    ]
    return [table for table in tables if table[2]]


def time_line(run: Run) -> str:
    """How long it took; empty where nobody looked."""
    if "seconds" not in run.facts:
        return ""
    compiling = run.facts.get("seconds_compiling", 0)
    return f"{run.facts['seconds']} s, of which compiling {compiling} s"


def finding_line(finding: Finding) -> tuple[str, ...]:
    """A finding as one line of a table."""
    cases = ", ".join(finding.cases[:_SHOWN_CASES])
    more = len(finding.cases) - _SHOWN_CASES
    where = f"{finding.place}: " if finding.place else ""
    return (
        finding.backend,
        finding.check,
        finding.tensor or "-",
        finding.kind.value if finding.kind else "-",
        cases + (f" and {more} more" if more > 0 else ""),
        one_line(where + finding.detail) or "-",
        finding.advice,
    )
