"""The peers for variable lengths on a CUDA device: problems of the suite's axes that each supports, all of them judged.

Every failure is collected and told at the end, each with one line that repeats it. A peer that is not installed is
skipped with its reason.
"""

from __future__ import annotations

import traceback
import warnings

import pytest
import torch
from tests.backends.peer_recipes import peer_recipes

from gradtruth.backends import get
from gradtruth.backends.peers.versions import peer_versions
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.support import ReasonCode
from gradtruth.errors import UnsupportedProblem
from gradtruth.testing import assert_verified
from gradtruth.verify.suite.recipe import Recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
# Beyond ``peer_recipes.PLAIN``; compiled kernels are asked for fewer kinds.
AXES = {
    "torch_varlen": {},
    "aten_flash_varlen": {},
    "aten_cudnn_varlen": {"window": ("none",)},
    "sdpa_nested": {
        "heads": ("1/1", "3/3"), "window": ("none",), "dtype": ("bfloat16", "float16", "float32", "float64"),
    },
    "flash_attn_2": {"alibi": ("none", "H", "BH"), "softcap": ("none", "30"), "dims": ("1", "33", "64", "128")},
    "flash_attn_3": {"softcap": ("none", "30"), "dims": ("64", "128", "192/128", "64/128")},
    "flash_attn_4": {
        "softcap": ("none", "30"), "softmax": ("vanilla", "off-by-one", "learnable"), "dlse": ("no", "yes"),
        "dims": ("64", "128", "192/128"), "dtype": ("bfloat16",),
    },
    "xformers": {"heads": ("1/1", "3/3"), "window": ("none", "w,0"), "dtype": ("bfloat16", "float32")},
    "fla": {
        "mask": ("causal",), "window": ("none", "w,0"), "softmax": ("vanilla", "learnable"),
        "places": ("full", "ragged", "gaps", "left"), "arrangement": ("contiguous", "3hd"), "dims": ("64", "128"),
    },
}  # fmt: skip
COUNT = {"flash_attn_4": 48, "fla": 48}
# Seeds of recipes on which a peer is wrong, as docs/peers.md says: told, and no failure.
KNOWN = {"torch_varlen": {1023474}, "aten_flash_varlen": {1023474}}


def plain_problems() -> list[Recipe]:
    """Full tensors of ordinary sizes, with and without GQA, causal or not."""
    shapes = (
        {"batch": 2, "seqlen_q": 200, "seqlen_kv": 200, "num_heads": 4, "num_gqa_groups": 4},
        {"batch": 1, "seqlen_q": 130, "seqlen_kv": 257, "num_heads": 6, "num_gqa_groups": 2},
        {"batch": 3, "seqlen_q": 384, "seqlen_kv": 384, "num_heads": 4, "num_gqa_groups": 1},
    )
    found = []
    for dtype in ("bfloat16", "float32"):
        for dim in (64, 128, 256):
            for right in (None, 0):
                for shape in shapes:
                    spec = Spec(right=right, alignment="bottom_right")
                    sizes = {"head_dim_qk": dim, "head_dim_v": dim, "dtype": dtype}
                    problem = Problem(spec=spec, **sizes, **shape)
                    found.append(Recipe(problem=problem, seed=len(found)))
    return found


@pytest.mark.parametrize("name", AXES)
def test_every_problem_that_it_supports(name):
    backend, failed, done, refused = get(name), [], 0, 0
    recipes = plain_problems() + peer_recipes(COUNT.get(name, 160), seed=1, **AXES[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of compilers and of prototypes
        for recipe in recipes:
            reasons = backend.supports(recipe.problem, CUDA).reasons
            absent = [r.text for r in reasons if r.code is ReasonCode.NOT_INSTALLED]
            if absent:
                pytest.skip(f"{name}: {absent[0]}")
            if reasons:
                refused += 1
                continue
            try:
                assert_verified(recipe, backend, device="cuda")
            except UnsupportedProblem:
                refused += 1
                continue
            except AssertionError as error:
                if recipe.seed in KNOWN.get(name, ()):
                    print("known:", error)
                else:
                    failed.append(str(error))
            except (
                Exception
            ) as error:  # a raise is a failure of its own, and the others are asked too
                place = traceback.extract_tb(error.__traceback__)[-1]
                failed.append(
                    f"{name} raised on {recipe.label()}: {error!r} in {place.filename}:{place.lineno}"
                )
            done += 1
    versions = ", ".join(f"{key} {value}" for key, value in peer_versions().items())
    head = (
        f"{name}: {len(failed)} of {done} problems are wrong ({refused} refused), with {versions}"
    )
    print(head)
    assert not failed, "\n".join([head, *failed])
    assert done >= 20


@pytest.mark.parametrize("name", ["aten_flash_varlen", "aten_cudnn_varlen"])
def test_foreign_out_and_lse(name):
    # From the reference on the same device; the backward alone is the peer's. The last sequence has no keys.
    from gradtruth.core.tensors import Wanted
    from gradtruth.verify.suite.inputs import make

    problem = Problem(
        spec=Spec(layout="thd", lengths="cu_seqlens"),
        batch=3,
        seqlen_q=300,
        seqlen_kv=250,
        num_heads=4,
        num_gqa_groups=4,
        head_dim_qk=64,
        head_dim_v=64,
        dtype="bfloat16",
    )
    places = ((0, 50, 0, 150), (50, 200, 150, 100), (250, 50, 250, 0))
    sample = make(Recipe(problem=problem, places=places), "cuda")
    own = get("reference")
    forward = own.forward(sample.problem, sample.inputs)
    want = own.backward(sample.problem, sample.inputs, forward, sample.dout, None, Wanted())
    got = get(name).backward(sample.problem, sample.inputs, forward, sample.dout, None, Wanted())
    wrong = [
        f"{key} is off by {(a - b).norm() / b.norm():.2e}"
        for key in ("dq", "dk", "dv")
        for a, b in [(getattr(got, key).double(), getattr(want, key).double())]
        if not (a - b).norm() <= 0.01 * b.norm()
    ]
    assert not wrong, wrong
