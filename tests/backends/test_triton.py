"""The Triton backend in Triton's interpreter: kernels, schedules, refusals, launches. Numbers: the suite.

The interpreter is switched on before Triton is imported, so these tests run in processes of their own where
another test has imported it; on a machine with a GPU the conformance suite runs on that.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradtruth.backends import get
from gradtruth.backends.triton.schedule import padded, tiles_for
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec

ROOT = Path(__file__).parents[2]
# One process per list: seeds of recipes that together have every feature of the contract.
RECIPES = (
    (336, 913, 1487),  # thd, arbitrary mask, post_scale bias with dbias, dropout, window, alibi
    (
        339,
        373,
        1364,
    ),  # learnable sink, softcap, [2,1,1,1] and [1,1,1,1] dbias, strided_last, packed qkv
    (77, 380, 706),  # holes or padding, GQA, pre_scale [..S,1] dbias, odd head dims, dlse
)
SCRIPT = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
torch.set_num_threads(1)
from gradtruth.backends import get
from gradtruth.verify.suite.conformance import examine, truth_of
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.suite import suite
import triton
backend, wrong = get("triton"), []
for at in map(int, sys.argv[1:]):
    recipe = suite().recipes[at]
    sample = make(recipe)
    assert backend.supports(sample.problem, torch.device("cpu")).ok, recipe.label()
    wrong += [f"{at} {recipe.label()}: {x}" for x in examine(sample, backend, truth_of(sample))]
print("\\n".join(wrong) or "right")
"""


def interpreted(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=600,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize("seeds", RECIPES, ids=str)
def test_recipes_of_the_suite(seeds):
    assert interpreted(SCRIPT, *seeds) == "right"


SEQUENCES = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from gradtruth.backends.triton.arguments import Call
from gradtruth.core.extents import resolve
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
drawn = torch.Generator().manual_seed(0)
def draw(low, high, count):
    return torch.randint(low, high, (count,), generator=drawn)
for case in range(31):
    batch = 600 if case == 30 else 1 + case % 4
    thd, hostile = case % 2 == 0, case % 3 == 0
    def cumulated():
        if hostile:
            low, high = (-(2**31), 2**31 - 1) if case % 4 else (-20, 60)
            return draw(low, high, batch + 1).int()
        return torch.cat((torch.zeros(1, dtype=torch.int64), draw(0, 20, batch).cumsum(0))).int()
    names = ["cu_seqlens_q", "cu_seqlens_kv"]
    names += ["cu_seqlens_q_padded", "cu_seqlens_kv_padded"] * (thd and case % 4 == 0)
    shape = (lambda n: (n, 2, 16)) if thd else (lambda n: (batch, n, 2, 16))
    inputs = Inputs(
        q=torch.zeros(shape(50)), k=torch.zeros(shape(40)), v=torch.zeros(shape(40)),
        **{name: cumulated() for name in names},
    )
    spec = Spec(
        layout="thd" if thd else "bshd", lengths="cu_seqlens", right=0,
        alignment="bottom_right" if case % 5 else "top_left",
    )
    problem = Problem.of(spec, inputs, max_seqlen_q=7 if case % 7 == 0 else None)
    call, expected = Call(problem, inputs), resolve(problem, inputs).pack()
    assert torch.equal(call.where[:11], expected), case
    lengths = [expected[at] for at in (1, 1, 3, 3)]
    for row, (length, block) in enumerate(zip(lengths, call.plan.schedule.blocks)):
        ends = ((length + block - 1) // block).cumsum(0).int()
        assert torch.equal(call.where[11 + row], ends), case
print("right")
"""


def test_the_sequences_kernel_is_resolve_whatever_the_content():
    assert interpreted(SEQUENCES) == "right"


def problem(**given) -> Problem:
    sizes = {
        "batch": 2, "seqlen_q": 8, "seqlen_kv": 8, "num_heads": 2, "num_gqa_groups": 1,
        "head_dim_qk": 64, "head_dim_v": 64, "dtype": "float16",
    }  # fmt: skip
    spec = given.pop("spec", Spec())
    return Problem(spec=spec, **{**sizes, **given})


def test_refusals_name_value_and_limit():
    device = torch.device("cpu")
    found = get("triton").supports(
        problem(dtype="float64", head_dim_qk=257, head_dim_v=300), device
    )
    text = "\n".join(map(str, found.reasons))
    assert "dtype is float64" in text
    assert "head_dim_qk is 257, at most 256" in text
    assert "head_dim_v is 300, at most 256" in text


def test_other_devices_are_refused():
    for kind in ("meta", "mps"):
        assert f"device is {kind}" in str(get("triton").supports(problem(), torch.device(kind)))


@pytest.mark.parametrize(
    ("dim", "expected"), [(1, 16), (16, 16), (17, 32), (80, 128), (192, 256), (256, 256)]
)
def test_padded_head_dims(dim, expected):
    assert padded(dim) == expected


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dim", [1, 64, 65, 128, 192, 256])
def test_schedules_do_not_look_at_the_batch(dim, dtype, large):
    one = problem(head_dim_qk=dim, dtype=dtype)
    many = replace(one, batch=64, seqlen_q=4096, seqlen_kv=4096)
    assert tiles_for(one, large=large) == tiles_for(many, large=large)
    for tile in (found := tiles_for(one, large=large)).forward, found.keys, found.queries:
        assert tile.block_m >= 16 <= tile.block_n
