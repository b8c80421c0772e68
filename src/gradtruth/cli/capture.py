"""``gradtruth capture``: run a program, and save its attention calls as case files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gradtruth.cli.script import Program
from gradtruth.errors import InvalidProblem
from gradtruth.verify.capture import Capture
from gradtruth.verify.capture import capture as capturing

__all__ = ["SETTINGS", "capture"]

SETTINGS = {"allow_interspersed_args": False}
"""Of the command: what follows the script is the script's."""


def capture(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT] [--] [ARGS]...",
            help="The script and what it gets; with -m, only what the module gets, after --.",
            show_default=False,
        ),
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", "--module", metavar="NAME", help="Run a module instead.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where case files go.")
    ] = Path("captured"),
    layer: Annotated[
        str | None,
        typer.Option(
            help="Names, patterns (*.layers.3.*) or indices in the order of first calls (0-3), by commas."
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(help="Steps, as 0,10-20,100-:50; one ends when the optimizer has stepped."),
    ] = None,
    call: Annotated[
        str | None,
        typer.Option(help="Numbers of a call among those of its layer in its step, in that form."),
    ] = None,
    rank: Annotated[
        str | None, typer.Option(help="Ranks of torch.distributed, in that form.")
    ] = None,
    entry: Annotated[
        str | None, typer.Option(help="Patterns of entry points, as *scaled_dot_product_attention.")
    ] = None,
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Of all files of a process, as 500MB or 2GiB.")
    ] = "1GiB",
    max_cases: Annotated[int, typer.Option(metavar="N", help="Files of a process.")] = 100,
    forward_only: Annotated[
        bool,
        typer.Option(
            "--forward-only", help="Save calls without a backward too, with a dout that is made."
        ),
    ] = False,
    prefix: Annotated[str, typer.Option(help="Head of the files' names.")] = "",
    function: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="A further function to see, called in the words of gradtruth.attention.",
        ),
    ] = None,
    this_rank: Annotated[
        int | None, typer.Option(metavar="N", help="The rank, where torch.distributed knows none.")
    ] = None,
    eager: Annotated[
        bool,
        typer.Option("--eager", help="Switch torch.compile off: what it compiled is not seen."),
    ] = False,
    listing: Annotated[
        bool, typer.Option("--list", help="Write nothing; list the layers and their calls.")
    ] = False,
) -> None:
    """Run SCRIPT and save its attention calls, each with the gradient that came for it, as case files.

    What is saved and what is not and why is said on stderr. Exit code: that of the script; 2 usage.
    """
    program = _program(module, list(arguments or ()))
    program.prepare()
    captured = capturing(
        None if listing else out,
        layer=layer,
        step=step,
        call=call,
        rank=rank,
        entry=entry,
        max_bytes=max_bytes,
        max_cases=max_cases,
        forward_only=forward_only,
        prefix=prefix,
        functions=tuple(function or ()),
        this_rank=this_rank,
    )
    captured.quiet = True
    before = _compiled_graphs()
    with _stance(eager), captured:
        code = program.run()
    _say(captured, listing, _compiled_graphs() - before)
    raise typer.Exit(code)


def _program(module: str | None, arguments: list[str]) -> Program:
    """The program; a "--" behind the script separates, it is not passed on."""
    if module is not None:
        return Program(None, module, arguments)
    if not arguments:
        raise InvalidProblem("expected a script, or -m and a module")
    script, *rest = arguments
    return Program(script, None, rest[1:] if rest[:1] == ["--"] else rest)


@contextlib.contextmanager
def _stance(eager: bool) -> Iterator[None]:
    if not eager:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _say(captured: Capture, listing: bool, compiled: int) -> None:
    """What was seen, on stderr: stdout is the program's."""
    lines = captured.summary().splitlines()
    if compiled:
        lines.append(
            f"torch.compile compiled {compiled} graphs; attention in them is not seen: use --eager"
        )
    sys.stdout.flush()
    for line in lines:
        print(f"gradtruth capture: {line}", file=sys.stderr)
    if listing:
        print(captured.tally.table(), file=sys.stderr)


def _compiled_graphs() -> int:
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
