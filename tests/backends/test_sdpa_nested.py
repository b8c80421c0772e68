"""sdpa_nested on the CPU, where torch has its plain kernel only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.backends.peer_recipes import peer_recipes

from gradtruth.backends import get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.support import ReasonCode
from gradtruth.testing import unpoisoned
from gradtruth.verify.suite.conformance import examine, truth_of
from gradtruth.verify.suite.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
AXES = {
    "heads": ("1/1", "3/3"),
    "window": ("none",),
    "mask": ("full",),
    "dtype": ("bfloat16", "float16", "float32", "float64"),
    "dims": ("1", "8", "32", "72", "192/128"),
    "dout": ("contiguous", "other_layout", "second_row", "wide", "strided_last", "expanded_heads"),
}
PROBLEM = Problem(
    spec=Spec(layout="thd", lengths="cu_seqlens"),
    batch=2,
    seqlen_q=5,
    seqlen_kv=5,
    num_heads=1,
    num_gqa_groups=1,
    head_dim_qk=4,
    head_dim_v=4,
    dtype="float64",
)


def test_every_form_of_sequences():
    backend, wrong, taken = get("sdpa_nested"), [], 0
    for recipe in peer_recipes(40, seed=2, **AXES):
        sample = unpoisoned(recipe)
        if backend.supports(sample.problem, CPU).ok:
            taken += 1
            wrong += [
                f"{recipe.label()}: {line}" for line in examine(sample, backend, truth_of(sample))
            ]
    assert not wrong, "\n".join(wrong[:8])
    assert taken == 40


def test_refusals():
    def codes(device, spec=None, **sizes):
        problem = replace(PROBLEM, spec=replace(PROBLEM.spec, **(spec or {})), **sizes)
        return [r.code for r in get("sdpa_nested").supports(problem, device).reasons]

    assert codes(CPU) == codes(CUDA) == []
    assert codes(torch.device("meta")) == [ReasonCode.DEVICE]
    assert codes(CPU, num_heads=2) == [ReasonCode.HEADS]
    assert codes(CPU, {"right": 0}) == [ReasonCode.MASK]
    assert codes(CUDA, {"right": 0}) == [ReasonCode.DTYPE]
    assert codes(CUDA, {"right": 0}, dtype="float32") == []
    assert codes(CUDA, {"right": 0}, dtype="float32", seqlen_q=9) == [ReasonCode.MASK]
    assert codes(CUDA, dtype="bfloat16") == [ReasonCode.HEAD_DIM] * 2
    assert codes(CUDA, {"left": 2, "right": 0}, dtype="float32") == [ReasonCode.WINDOW]
    assert codes(CPU, {"softcap": 2.0}) == [ReasonCode.SOFTCAP]


def test_empty_sequences_leave_no_kernel_with_a_causal_mask():
    spec = replace(PROBLEM.spec, right=0)
    problem = replace(PROBLEM, spec=spec, dtype="float32")
    for places, code in (
        (((0, 5, 0, 5), (5, 0, 5, 0)), [ReasonCode.LENGTHS]),
        (((0, 2, 0, 2), (2, 3, 2, 3)), []),
        (((0, 2, 0, 3), (2, 3, 3, 2)), [ReasonCode.MASK]),
    ):
        sample = unpoisoned(Recipe(problem=problem, places=places))
        reasons = get("sdpa_nested").supports_content(sample.problem, sample.inputs).reasons
        assert [r.code for r in reasons] == code


def test_known_fault_of_torch_a_gradient_that_starts_within_its_storage():
    # torch 2.13: the backward of the plain kernel reads the gradient of out from the start of its storage. Users get
    # wrong gradients, and no error, from torch.cat([other, out.values()]). When torch mends it, this test says so.
    for dout, right in (("contiguous", True), ("offset", False)):
        recipe = Recipe(problem=PROBLEM, places=((0, 2, 0, 2), (2, 3, 2, 3)), dout=dout)
        sample = unpoisoned(recipe)
        assert (sample.dout.storage_offset() == 0) is right
        found = examine(sample, get("sdpa_nested"), truth_of(sample))
        wrong = {line.split()[0] for line in found}
        assert wrong == (set() if right else {"dq", "dk", "dv"})
