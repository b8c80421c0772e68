"""A listener that keeps everything, and holds it against the reference backend."""

import torch

from gradtruth.backends import get
from gradtruth.core.tensors import Wanted
from gradtruth.verify.interception import Listener


class Heard(Listener):
    """Everything that was said about one call."""

    def __init__(self, call, wants_gradients=True):
        self.call, self.wants_gradients = call, wants_gradients
        self.out = self.lse = None
        self.backwards = []

    def forward(self, out, lse):
        self.out, self.lse = out, lse

    def backward(self, dout, dlse, grads):
        self.backwards.append((dout, dlse, dict(grads)))

    def check(self):
        """In fp64 it is what the reference finds for the problem that was told. Returns the gradients' names."""
        problem, inputs = self.call.problem, self.call.inputs
        backend = get("reference")
        forward = backend.forward(problem, inputs)
        same(self.out, forward.out)
        ((dout, dlse, found),) = self.backwards
        grads = backend.backward(problem, inputs, forward, dout, dlse, Wanted())
        for name, expected in grads.items():
            if name == "dsoftmax_offset" and name in found:
                torch.testing.assert_close(found[name].float(), expected.float())
            elif name in found:
                same(found[name], expected)
        return set(found)


def same(found, expected):
    """In fp64: a wrong mask, scale, corner or dout is far outside."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def listening(heard, **options):
    """An ``on_call`` that listens to every call."""

    def on_call(call):
        heard.append(Heard(call, **options))
        return heard[-1]

    return on_call
