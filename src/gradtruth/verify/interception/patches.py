"""Replacing functions wherever they are referenced, and undoing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from weakref import WeakSet

__all__ = ["Patches", "bare"]

Function = Callable[..., Any]

_undone: WeakSet[Function] = WeakSet()
"""Replacements that were undone. Others may have taken them for the originals while they were there."""


class Patches:
    """Functions that were replaced, by others that wrap them (``functools.wraps``)."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Function, Function]] = []
        self._shared: dict[int, tuple[Function, Function]] = {}
        self._made: dict[int, Function] = {}

    def knows(self, function: Function) -> bool:
        """Whether this was replaced, or is a replacement."""
        return id(function) in self._shared or self._made.get(id(function)) is function

    def everywhere(self, replaced: list[tuple[Function, Function]]) -> None:
        """Put replacements in the namespace of every module that is loaded, under whatever name.

        Args:
            replaced: (original, replacement) of each function.
        """
        for original, replacement in replaced:
            self._shared[id(original)] = (original, replacement)
            self._made[id(replacement)] = replacement
        for module, name, original, replacement in _holders(replaced):
            setattr(module, name, replacement)
            self._undo.append((module, name, original, replacement))

    def put(self, owner: Any, name: str, replacement: Function) -> None:
        """Replace one attribute of a module or class, or one entry of a dict."""
        original = _space(owner)[name]
        self._made[id(replacement)] = replacement
        _set(owner, name, replacement)
        self._undo.append((owner, name, original, replacement))

    def undo(self) -> None:
        """Put back what is still replaced, also in modules that were loaded since.

        What somebody else has replaced since stays.
        """
        _undone.update(self._made.values())
        for owner, name, original, replacement in reversed(self._undo):
            if _space(owner).get(name) is replacement:
                _set(owner, name, bare(original))
        reverse = [(replacement, original) for original, replacement in self._shared.values()]
        for module, name, _, original in _holders(reverse):
            setattr(module, name, bare(original))
        for kept in (self._undo, self._shared, self._made):
            kept.clear()


def bare(function: Function) -> Function:
    """What a replacement that is undone by now was made of; another function as it is.

    One may be undone before another that was put in front of it, and programs may put back what they had found.
    """
    while function in _undone:
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


def _holders(
    wanted: list[tuple[Function, Function]],
) -> Iterator[tuple[ModuleType, str, Function, Function]]:
    """Every (module, name, first, second) where a module holds the first of a pair under a name.

    Not in torch._C: torch.compile makes its table of functions from there, once per process, and would for ever
    take the replacement for the function.
    """
    by_id = {id(pair[0]): pair for pair in wanted}
    if not by_id:
        return
    for place, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or f"{place}.".startswith("torch._C."):
            continue
        space = vars(module)
        if by_id.keys().isdisjoint(map(id, tuple(space.values()))):
            continue
        found = [(name, id(x)) for name, x in list(space.items()) if id(x) in by_id]
        for name, key in found:
            yield module, name, *by_id[key]


def _space(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _set(owner: Any, name: str, value: Function) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
