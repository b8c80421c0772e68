"""The peers on a CUDA device: the suite's problems that they support there, judged by the measured budget."""

from __future__ import annotations

import warnings

import pytest
import torch

from gradtruth.backends import get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.testing import assert_verified
from gradtruth.verify.suite.recipe import Recipe
from gradtruth.verify.suite.suite import suite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
NAMES = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math", "flex")
SHAPES = (
    {"batch": 2, "seqlen_q": 200, "seqlen_kv": 200, "num_heads": 4, "num_gqa_groups": 4},
    {"batch": 1, "seqlen_q": 130, "seqlen_kv": 257, "num_heads": 6, "num_gqa_groups": 2},
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dim", [64, 128])
def test_plain_problems(name, dtype, dim):
    done = 0
    for layout in ("bshd", "sbhd"):
        for right in (None, 0):
            for shape in SHAPES:
                problem = Problem(
                    spec=Spec(layout=layout, right=right),
                    head_dim_qk=dim,
                    head_dim_v=dim,
                    dtype=dtype,
                    **shape,
                )
                if get(name).supports(problem, CUDA).ok:
                    done += 1
                    assert_verified(Recipe(problem=problem, seed=done), name, device="cuda")
    # flash and cuDNN take no fp32.
    assert done or (dtype == "float32" and name in ("sdpa_flash", "sdpa_cudnn"))


@pytest.mark.parametrize("name", NAMES)
def test_suite(name):
    recipes = [recipe for recipe in suite().recipes if get(name).supports(recipe.problem, CUDA).ok]
    # Each of flex is compiled on its own.
    recipes = recipes[:: max(1, len(recipes) // (12 if name == "flex" else 60))]
    # These two take no mask but causal, and every problem of the suite has something more.
    assert recipes or name in ("sdpa_flash", "sdpa_cudnn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        for recipe in recipes:
            assert_verified(recipe, name, device="cuda")


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_efficient", "sdpa_cudnn"])
def test_foreign_out_and_lse(name):
    # From the reference on the same device; the backward alone is the peer's.
    from gradtruth.core.tensors import Wanted
    from gradtruth.verify.suite.inputs import make

    problem = Problem(
        spec=Spec(right=0), head_dim_qk=64, head_dim_v=64, dtype="bfloat16", **SHAPES[0]
    )
    sample = make(Recipe(problem=problem), "cuda")
    own = get("reference")
    forward = own.forward(sample.problem, sample.inputs)
    want = own.backward(sample.problem, sample.inputs, forward, sample.dout, None, Wanted())
    got = get(name).backward(sample.problem, sample.inputs, forward, sample.dout, None, Wanted())
    for key in ("dq", "dk", "dv"):
        a, b = getattr(got, key).double(), getattr(want, key).double()
        assert (a - b).norm() <= 0.01 * b.norm()
