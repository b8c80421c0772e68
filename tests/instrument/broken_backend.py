"""A backend with a fault, named on the command line as ``tests.instrument.broken_backend:NEGATED``."""

from dataclasses import replace

from gradtruth.backends import get


class Negated:
    """The reference; dv has the wrong sign, and thd problems raise."""

    name = "negated"

    def supports(self, problem, device):
        return get("reference").supports(problem, device)

    def claims(self, problem, device):
        return get("reference").claims(problem, device)

    def forward(self, problem, inputs):
        if problem.layout == "thd":
            raise RuntimeError("no thd")
        return get("reference").forward(problem, inputs)

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        found = get("reference").backward(problem, inputs, forward, dout, dlse, wanted)
        return replace(found, dv=None if found.dv is None else -found.dv)


NEGATED = Negated()
