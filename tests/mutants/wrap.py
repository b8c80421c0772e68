"""A healthy backend with one method changed."""

from __future__ import annotations

from dataclasses import replace

from gradtruth.backends import get


class Wrapped:
    """The reference backend; a fault overrides one of the two methods that change results.

    Attributes:
        calls: forwards so far.
    """

    name = "mutant"

    def __init__(self, own: str = "reference", **claims: bool) -> None:
        self.own, self.changed_claims, self.calls = get(own), claims, 0

    def supports(self, problem, device):
        return self.own.supports(problem, device)

    def claims(self, problem, device):
        return replace(self.own.claims(problem, device), **self.changed_claims)

    def forward(self, problem, inputs):
        self.calls += 1
        return self.change_forward(self.own.forward(problem, inputs), problem, inputs)

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        found = self.own.backward(problem, inputs, forward, dout, dlse, wanted)
        return self.change_backward(found, inputs, forward, dout)

    def change_forward(self, found, problem, inputs):
        return found

    def change_backward(self, found, inputs, forward, dout):
        return found
