"""Bound and spread against attention whose every rounding is drawn at random."""

from dataclasses import replace

import pytest
import torch
from tests.oracle.dense import by_head, dense, heterogeneous, scores
from tests.oracle.problems import generate

from gradtruth.verify.truth import oracle
from gradtruth.verify.truth.rounding import rounding_of

EPS = 1e-7


class Rounder:
    """Errors of half an EPS with random signs.

    ``coarse`` leaves out what a bf16 problem computes in fp32; ``partial`` rounds partial sums of products too.
    """

    def __init__(self, seed, *, coarse=False, partial=False):
        self.generator = torch.Generator().manual_seed(seed)
        self.coarse, self.partial = coarse, partial

    def fine(self, size):
        """An error of the accumulate dtype."""
        return torch.zeros_like(size) if self.coarse else self.by(size)

    def product(self, a, b):
        """a @ b, summed from left to right."""
        result = a @ b
        if self.partial and not self.coarse:
            terms = a.unsqueeze(-1) * b.unsqueeze(-3)
            partial = terms.cumsum(-2) * (terms != 0)  # adding 0 is exact
            result = result + self.by(partial.abs()).sum(-2)
        return result

    def by(self, size):
        sign = torch.randint(0, 2, size.shape, generator=self.generator).double() * 2 - 1
        return sign * size.masked_fill(size.isinf(), 0.0) * (EPS / 2)

    def __call__(self, x):
        return x + self.by(x.abs())


def rounded(problem, inputs, dout, rounder, given=None):
    """out, lse, dq, dk, dv of a dense problem, with an error wherever the contract rounds in fp32."""
    heads, scale = problem.num_heads, problem.scale
    q, k, v = (by_head(x.double(), heads) for x in (inputs.q, inputs.k, inputs.v))
    dout = dout.double().transpose(1, 2)
    x, _ = rounded_scores(problem, q, k, rounder)
    exact = torch.logsumexp(x, -1)
    lse = exact + rounder.fine(exact.abs() + 1)
    p = torch.exp(x - exact[..., None])
    out = rounder(rounder.product(rounder(p), v))
    if given is not None:
        out, lse = given[0].transpose(1, 2), given[1]
    # A backward computes its scores anew, and may round them otherwise.
    x, slope = rounded_scores(problem, q, k, rounder)
    p = torch.exp(x - lse[..., None])
    p = p + rounder.fine(p)
    delta = (dout * out).sum(-1) + rounder.fine((dout * out).abs().sum(-1))
    dp = dout @ v.mT + rounder.fine(dout.abs() @ v.mT.abs())
    ds = rounder(p * (dp - delta[..., None])) * slope

    def grouped(x):
        return x.transpose(1, 2).unflatten(2, (problem.num_gqa_groups, -1)).sum(3)

    return {
        "out": out.transpose(1, 2),
        "lse": lse,
        "dq": rounder(rounder.product(scale * ds, k)).transpose(1, 2),
        "dk": rounder(grouped(rounder.product(scale * ds.mT, q))),
        "dv": rounder(grouped(rounder.product(rounder(p).mT, dout))),
    }


def rounded_scores(problem, q, k, rounder):
    """Final scores and the softcap's derivative."""
    cap = problem.spec.softcap
    x = problem.scale * (rounder.product(q, k.mT) + rounder.fine(q.abs() @ k.mT.abs()))
    x = x + rounder.fine(2 * x.abs())
    slope = torch.ones_like(x)
    if cap is not None:
        tanh = torch.tanh(x / cap)
        x, slope = cap * (tanh + rounder.fine(tanh.abs())), 1 - tanh * tanh
        slope = slope + rounder.fine(torch.full_like(slope, 2.0))
    if problem.spec.right == 0:
        x = x.masked_fill(torch.ones(x.shape[-2:]).triu(1).bool(), -torch.inf)
    return x, slope


def offset(seed, *shape):
    """Keys, values and gradients far from 0: what a row shares adds up."""
    return 6.0 + heterogeneous(seed, *shape)


SETTINGS = [
    {},
    {"right": 0},
    {"s": 1, "t": 50},
    {"s": 30, "t": 2, "d": 3},
    {"softcap": 1.0},
    {"softcap": 0.2},
    {"right": 0, "scale": 8.0},
    {"right": 0, "g": 1, "dv": 5},
    {"make": offset, "scale": 0.1},
    {"make": offset, "right": 0, "scale": 0.1},
]
BOTH = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def name_of(setting):
    return ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in setting.items()) or "plain"


def setup(setting, dtype):
    """A problem whose values are exact in ``dtype``, its oracle and magnitudes."""
    problem, inputs, dout = dense(17, dtype=dtype, **setting)
    found, grads = oracle.evaluate(problem, inputs, dout)
    values = dict(found.items()) | dict(grads.items())
    return problem, inputs, dout, values, found.magnitudes | grads.magnitudes


@BOTH
@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_no_rounding_leads_beyond_the_bound(setting, dtype):
    problem, inputs, dout, values, magnitudes = setup(setting, dtype)
    for trial in range(8):
        rounder = Rounder(trial, coarse=dtype == "bfloat16")
        for name, x in rounded(problem, inputs, dout, rounder).items():
            allowed = EPS / 2 * magnitudes[name].bound * (1 + 1e-3)
            if name != "lse" or dtype == "float32":
                assert ((x - values[name]).abs() <= allowed).all(), name


