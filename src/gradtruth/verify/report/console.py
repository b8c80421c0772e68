"""The console: rich tables on a terminal, aligned lines that survive grep everywhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from gradtruth.verify.findings import Row, Verdict
from gradtruth.verify.report.cells import COLUMNS, SUMMARY, cells, conclusion, summary

__all__ = ["print_table", "print_verification"]

_STYLES = {
    Verdict.RIGHT.value: "green",
    Verdict.WRONG.value: "bold red",
    Verdict.ERROR.value: "bold red",
    Verdict.REFUSES.value: "yellow",
    Verdict.NOT_CLAIMED.value: "dim",
}
_GAP = "  "


def print_verification(rows: Sequence[Row], stream: TextIO) -> None:
    """Print every row, a summary per case and backend, and how many have which verdict."""
    print_table(COLUMNS, [cells(row) for row in rows], stream)
    stream.write("\n")
    print_table(SUMMARY, summary(rows), stream)
    stream.write(f"\n{conclusion(rows)}\n")


def print_table(names: Sequence[str], lines: Iterable[Sequence[str]], stream: TextIO) -> None:
    """Print a table.

    On a terminal rich draws it. Anywhere else it is one line of text per row, columns aligned, never wrapped
    or cut, without escape codes.
    """
    lines = [tuple(line) for line in lines]
    if stream.isatty():
        _print_rich(names, lines, stream)
        return
    table = [tuple(names), *lines]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        stream.write(_GAP.join(padded).rstrip() + "\n")


def _print_rich(names: Sequence[str], lines: Sequence[Sequence[str]], stream: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    kept = [at for at, name in enumerate(names) if any(line[at] != "-" for line in lines)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at in kept:
        table.add_column(names[at], overflow="fold")
    for line in lines:
        table.add_row(*(Text(line[at], style=_STYLES.get(line[at], "")) for at in kept))
    Console(file=stream).print(table)
