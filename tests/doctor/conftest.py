from dataclasses import replace

import pytest

from gradtruth.backends import get
from gradtruth.cli import doctor as command


class Planted:
    """The reference backend with dq of the last query head twice as large, in every problem but the dense ones."""

    name = "planted"

    def __getattr__(self, name):
        return getattr(get("reference"), name)

    def backward(self, problem, *arguments):
        found = get("reference").backward(problem, *arguments)
        if problem.layout != "thd":
            return found
        dq = found.dq.clone()
        dq[:, -1] *= 2
        return replace(found, dq=dq)


class Refusing:
    """A backend that takes nothing."""

    name = "refusing"

    def __getattr__(self, name):
        return getattr(get("fla"), name)


@pytest.fixture
def planted(monkeypatch):
    """Two more backends have names: one with a fault, and one that refuses everything."""
    more = {"planted": Planted(), "refusing": Refusing()}
    monkeypatch.setattr(command, "get", lambda name: more.get(name) or get(name))
    return more
