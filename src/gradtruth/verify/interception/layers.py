"""Which layer makes a call: read from the Python stack, so that modules need no hook."""

from __future__ import annotations

import sys
import weakref
from types import FrameType

from torch.nn import Module

__all__ = ["Layers"]


class Layers:
    """Names of the modules of a model, or of whatever model is running.

    Args:
        root: the model; None names every module by the outermost one that is on the stack.
    """

    def __init__(self, root: Module | None) -> None:
        self._root = None if root is None else weakref.ref(root)
        self._names: weakref.WeakKeyDictionary[Module, str] = weakref.WeakKeyDictionary()

    def current(self) -> str | None:
        """Qualified name of the innermost module on the stack; the model's own is its class.

        Returns:
            "" outside every module; None outside the model, where one was given.
        """
        stack = _modules(sys._getframe(1))
        if self._root is None:
            return self._name(stack[0], stack[-1]) if stack else ""
        root = self._root()
        if root is None:
            return None
        for module in stack:
            found = self._name(module, root)
            if found is not None:
                return found
        return None

    def _name(self, module: Module, root: Module) -> str | None:
        if module not in self._names:
            self._names.update(
                (found, name or type(root).__name__) for name, found in root.named_modules()
            )
        return self._names.get(module)


def _modules(frame: FrameType | None) -> list[Module]:
    """The modules whose methods are running, innermost first, each once."""
    found: list[Module] = []
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if isinstance(owner, Module) and (not found or found[-1] is not owner):
                found.append(owner)
        frame = frame.f_back
    return found
