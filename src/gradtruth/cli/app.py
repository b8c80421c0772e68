"""The application: its commands, and what becomes of errors."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from typing import Annotated

import torch
import typer

from gradtruth.cli.capture import SETTINGS, capture
from gradtruth.cli.doctor import doctor
from gradtruth.cli.explain import explain
from gradtruth.cli.minimise import minimise
from gradtruth.cli.verify import verify
from gradtruth.errors import CaseFormatError, InvalidProblem, UnsupportedProblem
from gradtruth.verify.cases.provenance import installed_version
from gradtruth.verify.findings import ExitCode

__all__ = ["app", "run"]

# typer brings its own click in newer versions and uses the package in older ones.
_CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="gradtruth",
    help="Attention whose gradients can be trusted, and the instrument that shows whether any attention's can be.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(doctor)
app.command()(verify)
app.command()(minimise)
app.command(context_settings=SETTINGS)(capture)
app.command()(explain)


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print versions and exit.", is_eager=True)
    ] = False,
) -> int:
    if version:
        print(
            f"gradtruth {installed_version('gradtruth')} "
            f"(torch {torch.__version__}, Python {platform.python_version()})"
        )
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(ExitCode.USAGE)
    return ExitCode.VERIFIED


def run(arguments: Sequence[str]) -> int:
    """Run a command line; an error of the user is one line on stderr.

    Returns:
        The exit code.
    """
    try:
        code = app(args=list(arguments), prog_name="gradtruth", standalone_mode=False)
    except _CLICK_ERROR as error:
        return _fail(error.format_message())  # type: ignore[attr-defined] - a click.ClickException
    except UnsupportedProblem as error:
        print(error, file=sys.stderr)
        return ExitCode.UNSUPPORTED
    except OSError as error:
        return _fail(f"{error.filename or 'file'}: {error.strerror or error}")
    except (InvalidProblem, CaseFormatError) as error:
        return _fail(str(error))
    except typer.Abort:
        return 130
    return code or ExitCode.VERIFIED


def _fail(message: str) -> int:
    print(f"gradtruth: error: {' '.join(message.split())}", file=sys.stderr)
    return ExitCode.USAGE
