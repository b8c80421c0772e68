from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import hypothesis
import pytest

from gradtruth.backends import get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Grads
from gradtruth.errors import InvalidProblem, UnsupportedProblem
from gradtruth.testing import assert_verified, problems, recipes
from gradtruth.verify.cases.case import Case
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.recipe import Recipe

PROBLEM = Problem(
    spec=Spec(right=0),
    batch=2,
    seqlen_q=12,
    seqlen_kv=12,
    num_heads=2,
    num_gqa_groups=1,
    head_dim_qk=8,
    head_dim_v=8,
    dtype="float32",
)
RECIPE = Recipe(problem=PROBLEM, seed=3, poison="nan")


class Broken:
    """The reference with one thing changed."""

    name = "broken"

    def __init__(self, **changes):
        self.right = get("reference")
        self.changes = changes

    def __getattr__(self, name):
        return getattr(self.right, name)

    def forward(self, problem, inputs):
        found = self.right.forward(problem, inputs)
        return self.changes.get("forward", lambda x, _: x)(found, inputs)

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        found = self.right.backward(problem, inputs, forward, dout, dlse, wanted)
        return self.changes.get("backward", lambda x, _: x)(found, inputs)


@pytest.mark.parametrize("backend", ["auto", "reference", "unfused", "sdpa_math"])
def test_a_right_backend_passes_for_a_problem_a_recipe_a_sample_and_a_case(backend):
    sample = make(RECIPE)
    case = Case.of(sample.problem.spec, sample.inputs, sample.dout)
    for what in (PROBLEM, RECIPE, sample, case):
        assert_verified(what, backend)


def written(grads, inputs):
    inputs.q.mul_(2)
    return grads


WRONG = {
    "dq zero": ({"backward": lambda g, _: replace(g, dq=g.dq * 0)}, "dq is wrong in 4 places"),
    "one head": ({"backward": lambda g, _: g.dv[1, :, 0].mul_(1.001) is None or g}, "sequence 1, head 0"),
    "dk missing": ({"backward": lambda g, _: replace(g, dk=None)}, "dk is missing"),
    "dbias unasked": ({"backward": lambda g, _: replace(g, dbias=g.dq)}, "dbias is not wanted"),
    "dtype": ({"backward": lambda g, _: replace(g, dv=g.dv.double())}, "dv is torch.float64"),
    "shape": ({"backward": lambda g, _: replace(g, dv=g.dv[:1])}, r"dv is torch.float32 \[1, 12, 1, 8\]"),
    "strides": ({"backward": lambda g, _: replace(g, dq=g.dq.mT.contiguous().mT)}, "dq has strides"),
    "alias": ({"backward": lambda g, i: replace(g, dq=i.q)}, "dq shares memory"),
    "written": ({"backward": written}, "wrote its input q"),
    "nan": ({"backward": lambda g, _: Grads(**{n: t / 0 * 0 for n, t in g.items()})}, "NaN"),
    "out": ({"forward": lambda f, _: replace(f, out=f.out.roll(1, 0))}, "out is wrong"),
    "lse base": ({"forward": lambda f, _: replace(f, lse=f.lse / 0.6931)}, "lse is wrong"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backend_fails_and_the_message_says_what_and_repeats_it(name):
    changes, message = WRONG[name]
    broken = Broken(**changes)
    with pytest.raises(AssertionError, match=message) as caught:
        assert_verified(RECIPE, broken)
    last = str(caught.value).splitlines()[-1]
    assert last == f"assert_verified(Recipe.decode({RECIPE.encode()!r}), 'broken')"
    again = last.replace("'broken'", "broken")
    with pytest.raises(AssertionError, match=message):
        eval(again, {"assert_verified": assert_verified, "Recipe": Recipe, "broken": broken})


def test_a_refusal_is_no_pass():
    problem = replace(PROBLEM, spec=Spec(softcap=2.0))
    with pytest.raises(UnsupportedProblem, match="softcap"):
        assert_verified(problem, "sdpa_flash")
    with pytest.raises(UnsupportedProblem, match="softcap"):
        assert_verified(problem, get("sdpa_flash"))
    with pytest.raises(InvalidProblem, match="backend is 'x'"):
        assert_verified(problem, "x")


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
@hypothesis.given(recipes(size="small", dtype="float32", layout="thd"))
def test_recipes_are_valid_and_keep_what_is_fixed(recipe):
    assert recipe.problem.layout == "thd"
    assert recipe.problem.dtype == "float32"
    assert Recipe.decode(recipe.encode()) == recipe
    assert_verified(recipe, "reference")


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True, database=None)
@hypothesis.given(problems(size="small", batch="2"))
def test_problems_are_those_of_recipes(problem):
    assert problem.batch == 2
    assert Problem.decode(problem.encode()) == problem


def test_a_failing_property_shrinks_to_the_plain_values():
    found = hypothesis.find(
        recipes(),
        lambda recipe: recipe.problem.spec.softmax == "learnable",
        settings=hypothesis.settings(max_examples=300, database=None, deadline=None),
        random=__import__("random").Random(0),
    )
    spec = found.problem.spec
    assert (found.problem.layout, found.arrangement, spec.bias) == ("bshd", "contiguous", "none")
    assert (spec.alibi, spec.softcap, spec.dropout_p) == (False, None, 0.0)


def test_unknown_axes_are_refused():
    with pytest.raises(InvalidProblem, match="fixed is"):
        recipes(layout="x")
    with pytest.raises(InvalidProblem, match="fixed is"):
        recipes(colour="red")


def test_hypothesis_is_imported_only_when_a_strategy_is_made():
    code = "import sys, gradtruth.testing; sys.exit('hypothesis' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0
