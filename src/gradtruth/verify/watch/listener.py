"""Heard: the listener of one watched call, from its forward to its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from gradtruth.verify.capture.selection import Place
from gradtruth.verify.interception import Call, Listener

__all__ = ["Heard"]

Told = Callable[["Heard", Tensor | None, Tensor | None, Mapping[str, Tensor]], None]


class Heard(Listener):
    """Keeps a call's inputs and results, as autograd does, until its gradients are there. Later ones are ignored.

    Args:
        place: where the call was made.
        call: the call.
        told: gets this, dout, dlse and the gradients.

    Attributes:
        out, lse: what the forward returned.
    """

    def __init__(self, place: Place, call: Call, told: Told) -> None:
        self.place, self.call, self._told = place, call, told
        self.out: Tensor | None = None
        self.lse: Tensor | None = None
        self._version = 0
        self._done = False

    def forward(self, out: Tensor, lse: Tensor | None) -> None:
        """Keep the results."""
        self.out, self.lse, self._version = out, lse, out._version

    def backward(
        self, dout: Tensor | None, dlse: Tensor | None, grads: Mapping[str, Tensor]
    ) -> None:
        """Tell, and let go."""
        if self._done or self.out is None:
            return
        self._done = True
        if dout is not None or dlse is not None:
            self._told(self, dout, dlse, grads)
        self.out = self.lse = None
        del self.call

    def intact(self) -> bool:
        """Whether out still holds what the call returned."""
        return self.out is not None and self.out._version == self._version
