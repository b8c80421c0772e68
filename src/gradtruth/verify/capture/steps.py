"""Steps: a step of training ends when the optimizer has stepped."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["Steps"]


class Steps:
    """Counts steps. Where there are several optimizers the first that steps counts, while it lives.

    Args:
        ended: is called after each step with the number of the one that begins.

    Attributes:
        number: steps that have ended.
    """

    def __init__(self, ended: Callable[[int], None]) -> None:
        self.number = 0
        self._ended = ended
        self._first: weakref.ref[Optimizer] | None = None
        self._by_hand = False
        self._handle: Any = None

    def open(self) -> None:
        """Listen to every optimizer of torch."""
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        """Listen no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def mark(self) -> None:
        """A step ends here. From now on optimizers do not count."""
        self._by_hand = True
        self._next()

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._by_hand:
            return
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            self._next()

    def _next(self) -> None:
        self.number += 1
        self._ended(self.number)
