"""Strict reading of canonical strings: whatever the text holds, the answer is a dict or InvalidProblem."""

from __future__ import annotations

import json
import reprlib
from typing import Any

from gradtruth.errors import InvalidProblem

__all__ = ["json_object", "shown"]

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 200


def shown(value: object) -> str:
    """``repr`` for an error message: short, and safe for values that are nested without end."""
    return _SHORT.repr(value)


def json_object(name: str, text: object) -> dict[str, Any]:
    """The object that a JSON text holds.

    Args:
        name: what the text is, for the message.
        text: the text, of any origin.

    Raises:
        InvalidProblem: not a string, not JSON, nested too deep, a number without end, a name that stands
            twice, or something else than an object.
    """
    if not isinstance(text, str):
        raise InvalidProblem(f"{name} is {shown(text)}, expected a string with a JSON object")
    try:
        found: Any = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        reason = shown(str(error))
        raise InvalidProblem(
            f"{name} is {shown(text)}, expected a JSON object: {reason}"
        ) from error
    if not isinstance(found, dict):
        raise InvalidProblem(f"{name} is {shown(text)}, expected a JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found
