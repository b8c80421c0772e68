"""What reference and unfused have in common: the contract, against its definition pair by pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradtruth.backends import get
from gradtruth.backends.reference import backward as reference_backward
from gradtruth.backends.reference import forward as reference_forward
from gradtruth.backends.reference.schedule import Schedule
from gradtruth.core import sequences
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.support import Claims
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted
from tests.backends.definition import Drawn, define, draw, lse_row

NAMES = ("reference", "unfused")
CPU = torch.device("cpu")
# What is stored in fp32 also for fp64 problems, or may be.
SINGLE = {"max_logit", "dsoftmax_offset", "dbias"}


@pytest.fixture(params=NAMES)
def backend(request):
    return get(request.param)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 rows, so that small problems have several and most lengths are no multiple."""
    for module in (reference_forward, reference_backward):
        monkeypatch.setattr(module, "schedule", lambda *_: Schedule(rows=4, scores=1 << 20))


@pytest.fixture(params=["host", "device"])
def reading(request, monkeypatch):
    """Lengths are read on the host, or stay on the device as on a GPU."""
    if request.param == "device":
        monkeypatch.setattr(sequences, "known_on_host", lambda p, _: p.spec.lengths == "full")
    return request.param


def results(drawn: Drawn, backend, forward: Forward | None = None) -> dict[str, Tensor]:
    forward = forward or backend.forward(drawn.problem, drawn.inputs)
    grads = drawn.backward(backend, poisoned(drawn, forward))
    found = {"out": forward.out, "lse": forward.lse, **dict(grads.items())}
    return found if forward.max_logit is None else {**found, "max_logit": forward.max_logit}


def poisoned(drawn: Drawn, forward: Forward) -> Forward:
    """The same out and lse with NaN outside every sequence."""
    outside = drawn.dout.isnan().any(-1)
    out = forward.out.masked_fill(outside[..., None], torch.nan)
    if drawn.problem.layout == "bshd":
        outside = outside.transpose(1, 2)
    elif drawn.problem.layout == "sbhd":
        outside = outside.permute(1, 2, 0)
    return Forward(out=out, lse=forward.lse.masked_fill(outside, torch.nan))


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float, single: float) -> None:
    assert set(found) == set(wanted)
    for name, right in wanted.items():
        left = found[name].double()
        assert left.shape == right.shape, name
        finite = right.isfinite()
        assert torch.equal(left[~finite], right[~finite]), name
        allowed = (single if name in SINGLE else tolerance) * max(1.0, *right[finite].abs().tolist(), 0.0)
        assert ((left - right)[finite].abs() <= allowed).all(), name
        assert not left[(right == 0) & (name != "max_logit")].any() or allowed > 0


@pytest.mark.parametrize("seed", range(120))
def test_definition(backend, reading, seed):
    drawn = draw(seed)
    compare(results(drawn, backend), define(drawn), 1e-13, 1e-6)


@pytest.mark.parametrize("seed", range(200, 230))
def test_definition_in_fp32(backend, reading, seed):
    drawn = draw(seed, dtype=torch.float32)
    compare(results(drawn, backend), define(drawn), 2e-6, 2e-6)
