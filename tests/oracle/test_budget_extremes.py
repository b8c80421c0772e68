"""Biases that stand for "hidden" (finfo.min), which programs take for -inf: budgets stay numbers, and stay narrow."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.oracle.dense import dense

from gradtruth.backends import get
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Wanted
from gradtruth.verify.truth import oracle
from gradtruth.verify.truth.budget import compare

S, T = 6, 7
FUTURE = torch.ones(S, T, dtype=torch.bool).triu(1)
BLIND = FUTURE | (torch.arange(S) < 3)[:, None]  # three queries see no key


def _biased(dtype, hidden, kind="post_scale", value=None, **spec):
    """A problem whose bias is ``value`` where it hides, 0 elsewhere."""
    problem, inputs, dout = dense(3, s=S, t=T, d=8, dtype=dtype, bias=kind, **spec)
    low = torch.finfo(inputs.q.dtype).min if value is None else value
    bias = torch.zeros_like(inputs.bias).masked_fill(hidden, low)
    inputs = dataclasses.replace(inputs, bias=bias)
    return Problem.of(problem.spec, inputs), inputs, dout


class Judge:
    """The results of the reference and of the yardstick on one problem."""

    def __init__(self, problem, inputs, dout):
        self.problem, self.inputs, self.dout = problem, inputs, dout
        truth, grads = oracle.evaluate(problem, inputs, dout)
        self.oracle = dict(truth.items()) | dict(grads.items())
        self.magnitudes = truth.magnitudes | grads.magnitudes
        self.yardstick, self.got = self._run("unfused"), self._run("reference")

    def _run(self, name):
        backend = get(name)
        found = backend.forward(self.problem, self.inputs)
        grads = backend.backward(self.problem, self.inputs, found, self.dout, None, Wanted())
        forward = {n: getattr(found, n) for n in ("out", "lse", "max_logit")}
        return {n: x for n, x in forward.items() if x is not None} | dict(grads.items())

    def rows(self, name, got=None):
        return compare(
            self.problem, self.inputs, name, self.got[name] if got is None else got,
            self.oracle[name], self.magnitudes[name], self.yardstick[name],
        )  # fmt: skip


def _numbers(row):
    shares = (row.element, row.line, row.rms, row.projection)
    return [*(x for share in shares for x in share), row.norms.allowed, row.norms.floor]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("hidden", [FUTURE, BLIND], ids=["some", "rows"])
@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"softcap": 3.0, "softmax": "off-by-one"},
        {"kind": "pre_scale", "max_logit": True},
        {"kind": "pre_scale", "scale": 7.0},
        {"kind": "pre_scale", "softcap": 3.0},
    ],
    ids=str,
)
def test_healthy_results_pass_and_no_budget_is_nan(dtype, hidden, spec):
    judge = Judge(*_biased(dtype, hidden, **spec))
    for name in judge.oracle:
        for row in judge.rows(name):
            assert row.passed, (name, row.finding)
            assert not any(map(math.isnan, _numbers(row))), (name, row)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_found(dtype, broken):
    judge = Judge(*_biased(dtype, BLIND))
    for name, right in judge.got.items():
        got = right.clone()
        got.view(-1)[-1] = broken
        findings = [row.finding for row in judge.rows(name, got) if not row.passed]
        assert len(findings) == 1, name
        assert findings[0].startswith(("1 NaN or Inf", "1 not 0 where nothing contributes")), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_what_is_hidden_widens_no_budget(dtype, name):
    """A factor is found with finfo.min as it is with -inf, but for the number of terms that a sum has."""
    found, expected = (
        Judge(*_biased(dtype, FUTURE, value=value)).rows(name) for value in (None, -torch.inf)
    )
    for one, other in zip(found, expected, strict=True):
        assert one.resolution == pytest.approx(other.resolution, rel=0.03)
        assert one.rms.allowed == pytest.approx(other.rms.allowed, rel=0.03)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_that_see_something_are_judged_beside_rows_that_see_nothing(dtype):
    """Of lse, whose values there are as large as the bias."""
    judge = Judge(*_biased(dtype, BLIND))
    assert judge.got["lse"][0, 1, 0] < -1e38
    got = judge.got["lse"].clone()
    got[0, 1, 4] *= 1.001
    assert [(row.sequence, row.head) for row in judge.rows("lse", got) if not row.passed] == [
        (0, 1)
    ]
    wrong = judge.got["lse"].clone()
    wrong[0, 1, 0] *= 0.999
    assert [(row.sequence, row.head) for row in judge.rows("lse", wrong) if not row.passed] == [
        (0, 1)
    ]


def test_more_than_the_dtype_holds_is_infinite():
    """lse is -7 finfo.min in truth: -inf in fp32, and nothing else."""
    judge = Judge(*_biased("float32", BLIND, "pre_scale", scale=7.0))
    assert judge.oracle["lse"][0, 0, 0] < -2e39
    got = judge.got["lse"].clone()
    for value, right in ((-torch.inf, True), (torch.inf, False), (torch.nan, False), (0.0, False)):
        got[0, 0, 0] = value
        assert judge.rows("lse", got)[0].passed is right, value
