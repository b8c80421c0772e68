"""Replacing functions wherever they are referenced, and undoing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

__all__ = ["Patches"]

Function = Callable[..., Any]


class Patches:
    """Functions that were replaced.

    Args:
        bare: what is put back in place of an original: that without replacements that were undone since.
    """

    def __init__(self, bare: Callable[[Function], Function]) -> None:
        self._bare = bare
        self._undo: list[tuple[Any, str, Function, Function]] = []
        self._shared: list[tuple[Function, Function]] = []

    def everywhere(self, replaced: list[tuple[Function, Function]]) -> None:
        """Put replacements in the namespace of every module that is loaded, under whatever name.

        Args:
            replaced: (original, replacement) of each function.
        """
        self._shared += replaced
        for module, name, (original, replacement) in _holders(replaced):
            setattr(module, name, replacement)
            self._undo.append((module, name, original, replacement))

    def put(self, owner: Any, name: str, replacement: Function) -> None:
        """One attribute of a module or class, or one entry of a dict."""
        original = _space(owner)[name]
        _set(owner, name, replacement)
        self._undo.append((owner, name, original, replacement))

    def undo(self) -> None:
        """Put back what is still replaced, also in modules that were loaded since.

        What somebody else has replaced since stays.
        """
        for owner, name, original, replacement in reversed(self._undo):
            if _space(owner).get(name) is replacement:
                _set(owner, name, self._bare(original))
        self._undo.clear()
        reverse = [(replacement, original) for original, replacement in self._shared]
        for module, name, (_, original) in _holders(reverse):
            setattr(module, name, self._bare(original))
        self._shared.clear()


def _holders(
    wanted: list[tuple[Function, Function]],
) -> Iterator[tuple[ModuleType, str, tuple[Function, Function]]]:
    """Every (module, name) that holds the first of a pair, and the pair.

    Not in torch._C: torch.compile makes its table of functions from there, once per process, and would for ever
    take the replacement for the function.
    """
    by_id = {id(pair[0]): pair for pair in wanted}
    if not by_id:
        return
    for place, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or f"{place}.".startswith("torch._C."):
            continue
        found = [(name, id(x)) for name, x in list(vars(module).items()) if id(x) in by_id]
        for name, key in found:
            yield module, name, by_id[key]


def _space(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _set(owner: Any, name: str, value: Function) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
