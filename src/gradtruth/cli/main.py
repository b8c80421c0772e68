"""The entry point: run a command, and tell errors of the user in one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gradtruth.verify.findings import ExitCode

__all__ = ["main"]

_EXTRA = ("typer", "rich", "jinja2", "matplotlib")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: those of the process when None.

    Returns:
        0 verified, 1 findings, 2 usage, 3 unsupported.
    """
    try:
        from gradtruth.cli.app import run

        return run(sys.argv[1:] if arguments is None else list(arguments))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        print(
            f"gradtruth: error: {error.name} is not installed; pip install gradtruth[tool]",
            file=sys.stderr,
        )
        return ExitCode.USAGE


if __name__ == "__main__":
    sys.exit(main())
