"""Imports: being told when a library with entry points has been loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["Imports"]

_LIBRARIES = (
    "flash_attn", "flash_attn_interface", "transformer_engine", "xformers", "fla",
)  # fmt: skip
_MODULES = ("torch.nn.attention.", "transformers.modeling_utils", "transformers.integrations.")


def _holds_entries(name: str) -> bool:
    if name.partition(".")[0] in _LIBRARIES or name.startswith(_MODULES):
        return True
    return name.startswith("transformers.models.") and ".modeling_" in name


class Imports(MetaPathFinder):
    """While open, calls ``loaded`` after each import of a module that may hold entry points.

    A program that is started from here imports its libraries later, and may keep their functions under names of
    its own: they are replaced before it can.
    """

    def __init__(self, loaded: Callable[[], None]) -> None:
        self._loaded = loaded

    def open(self) -> None:
        """Ask to be told."""
        sys.meta_path.insert(0, self)

    def close(self) -> None:
        """No more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the others find, with a loader that tells."""
        if not _holds_entries(fullname):
            return None
        behind = sys.meta_path.index(self) + 1 if self in sys.meta_path else 0
        for finder in sys.meta_path[behind:]:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is None:
                continue
            if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                spec.loader = _Telling(spec.loader, self._loaded)
            return spec
        return None


class _Telling(Loader):
    """A loader as it was, and a call when it is done. Everything else is the loader's own."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module's loader is its own again: inspect and pkgutil look at it.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then()
