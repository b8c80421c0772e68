"""intercept: entry points replaced while it is open, and calls told to an observer while it is switched on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from gradtruth.verify.interception.call import (
    Answer,
    Call,
    Listener,
    Translation,
    Unseen,
    versions_of,
)
from gradtruth.verify.interception.entry import Entry
from gradtruth.verify.interception.layers import Layers
from gradtruth.verify.interception.patches import Patches, bare
from gradtruth.verify.interception.table import ENTRIES, entry_of
from gradtruth.verify.interception.tap import listen

__all__ = ["Interception", "intercept"]

OnCall = Callable[[Call], Listener | Answer | None]

_on: list[Interception] = []
"""Those that are switched on. Empty nearly always, and then an entry point costs one look at it."""


class _Inside(threading.local):
    """How deep in calls that one interception told: what these call themselves is part of them."""

    depth = 0


class Interception:
    """Open from ``open`` to ``close``; calls are told only while ``on``.

    Args:
        on_call: gets every call; a Listener in return is told the rest about it, ``Answer.INSIDE`` asks for the calls
            that it makes itself.
        root: only calls made by modules of this model; None is every call.
        on_unseen: gets what could not be looked at, once per entry point and reason.
        functions: "module:function" of further functions, called in the words of ``gradtruth.attention``.
    """

    def __init__(
        self,
        on_call: OnCall,
        root: torch.nn.Module | None = None,
        on_unseen: Callable[[Unseen], None] | None = None,
        functions: Sequence[str] = (),
    ) -> None:
        self._on_call, self._on_unseen = on_call, on_unseen
        self._layers = Layers(root)
        self._entries = (*map(entry_of, functions), *ENTRIES)
        self._patches = Patches()
        self._inside = _Inside()
        self._told: set[tuple[str, str]] = set()

    @property
    def on(self) -> bool:
        """Whether calls are told."""
        return self in _on

    def open(self) -> None:
        """Replace the entry points of what is loaded."""
        shared = []
        for entry in self._entries:
            for target in entry.targets():
                original = target.get()
                if self._patches.knows(original):
                    continue
                plain = bare(original)
                replacement = self._wrapped(entry, plain)
                if target.shared:
                    shared += [(one, replacement) for one in {original, plain}]
                else:
                    self._patches.put(target.owner, target.name, replacement)
        self._patches.everywhere(shared)

    def switch(self, on: bool) -> None:  # noqa: FBT001 - its only argument
        """Tell calls from now on, or no more. Entry points that were loaded since are replaced too."""
        if on and not self.on:
            self.open()
            _on.append(self)
        elif not on and self.on:
            _on.remove(self)

    def close(self) -> None:
        """Put every entry point back."""
        self.switch(False)  # noqa: FBT003
        self._patches.undo()

    def _wrapped(self, entry: Entry, original: Callable[..., Any]) -> Callable[..., Any]:
        """The entry point as it was, with an ear in front."""

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            # The compiler takes the first for a constant: it sees the entry point alone, and guards on nothing.
            if torch.compiler.is_compiling() or not _on or self not in _on or self._inside.depth:
                return original(*args, **kwargs)
            return self._told_about(entry, original, args, kwargs)

        return call

    def _told_about(
        self, entry: Entry, original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        layer = self._layers.current()
        if layer is None:
            return original(*args, **kwargs)
        translation, reason = _translated(entry, original, args, kwargs)
        if translation is None:
            self.unseen(Unseen(entry.name, layer, reason))
            return original(*args, **kwargs)
        meaning, operands = translation.meaning, translation.operands
        answer = self._on_call(
            Call(
                entry=entry.name,
                layer=layer,
                meaning=meaning,
                differentiable=torch.is_grad_enabled()
                and any(x.requires_grad for x in operands.values()),
                recomputed=torch._C._current_graph_task_id() != -1,
                versions=versions_of(meaning.inputs),
            )
        )
        if answer is Answer.INSIDE:
            return original(*args, **kwargs)
        self._inside.depth += 1
        try:
            if isinstance(answer, Listener):
                return listen(translation, answer)
            return original(*args, **kwargs)
        finally:
            self._inside.depth -= 1

    def unseen(self, found: Unseen) -> None:
        """Tell what could not be looked at, once."""
        key = (found.entry, found.reason)
        if key not in self._told and self._on_unseen is not None:
            self._told.add(key)
            self._on_unseen(found)


def _translated(
    entry: Entry, original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> tuple[Translation | None, str]:
    """What a call means, or why that cannot be said. A call that is itself wrong says so when it is made."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
        return None, "it is made inside a torch.func transform"
    try:
        return entry.translate(original, args, kwargs), ""
    except (TypeError, ValueError, NotImplementedError, IndexError, RuntimeError) as error:
        return None, " ".join(str(error).split())


@contextmanager
def intercept(
    on_call: OnCall,
    root: torch.nn.Module | None = None,
    on_unseen: Callable[[Unseen], None] | None = None,
    functions: Sequence[str] = (),
) -> Iterator[Interception]:
    """An ``Interception`` that is open and switched on in the block; see there for the arguments."""
    found = Interception(on_call, root, on_unseen, functions)
    found.open()
    found.switch(True)  # noqa: FBT003
    try:
        yield found
    finally:
        found.close()
