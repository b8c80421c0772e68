"""Running a program of the user's as ``python`` would: arguments, ``__main__``, exceptions and exit code its own."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path
from types import TracebackType

from gradtruth.errors import InvalidProblem

__all__ = ["Program"]

_INTERRUPTED = 130
_OURS = (__file__, "<frozen runpy>", runpy.__file__)


class Program:
    """A script or a module with its arguments.

    Args:
        script: path of a file, or of a folder or zip with ``__main__.py``; None for a module.
        module: name of a module or package.
        arguments: what becomes ``sys.argv[1:]``.

    Raises:
        InvalidProblem: not exactly one of script and module, or it is not there.
    """

    def __init__(self, script: str | None, module: str | None, arguments: list[str]) -> None:
        if (script is None) == (module is None):
            raise InvalidProblem("expected a script, or -m and a module")
        if script is not None and not Path(script).exists():
            raise InvalidProblem(f"script is {script!r}, and there is no such file")
        self._script, self._module, self._arguments = script, module, arguments

    def prepare(self) -> None:
        """Let ``sys.path`` and ``sys.argv`` be as ``python`` makes them.

        Raises:
            InvalidProblem: there is no such module.
        """
        first = (
            os.getcwd() if self._script is None else os.path.dirname(os.path.abspath(self._script))
        )
        # In the place of the folder of this command.
        sys.path[:1] = [first]
        sys.argv[:] = [self._script or "-m", *self._arguments]
        if self._module is not None and not _there(self._module):
            raise InvalidProblem(f"--module is {self._module!r}, and there is no such module")

    def run(self) -> int:
        """Run it.

        Returns:
            Its exit code: 1 after an exception, which is shown without the frames of this command.
        """
        try:
            if self._script is not None:
                runpy.run_path(self._script, run_name="__main__")
            else:
                runpy.run_module(str(self._module), run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return _code(end)
        except KeyboardInterrupt as error:
            _show(error)
            return _INTERRUPTED
        except BaseException as error:  # noqa: BLE001 - the program's own, whatever it is
            _show(error)
            return 1
        return 0


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if module.startswith(f"{error.name}.") or module == error.name:
            return False
        raise
    except ValueError:
        return False


def _code(end: SystemExit) -> int:
    """What ``python`` makes of ``sys.exit(...)``."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """As ``python`` shows it, or as the program wants it shown."""
    own = _own(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(own), own)


def _own(traceback: TracebackType | None) -> TracebackType | None:
    """From the first frame that is neither this file's nor runpy's."""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if name not in _OURS:
            return traceback
        traceback = traceback.tb_next
    return None