@BOTH
@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_spread_is_the_size_of_the_errors(setting, dtype):
    """Neither under it nor far over it."""
    problem, inputs, dout, values, magnitudes = setup(setting, dtype)
    squares, trials = dict.fromkeys(values, 0.0), 6
    for trial in range(trials):
        rounder = Rounder(trial, coarse=dtype == "bfloat16", partial=True)
        for name, x in rounded(problem, inputs, dout, rounder).items():
            squares[name] += (x - values[name]).square().sum() / trials
    for name, square in squares.items():
        if name != "lse" or dtype == "float32":
            share = square.sqrt() / (EPS / 2 * magnitudes[name].spread.norm())
            assert 0.55 < share < 1.15, name


@pytest.mark.parametrize("setting", [{}, {"scale": 8.0, "right": 0}], ids=name_of)
def test_spread_of_gradients_from_a_given_forward(setting):
    """Only the backward's own roundings are in it."""
    problem, inputs, dout = dense(17, dtype="float32", **setting)
    found = oracle.forward(problem, inputs)
    given = found.out, found.lse
    grads = oracle.backward(problem, inputs, dout, forward=given)
    squares, trials = {"dq": 0.0, "dk": 0.0, "dv": 0.0}, 6
    for trial in range(trials):
        result = rounded(problem, inputs, dout, Rounder(trial, partial=True), given)
        for name in squares:
            error = result[name] - getattr(grads.grads, name)
            squares[name] += error.square().sum() / trials
    for name, square in squares.items():
        share = square.sqrt() / (EPS / 2 * grads.magnitudes[name].spread.norm())
        assert 0.55 < share < 1.05, name


@pytest.mark.parametrize("seed", range(60))
def test_bound_covers_spread_and_value(seed):
    """In every feature; and where nothing contributes, all three are exactly 0."""
    case = generate(seed)
    found, grads = oracle.evaluate(case.problem, case.inputs, case.dout, case.dlse)
    for result in (found, grads):
        for name, value in result.items():
            magnitude = result.magnitudes[name]
            size = value.abs().masked_fill(value.isinf(), 0.0)
            assert (magnitude.bound >= size).all(), name
            assert (magnitude.spread >= 0).all()
            nothing = magnitude.bound == 0
            assert torch.equal(nothing, magnitude.spread == 0), name
            assert (size[nothing] == 0).all()


def test_bf16_scores_round_in_fp32():
    """A bf16 problem pays eps for P and dS and eps of fp32 for scores: its budget is not |x| times bf16."""
    settings = {"scale": 4.0, "right": 0}
    problem, inputs, dout = dense(3, dtype="bfloat16", **settings)
    assert rounding_of(problem).ratio == 2.0**-16
    grads = oracle.backward(problem, inputs, dout)
    size = scores(inputs.q.double(), inputs.k.double(), problem)
    assert size[size > -torch.inf].abs().max() > 60
    dv = grads.magnitudes["dv"].bound
    plain = by_head(dout.double(), 4).abs()
    assert (dv <= 3 * plain.sum(2).amax()).all()


def test_given_forward_has_no_error_of_its_own():
    problem, inputs, dout = dense(4, dtype="bfloat16")
    found = oracle.forward(problem, inputs)
    own = oracle.backward(problem, inputs, dout).magnitudes["dq"].spread
    given = oracle.backward(problem, inputs, dout, forward=(found.out, found.lse))
    assert given.magnitudes["dq"].spread.norm() < own.norm()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_weight_that_underflows_is_charged_for_what_it_multiplies(dtype):
    """exp2 of a GPU flushes subnormal weights: dS loses P (dP - delta), and dk that times q."""
    problem, inputs, dout = dense(6, h=2, dtype=dtype, right=0, scale=1.0)
    exponent = torch.tensor([0.0, -87.6])  # of the two weights: the second is 9e-39, a subnormal
    zero = torch.zeros_like(inputs.q)
    q, k = zero[:1, :2].clone(), inputs.k[:1, :2].clone().zero_()
    q[..., 0] = 1.0
    k[0, :, :, 0] = exponent.to(k.dtype).view(2, 1)
    q[..., 1] = 64.0
    given = replace(inputs, q=q, k=k, v=64 * inputs.v[:1, :2])
    small = replace(problem, batch=1, seqlen_q=2, seqlen_kv=2)
    dout = 64 * dout[:1, :2]
    found = oracle.backward(small, given, dout)
    dk, spread = dict(found.items())["dk"][0, 1], found.magnitudes["dk"].spread[0, 1]
    eps = rounding_of(small).unit
    assert (dk.abs() > 0).any()
    assert (dk.abs() < 1e-30).all()
    # All of it may be lost, and nothing beyond it is allowed.
    assert (eps * spread.norm() >= 0.99 * dk.norm()).all()
    bound = 2 * dk.abs().amax() + 2 * torch.finfo(small.torch_dtype).smallest_normal
    assert (eps * spread <= bound).all()
