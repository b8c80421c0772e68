"""Probes: the same numbers as the whole oracle for every kind of problem, and each tensor's fault under its name."""

import dataclasses

import pytest
import torch

from gradtruth.backends import get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.laws import residuals
from gradtruth.verify.probes import probe, spots
from gradtruth.verify.suite.conformance import run
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.recipe import Recipe
from gradtruth.verify.suite.suite import suite
from gradtruth.verify.truth import oracle
from gradtruth.verify.truth.scoring import places


def small(count):
    """Recipes of the suite that are cheap, poison where the oracle does not look left out."""
    found = []
    for recipe in suite().recipes[::3]:
        problem = recipe.problem
        size = problem.batch * problem.seqlen_q * problem.seqlen_kv * problem.num_heads
        if 0 < size < 60_000:
            found.append(dataclasses.replace(recipe, poison="none"))
    return found[:: max(1, len(found) // count)][:count]


def truth(sample):
    forward, backward = oracle.evaluate(
        sample.problem, sample.inputs, sample.dout, sample.dlse, sample.wanted
    )
    return {**dict(forward.items()), **dict(backward.items())}


@pytest.mark.parametrize("lse", [True, False], ids=["from out and lse", "without an lse"])
def test_the_numbers_of_the_oracle(lse):
    """Whatever the layout, mask, bias, ALiBi, softcap, sink, dropout: chosen rows are rows of the whole."""
    seen = set()
    for recipe in small(40):
        sample = make(recipe)
        values = truth(sample)
        given = {n: x for n, x in values.items() if lse or n != "lse"}
        rows = probe(sample, given, rows=3, columns=3, seed=recipe.seed)
        spec = recipe.problem.spec
        for name in ("layout", "lengths", "bias", "softmax", "alibi", "arbitrary"):
            seen.add((name, getattr(spec, name)))
        seen |= {("dropout", spec.dropout_p > 0), ("softcap", spec.softcap is not None)}
        for row in rows:
            assert not row.broken, (recipe.label(), row)
            assert row.norms.error <= 1e-11 * (row.norms.floor + row.norms.oracle), (
                recipe.label(),
                row,
            )
        wanted = {"out", "lse", "dq", "dk", "dv"} & set(given)
        if recipe.problem.batch and min(min(p[1], p[3]) for p in recipe.resolved_places) > 0:
            assert {row.tensor for row in rows} == wanted, recipe.label()
    assert {("bias", "pre_scale"), ("bias", "post_scale"), ("alibi", True), ("arbitrary", True),
            ("dropout", True), ("softcap", True), ("softmax", "learnable"), ("layout", "thd"),
            ("lengths", "padding_mask"), ("lengths", "cu_seqlens")} <= seen  # fmt: skip


def gqa(dtype="bfloat16", family="heterogeneous", **spec):
    problem = Problem(
        spec=Spec(right=0, **spec), batch=2, seqlen_q=40, seqlen_kv=40, num_heads=4,
        num_gqa_groups=2, head_dim_qk=32, head_dim_v=32, dtype=dtype,
    )  # fmt: skip
    return make(Recipe(problem=problem, family=family))


def results(sample, name="reference"):
    backend = get(name)
    return run(sample, backend, backend.claims(sample.problem, torch.device("cpu")))


def wrong(rows):
    return {(row.tensor, row.sequence, row.head) for row in rows if not row.passed}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("lse", [True, False], ids=["lse", "no lse"])
@pytest.mark.parametrize("tensor", ["out", "lse", "dq", "dk", "dv"])
def test_a_factor_in_one_head(tensor, lse, dtype):
    """1.02 in bf16 and fp16, 1.0001 in fp32, found in the first draw, and in no other head."""
    sample = gqa(dtype, "gaussian")
    found = results(sample)
    assert not wrong(probe(sample, found, seed=3))
    factor = 1.0001 if dtype == "float32" or tensor == "lse" else 1.02
    head = 1
    changed = found[tensor].double()
    changed[1, :, head] *= factor
    if tensor == "lse":
        changed = found[tensor].double()
        changed[1, head] += 1e-3
    given = found | {tensor: changed.to(found[tensor].dtype)}
    if not lse:
        if tensor == "lse":
            return
        del given["lse"]
    named = wrong(probe(sample, given, seed=3))
    assert (tensor, 1, head) in named
    # dk and dv are what belongs to out and lse as they were returned: of a wrong lse others.
    extra = {("dk", 1, 0), ("dv", 1, 0), ("dk", 1, 1), ("dv", 1, 1), ("dq", 1, 1)}
    assert named - {(tensor, 1, head)} <= (extra if tensor in ("out", "lse") and lse else set())


def test_dq_of_a_wrong_out_is_not_wrong_itself():
    """A backward from an out that is twice as large gives what belongs to that."""
    sample = gqa()
    backend = get("reference")
    forward = backend.forward(sample.problem, sample.inputs)
    double = dataclasses.replace(forward, out=forward.out * 2)
    grads = backend.backward(
        sample.problem, sample.inputs, double, sample.dout, sample.dlse, sample.wanted
    )
    given = {"out": double.out, "lse": forward.lse, **dict(grads.items())}
    assert {tensor for tensor, *_ in wrong(probe(sample, given))} == {"out"}


def test_what_is_drawn():
    sample = gqa()
    where = places(sample.problem, sample.inputs)
    drawn = spots(sample.problem, where, rows=8, columns=5, heads=2, seed=1)
    assert drawn == spots(sample.problem, where, rows=8, columns=5, heads=2, seed=1)
    assert drawn != spots(sample.problem, where, rows=8, columns=5, heads=2, seed=2)
    assert len(drawn) == 2
    for spot in drawn:
        assert [row // 5 for row in spot.rows] == list(range(8)), "one of each eighth"
        assert [column // 8 for column in spot.columns] == list(range(5))
    everything = spots(sample.problem, where, rows=100, columns=100)
    assert [(spot.sequence, spot.group) for spot in everything] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert everything[0].rows == everything[0].columns == tuple(range(40))
    with pytest.raises(InvalidProblem, match="rows is -1, expected 0 or more"):
        spots(sample.problem, where, rows=-1, columns=1)


def test_a_case_can_be_probed():
    sample = gqa()
    case = Case.of(sample.problem.spec, sample.inputs, sample.dout, sample.dlse)
    assert probe(case, results(sample), heads=1)
    assert {row.tensor for row in probe(case, {"out": results(sample)["out"]})} == {"out"}


@pytest.mark.parametrize("softmax", ["off-by-one", "learnable", "vanilla"])
def test_law_c_where_a_query_sees_no_key(softmax):
    """With a sink and a gradient of lse such a row gives nothing to any key: a false alarm of the law once."""
    problem = Problem(
        spec=Spec(right=0, alignment="bottom_right", softmax=softmax, lse_grad=True), batch=1, seqlen_q=24,
        seqlen_kv=9, num_heads=2, num_gqa_groups=1, head_dim_qk=8, head_dim_v=8, dtype="float32",
    )  # fmt: skip
    sample = make(Recipe(problem=problem, dlse=True))
    found = results(sample)
    laws = list(residuals(problem, sample.inputs, found, sample.dout, sample.dlse))
    assert {each.law for each in laws} == {"A", "B", "C"}
    assert all(each.holds for each in laws), laws
    found["dk"][:, 3] += 0.1
    broken = residuals(problem, sample.inputs, found, sample.dout, sample.dlse)
    assert {each.law for each in broken if not each.holds} == {"A", "C"}
