"""The budget: healthy results pass with room, small faults in one (sequence, head) do not."""

import dataclasses
import math

import pytest
import torch
from tests.oracle.dense import dense, draw
from tests.oracle.problems import generate

from gradtruth.backends import get
from gradtruth.core.layout import canonical
from gradtruth.core.tensors import Wanted
from gradtruth.errors import InvalidProblem
from gradtruth.verify.truth import oracle
from gradtruth.verify.truth.budget import Norms, Row, Share, compare, eps_of, summarise

SETTINGS = [
    {"right": 0, "d": 32},
    {"b": 3, "s": 70, "h": 8, "g": 2, "d": 16},
    {"b": 3, "h": 8, "g": 8, "left": 9, "right": 0, "softcap": 8.0},
    {"b": 3, "s": 30, "t": 90, "h": 6, "g": 1, "d": 24, "dv": 8, "softmax": "learnable"},
    {"b": 2, "s": 90, "t": 20, "bias": "post_scale", "max_logit": True},
    {"b": 3, "s": 1, "t": 60, "h": 8, "g": 4, "d": 64},
    {"b": 3, "h": 8, "s": 60, "scale": 2.0},
]


class Judged:
    """Everything about one problem: oracle, yardstick and the results of a backend."""

    def __init__(self, problem, inputs, dout, backend):
        self.problem, self.inputs = problem, inputs
        truth, grads = oracle.evaluate(problem, inputs, dout)
        self.oracle = dict(truth.items()) | dict(grads.items())
        self.magnitudes = truth.magnitudes | grads.magnitudes
        self.yardstick = self.run("unfused", dout)
        self.got = self.yardstick if backend == "unfused" else self.run(backend, dout)

    def run(self, name, dout):
        backend = get(name)
        found = backend.forward(self.problem, self.inputs)
        grads = backend.backward(self.problem, self.inputs, found, dout, None, Wanted())
        return {n: getattr(found, n, None) for n in ("out", "lse", "max_logit")} | dict(
            grads.items()
        )

    def rows(self, name, got=None, yardstick=None):
        return compare(
            self.problem,
            self.inputs,
            name,
            self.got[name] if got is None else got,
            self.oracle[name],
            self.magnitudes[name],
            self.yardstick[name] if yardstick is None else yardstick,
        )


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def judged(request):
    """A causal GQA problem of 2 sequences and 4 heads in this dtype, through ``reference``."""
    return Judged(*dense(70, s=64, d=32, right=0, dtype=request.param), "reference")


def factor(judged):
    return {"bfloat16": 1.02, "float32": 1.0001}[judged.problem.dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_healthy_results_pass_with_room(dtype):
    """Thousands of (tensor, sequence, head); none uses more than three quarters of its budget."""
    rows = []
    for seed, setting in enumerate(SETTINGS):
        for shift in range(2):
            found = Judged(*dense(100 * seed + 10 * shift, dtype=dtype, **setting), "reference")
            for name in found.oracle:
                rows += found.rows(name)
    assert len(rows) > 1000
    worst = summarise(rows).worst
    assert worst.used < 0.75, worst
    assert all(row.finding == "" for row in rows)


@pytest.mark.parametrize("seed", range(300, 330))
def test_healthy_results_pass_in_every_feature(seed):
    """Ragged layouts, masks, bias, dropout and sinks; and whatever lies in hidden places."""
    case = generate(seed)
    judged = Judged(case.problem, case.inputs, case.dout, "reference")
    for name in judged.oracle:
        for row in judged.rows(name):
            assert row.passed, row


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "out"])
def test_one_head_scaled_is_found_and_named(judged, name):
    """1.02 in bf16 and 1.0001 in fp32, up or down, each (sequence, head) alone; the others stay right."""
    got = judged.got[name]
    for n in range(2):
        for h in range(got.shape[2]):
            for by in (factor(judged), 1 / factor(judged)):
                wrong = got.clone()
                wrong[n, :, h] = (wrong[n, :, h].double() * by).to(wrong.dtype)
                found = [(r.sequence, r.head) for r in judged.rows(name, wrong) if not r.passed]
                assert found == [(n, h)]


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros_like,
        torch.neg,
        lambda x: x.roll(1, 0),
        lambda x: x.roll(1, 2),
        lambda x: 1.5 * x,
    ],
    ids=["zero", "negated", "neighbour", "other head", "1.5"],
)
def test_gross_faults_fail_everywhere(judged, name, wrong):
    rows = judged.rows(name, wrong(judged.got[name]))
    assert not any(row.passed for row in rows)
    assert not summarise(rows).passed


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_one_wrong_row_is_found(judged, name):
    """A block edge: a single query or key in one head, off by a tenth."""
    wrong = judged.got[name].clone()
    wrong[1, 33, 1] *= 1.1
    found = [row for row in judged.rows(name, wrong) if not row.passed]
    assert [(row.sequence, row.head) for row in found] == [(1, 1)]
    assert "row" in found[0].finding


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_but_numbers_passes(judged, name, value):
    wrong = judged.got[name].clone()
    wrong.view(-1)[5] = value
    rows = judged.rows(name, wrong)
    assert sum(not row.passed for row in rows) == 1
    bad = summarise(rows).worst
    assert "NaN or Inf" in bad.finding
    assert bad.norms.relative_l2 == math.inf
    assert bad.norms.cosine is None


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_broken_yardstick_hides_nothing(judged, value):
    """Zero gradients fail beside a yardstick that is no number, huge, or zero itself."""
    broken = torch.full_like(judged.got["dq"], value)
    zero = torch.zeros_like(broken)
    for yardstick in (broken, zero):
        assert not any(row.passed for row in judged.rows("dq", zero, yardstick))
    assert all(row.passed for row in judged.rows("dq", None, torch.full_like(broken, math.nan)))


