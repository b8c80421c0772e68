"""The console: rich tables on a terminal, aligned lines that survive grep everywhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from gradtruth.verify.findings import Row, Verdict
from gradtruth.verify.report.cells import (
    COLUMNS,
    SUMMARY,
    cells,
    conclusion,
    refused_by_all,
    summary,
)

__all__ = ["print_table", "print_verification"]

_STYLES = {
    Verdict.RIGHT.value: "green",
    Verdict.WRONG.value: "bold red",
    Verdict.ERROR.value: "bold red",
    Verdict.REFUSES.value: "yellow",
    Verdict.NOT_CLAIMED.value: "dim",
}
_GAP = "  "
_FOLDED = "detail"
_FOLDED_WIDTH = 16
_DISPENSABLE = (
    "worst_norm_ratio",
    "worst_cosine",
    "worst_budget",
    "worst_rel_l2",
    "budget",
    "norm_ratio",
    "case",
    "cosine",
    "worst",
    "rel_l2",
)


def print_verification(rows: Sequence[Row], stream: TextIO) -> None:
    """Print every row, a summary per case and backend, and how many have which verdict.

    Backends that refuse every case get one line each, with the reason of the first, below the summary.
    """
    refused = refused_by_all(rows)
    shown = [row for row in rows if row.backend not in refused]
    if shown:
        print_table(COLUMNS, [cells(row) for row in shown], stream)
        stream.write("\n")
        print_table(SUMMARY, summary(shown), stream)
        stream.write("\n")
    if refused:
        stream.write("refuse every case:\n")
        print_table(("backend", "why"), refused.items(), stream)
        stream.write("\n")
    stream.write(f"{conclusion(rows)}\n")


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

    console = Console(file=stream)
    kept, left_out = _fitting(names, lines, console.width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for at in kept:
        table.add_column(names[at], no_wrap=names[at] != _FOLDED, overflow="fold")
    for line in lines:
        table.add_row(*(Text(line[at], style=_STYLES.get(line[at], "")) for at in kept))
    console.print(table)
    if left_out:
        text = f"no room for {', '.join(left_out)}: use a wider terminal, a pipe or a report"
        console.print(Text(text, style="dim"))


def _fitting(
    names: Sequence[str], lines: Sequence[Sequence[str]], width: int
) -> tuple[list[int], list[str]]:
    """Which columns a terminal has room for, and the names of those that it has not.

    Columns that say nothing go first, then the ones that one can do without.
    """
    kept = [at for at in range(len(names)) if any(line[at] != "-" for line in lines)]
    left_out: list[str] = []

    def needed() -> int:
        widths = (
            _FOLDED_WIDTH
            if names[at] == _FOLDED
            else max(len(names[at]), *(len(line[at]) for line in lines))
            for at in kept
        )
        return sum(width + len(_GAP) + 1 for width in widths)

    for name in _DISPENSABLE:
        if needed() <= width:
            break
        at = names.index(name) if name in names else -1
        # With several cases a row must say which is its own.
        if at in kept and (name != "case" or len({line[at] for line in lines}) == 1):
            kept.remove(at)
            left_out.append(name)
    return kept, left_out
