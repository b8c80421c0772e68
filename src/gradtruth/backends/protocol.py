"""The contract of a backend. One op pair serves them all: (out, lse) forward, (out, lse, dout, dlse) backward."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gradtruth.core.problem import Problem
from gradtruth.core.support import Claims, Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["Backend", "ReadsContent"]


@runtime_checkable
class Backend(Protocol):
    """An implementation of attention.

    A backend honours SEMANTICS sections 1 to 5 for every problem that it supports. It writes no argument,
    returns fresh tensors, launches on the current stream, and keeps nothing that changes a later result.
    """

    @property
    def name(self) -> str:
        """Its name in ``backend=``."""
        ...

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """Every reason against, from metadata only; never raises for a valid problem."""
        ...

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """What it promises for a problem that it supports."""
        ...

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """out in q's storage layout with last dim Dv, and lse."""
        ...

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """The wanted gradients. ``dlse`` has the shape of lse; None is zero."""
        ...


@runtime_checkable
class ReadsContent(Protocol):
    """A backend that takes some problems only for some contents: for lengths, say, that metadata does not tell."""

    def supports_content(self, problem: Problem, inputs: Inputs) -> Support:
        """Every reason that tensors tell against a problem that ``supports`` takes; may wait for the device.

        ``forward`` and ``backward`` raise UnsupportedProblem with the same reasons.
        """
        ...