def test_places_that_carry_nothing_must_be_exactly_zero():
    """Padding, gaps, tails, holes, keys that nobody sees: one stray value in any of them is found."""
    tried = dict.fromkeys(("out", "lse", "dq", "dk", "dv"), 0)
    for seed in range(12):
        case = generate(seed)
        judged = Judged(case.problem, case.inputs, case.dout, "reference")
        for name in tried:
            exact = -math.inf if name == "lse" else 0.0
            nothing = judged.magnitudes[name].bound == 0
            if name == "lse":
                nothing = judged.oracle[name] == exact
            assert (judged.got[name][nothing] == exact).all()
            for at in nothing.nonzero()[:: max(1, int(nothing.sum()) // 4)].tolist():
                wrong = judged.got[name].clone()
                wrong[tuple(at)] = 1e-30
                bad = [row for row in judged.rows(name, wrong) if not row.passed]
                assert len(bad) == 1, (seed, name, at)
                assert f"1 not {exact:g}" in bad[0].finding
                tried[name] += 1
    assert all(count > 10 for count in tried.values()), tried


def test_dbias_and_dsink_are_judged_per_head():
    problem, inputs, dout = dense(50, bias="post_scale", softmax="learnable", dtype="float32")
    judged = Judged(problem, inputs, dout, "reference")
    for name in ("dbias", "dsoftmax_offset"):
        rows = judged.rows(name)
        assert [(r.sequence, r.head, r.passed) for r in rows] == [(None, h, True) for h in range(4)]
        wrong = judged.got[name].clone()
        wrong[(0, 2) if name == "dbias" else 2] *= 1.001
        assert [r.head for r in judged.rows(name, wrong) if not r.passed] == [2]
    shared = dataclasses.replace(inputs, bias=inputs.bias[:, :1])
    problem = dataclasses.replace(problem, bias_shape=(1, 1, 40, 40))
    rows = Judged(problem, shared, dout, "reference").rows("dbias")
    assert [(r.sequence, r.head, r.passed) for r in rows] == [(None, None, True)]


def test_gradients_that_cancel_are_held_against_the_floor():
    """With equal keys dq is pure rounding: no cosine, no alarm, but still a budget."""
    problem, inputs, dout = dense(60, s=8, t=3, dtype="bfloat16")
    inputs = dataclasses.replace(inputs, k=inputs.k[:, :1].expand_as(inputs.k).contiguous())
    judged = Judged(problem, inputs, dout, "reference")
    assert 0 < judged.oracle["dq"].norm() < 1e-12
    for row in judged.rows("dq"):
        assert row.passed
        assert row.norms.cosine is None
        assert row.norms.norm_ratio is None
        assert row.resolution > 1.0
    noise = draw(0, *judged.got["dq"].shape) * 0.3
    assert not any(row.passed for row in judged.rows("dq", judged.got["dq"] + noise))
    assert all(row.norms.cosine > 0.99 for row in judged.rows("dv"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_an_oracle_that_is_rounding_has_no_direction(dtype):
    """Over all keys dS adds up to 0, so a bias that is broadcast over them has gradient 0."""
    problem, inputs, dout = dense(61, s=60, bias="post_scale", dtype=dtype)
    inputs = dataclasses.replace(inputs, bias=inputs.bias[:, :, :, :1])
    problem = dataclasses.replace(problem, bias_shape=(1, 4, 60, 1))
    judged = Judged(problem, inputs, dout, "reference")
    for row in judged.rows("dbias"):
        assert row.passed
        assert row.projection == Share(0.0, math.inf)
        assert row.norms.cosine is None
    assert not any(row.passed for row in judged.rows("dbias", 1.0 + judged.got["dbias"]))


def test_summary_names_the_worst_head_and_the_whole(judged):
    wrong = judged.got["dq"].clone()
    wrong[1, :, 3] *= 2.0
    summary = summarise(judged.rows("dq", wrong))
    assert (summary.tensor, summary.worst.sequence, summary.worst.head) == ("dq", 1, 3)
    right = judged.oracle["dq"]
    error = (wrong.double() - right).norm() / right.norm()
    cosine = (wrong.double() * right).sum() / wrong.double().norm() / right.norm()
    assert summary.norms.relative_l2 == pytest.approx(error.item())
    assert summary.norms.cosine == pytest.approx(cosine.item())
    assert summary.norms.norm_ratio == pytest.approx((wrong.double().norm() / right.norm()).item())
    assert summary.norms.budget < 0.05
    assert len(summary.rows) == 8


def test_resolution_is_kept(judged):
    """A factor just over what a row promises to see is seen."""
    for name in ("dq", "dk", "dv"):
        for row in judged.rows(name):
            assert row.resolution < factor(judged) - 1
            got = judged.got[name].double()
            got[row.sequence, :, row.head] *= 1 + 1.01 * row.resolution
            again = judged.rows(name, got)
            assert [(r.sequence, r.head) for r in again if not r.passed] == [
                (row.sequence, row.head)
            ]


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
def test_rows_follow_the_layout(layout):
    """Every (sequence, head) with places has its row, and the rest of the storage one."""
    seen = 0
    for seed in range(40):
        case = generate(seed)
        if case.problem.layout != layout:
            continue
        judged = Judged(case.problem, case.inputs, case.dout, "unfused")
        rows = judged.rows("dq")
        expected = [n for n, side in enumerate(case.meaning.sides_q) if side.length]
        heads = case.problem.num_heads
        inside = [(row.sequence, row.head) for row in rows if row.sequence is not None]
        assert inside == [(n, h) for n in expected for h in range(heads)]
        places = sum(side.length for side in case.meaning.sides_q)
        total = canonical(case.dout, layout).shape[:2].numel()
        assert (len(rows) - len(inside) == 1) == (places < total)
        seen += 1
    assert seen > 5


def test_eps_is_that_of_the_returned_dtype():
    problem, *_ = dense(1, dtype="bfloat16")
    assert eps_of(problem, "dq") == 2.0**-7
    assert eps_of(problem, "lse") == 2.0**-23
    assert eps_of(dense(1)[0], "lse") == 2.0**-51  # the oracle rounds too


def test_tf32_is_judged_as_tf32():
    problem, *_ = dense(1, dtype="float32", allow_tf32=True)
    assert eps_of(problem, "dq") == eps_of(problem, "lse") == 2.0**-10


def test_share_of_nothing():
    assert Share(0.0, 0.0).used == 0.0
    assert Share(1e-300, 0.0).used == math.inf


def test_norms_add_up():
    parts = [Norms(3.0, 4.0, 1.0, 12.0, 0.0, 2.0), Norms(4.0, 3.0, 1.0, 12.0, 0.0, 2.0)]
    whole = Norms.of(parts)
    assert (whole.oracle, whole.got, whole.dot) == (5.0, 5.0, 24.0)
    assert whole.cosine == pytest.approx(24 / 25)
    assert Norms(0.0, 0.0, 0.0, 0.0, 0.0, 0.0).relative_l2 == 0.0
    assert Norms(0.0, 1.0, 1.0, 0.0, 0.0, 0.0).relative_l2 == math.inf


def test_contradictions_are_named(judged):
    with pytest.raises(InvalidProblem, match=r"shapes of dq .*\[2, 64, 4, 32\], expected equal"):
        judged.rows("dq", judged.got["dk"])
    with pytest.raises(InvalidProblem, match="rows is empty"):
        summarise([])


def test_row_is_data(judged):
    """Frozen, and comparable by value."""
    row = judged.rows("dq")[0]
    assert row == dataclasses.replace(row)
    assert isinstance(row, Row)
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.tensor = "dk"
