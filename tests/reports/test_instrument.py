"""Traps of comparing: a false alarm is a fault too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.reports.harness import BF16, FP32, Call, drawn, report, same

from gradtruth.testing import assert_verified
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.recipe import Recipe

TRAPS = "traps of the verification itself"


@report(
    "pytorch/pytorch#133671",
    TRAPS,
    "dout is made by value: the same for every memory layout and every backend",
)
def test_dout_does_not_depend_on_strides(own):
    """dout was filled in the memory order of each backend's out, so two different gradients were compared."""
    problem = own.sample(*drawn(own, 7, batch=2)).problem
    recipes = [
        Recipe(problem=problem, dout=dout) for dout in ("contiguous", "other_layout", "wide")
    ]
    samples = [make(recipe, own.device) for recipe in recipes]
    assert samples[1].dout.stride() != samples[0].dout.stride()
    for sample, recipe in zip(samples, recipes, strict=True):
        same(sample.dout, samples[0].dout)
        if own.backend.supports(sample.problem, own.device).ok:
            assert_verified(recipe, own.backend, device=own.device)
    # What the trap is: one stream of numbers into memory of another order is another gradient, and it shows.
    q, k, v, dout = drawn(own, 7, batch=2)
    turned = torch.empty_strided(dout.shape, dout.transpose(1, 2).contiguous().transpose(1, 2).stride(),
                                 device=own.device)  # fmt: skip
    turned.as_strided((dout.numel(),), (1,)).copy_(dout.flatten())
    call = own.attend(q, k, v, dout).verify()
    mixed = Call(own, replace(call.sample, dout=turned), call.results)
    with pytest.raises(AssertionError, match="dv is wrong"):
        mixed.verify()


@report(
    "Dao-AILab/flash-attention#1253",
    TRAPS,
    "the budget has a floor: a right result passes where plain rounding is exact, a wrong one does not",
)
@pytest.mark.parametrize("kind", [BF16, FP32], ids=["bf16", "fp32"])
def test_one_key_leaves_room_for_a_rounding(own, kind):
    """With one key the yardstick made no error at all, so a tolerance of twice its error failed a right kernel."""
    call = own.attend(*drawn(own, 5, 1, dtype=kind)).verify()
    step = torch.finfo(kind).eps
    nudged = {**call.results, "dv": call.dv * (1 + step / 2) if kind == FP32 else call.dv}
    if kind == BF16:
        top = call.dv.abs() == call.dv.abs().amax()
        nudged["dv"] = torch.where(top, torch.nextafter(call.dv, call.dv * 2), call.dv)
        assert not torch.equal(nudged["dv"], call.dv)
    own.judge(call.sample, nudged)
    with pytest.raises(AssertionError, match="dv is wrong"):
        own.judge(call.sample, {**call.results, "dv": call.dv * (1 + 32 * step)})
