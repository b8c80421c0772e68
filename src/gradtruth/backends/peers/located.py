"""``module:name`` or ``file.py:name`` to the object that it names."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from gradtruth.errors import InvalidProblem

__all__ = ["located"]

_SHOWN = 8


def located(text: str, argument: str = "backend") -> object:
    """Import and look up. Modules in the current folder are found too, after installed ones.

    Args:
        text: "module:name" or "file.py:name"; a name may have dots.
        argument: what it was given for, for errors.

    Raises:
        InvalidProblem: no such module or name; says what was expected.
    """
    given = f"{argument} is {text!r}, expected"
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise InvalidProblem(f"{given} module:function or file.py:function")
    found: object = _file(given, place) if place.endswith(".py") else _module(given, place)
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n in dir(found) if not n.startswith("_")]
            known = ", ".join(public[:_SHOWN]) + (" ..." if len(public) > _SHOWN else "")
            raise InvalidProblem(
                f"{given} a name in {place}: it has no {part!r}, but {known or 'nothing'}"
            )
        found = getattr(found, part)
    return found


def _module(given: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise InvalidProblem(
                f"{given} a module that can be imported before the colon: {error}"
            ) from error
        raise  # the module is there, and what it needs is not
    except (ValueError, TypeError) as error:
        raise InvalidProblem(
            f"{given} module:function, and {name!r} is no module: {error}"
        ) from error
    finally:
        if added:
            sys.path.remove(here)


def _file(given: str, place: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        raise InvalidProblem(f"{given} a file before the colon: no {place}")
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InvalidProblem(f"{given} a Python file before the colon")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
