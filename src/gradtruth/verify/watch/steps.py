"""Steps: which forward of a model belongs to which step, and which steps are watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Steps"]


class Steps:
    """Counts steps: forwards of the model in training mode, or calls of ``mark``.

    The first is step 0. An evaluation in between does not count; neither does a forward that activation
    checkpointing repeats in a backward. After the first ``mark`` forwards do not count any more.

    Args:
        root: the model; None counts by ``mark`` alone.
        every: steps 0, every, 2 * every ... are watched.
        switch: is told at the beginning of a step whether it is watched; False for an evaluation.

    Attributes:
        number: of the step; -1 before the first.
        watched: how many were.
    """

    def __init__(self, root: nn.Module | None, every: int, switch: Callable[[bool], None]) -> None:
        self.number, self.watched = -1, 0
        self._every, self._switch = every, switch
        self._by_hand = root is None
        self._handle: Any = None
        if root is None:
            self._next()
        else:
            self._handle = root.register_forward_pre_hook(_Hook(self.begun))

    def mark(self) -> None:
        """A step ends here."""
        if not self._by_hand:
            # The one that ends has been counted by its forwards, however many.
            self.number, self._by_hand = 0, True
        self._next()

    def close(self) -> None:
        """Count no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def begun(self, module: nn.Module) -> None:
        """A forward of the model begins."""
        if self._by_hand or torch._C._current_graph_task_id() != -1:
            return
        if module.training:
            self._next()
        else:
            self._switch(False)  # noqa: FBT003 - its only argument

    def _next(self) -> None:
        self.number += 1
        watched = self.number % self._every == 0
        self.watched += watched
        self._switch(watched)


class _Hook:
    """The forward pre-hook. In a copy of the model, or one read from a file, it does nothing."""

    def __init__(self, begun: Callable[[nn.Module], None] | None = None) -> None:
        self._begun = begun

    def __call__(self, module: nn.Module, _args: Any) -> None:
        # The compiler takes the first for a constant and leaves the rest out.
        if not torch.compiler.is_compiling() and self._begun is not None:
            self._begun(module)

    def __reduce__(self) -> tuple[type[_Hook], tuple]:
        return _Hook, ()
