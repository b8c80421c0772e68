"""The doctor's matrix on the console: checks by backends, then every finding with its advice."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from gradtruth.verify.doctor.matrix import Finding, Matrix
from gradtruth.verify.findings import PROCESS, SUPPORT, Run
from gradtruth.verify.report.cells import conclusion, one_line
from gradtruth.verify.report.console import print_table

__all__ = ["NAMES", "finding_line", "matrix_lines", "print_matrix", "refusal_lines"]

NAMES = ("backend", "check", "tensor", "kind", "cases", "what", "advice")
_SHOWN_CASES = 3


def print_matrix(found: Matrix, run: Run, stream: TextIO, *, saved: Path | None = None) -> None:
    """Print the matrix, the backends that refuse everything, the findings and how to look at one."""
    names, lines = matrix_lines(found)
    print_table(names, lines, stream)
    refusals = refusal_lines(found)
    if refusals:
        stream.write("\nnot examined, or not to the end:\n")
        print_table(("backend", "why"), refusals, stream)
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


_FACTS = ("device", "gpu", "torch", "cuda", "cudnn", "triton", "gradtruth", "seconds")


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


def refusal_lines(found: Matrix) -> list[tuple[str, str]]:
    """Backends that refuse every problem, with the commonest reason, and those that were stopped, with where."""
    return [(name, one_line(text)) for name, text in (found.refusals | found.unfinished).items()]


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
