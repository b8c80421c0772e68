"""Pending: calls whose backward has not come yet."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gradtruth.verify.capture.selection import Place
from gradtruth.verify.interception import Call, Listener

__all__ = ["Pending"]

Arrived = Callable[[Place, Call, Tensor | None, Tensor | None], None]


class _Awaiting(Listener):
    """Holds a call's inputs, as autograd does, until the gradient of its output comes. Later ones are ignored."""

    wants_gradients = False

    def __init__(self, place: Place, call: Call, pending: Pending) -> None:
        self.place = place
        self.call: Call | None = call
        self._pending = pending

    def backward(
        self, dout: Tensor | None, dlse: Tensor | None, grads: Mapping[str, Tensor]
    ) -> None:
        call, self.call = self.call, None
        if call is not None:
            self._pending.told(self, call, (dout, dlse))


class Pending:
    """Listeners that wait. One whose autograd graph dies without a backward is noticed.

    Args:
        arrived: gets place, call, dout and dlse of a call whose backward came.
        keep: keep the inputs of calls whose backward never comes until ``abandoned`` hands them out.
    """

    def __init__(self, arrived: Arrived, *, keep: bool) -> None:
        self._arrived, self._keep = arrived, keep
        self._waiting: dict[int, tuple[weakref.ref[_Awaiting], weakref.finalize]] = {}
        # A finalizer runs at any moment, in any thread: it does nothing but append.
        self._dead: deque[tuple[int, Place, Call | None]] = deque()

    def await_(self, place: Place, call: Call) -> Listener:
        """A listener for this call."""
        found = _Awaiting(place, call, self)
        kept = call if self._keep else None
        dying = weakref.finalize(found, self._dead.append, (id(found), place, kept))
        dying.atexit = False
        self._waiting[id(found)] = (weakref.ref(found), dying)
        return found

    def told(self, listener: _Awaiting, call: Call, gradients: tuple[Any, Any]) -> None:
        """The backward of a listener's call came."""
        _, dying = self._waiting.pop(id(listener), (None, None))
        if dying is not None and dying.detach() is not None:
            self._arrived(listener.place, call, *gradients)

    def abandoned(self) -> list[tuple[Place, Call | None]]:
        """Calls that no backward can come for any more, since this was last asked."""
        found: list[tuple[Place, Call | None]] = []
        while self._dead:
            key, place, call = self._dead.popleft()
            reference, _ = self._waiting.get(key, (None, None))
            if reference is not None and reference() is None:
                # Another listener may live at the address by now.
                del self._waiting[key]
            found.append((place, call))
        return found

    def close(self) -> list[tuple[Place, Call | None]]:
        """Wait no more; all that still waited, too."""
        found = self.abandoned()
        for reference, dying in self._waiting.values():
            listener = reference()
            if listener is None or dying.detach() is None:
                continue
            found.append((listener.place, listener.call))
            listener.call = None
        self._waiting.clear()
        return found
