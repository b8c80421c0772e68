"""The merge and the sink against the softmax of the definition, row by row in Python floats."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from gradtruth.core.merge import apply_sink, merge, sink_gradient

EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}
B, S, H, DV = 2, 3, 2, 4


def partial(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, S, H, Dv] and lse [B, H, S] of scores [B, H, S, K] (-inf = hidden) and values [B, H, K, Dv]."""
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return (weights @ values).transpose(1, 2).contiguous(), lse


def scalar_row(scores: list[float], values: list[list[float]], sink: float | None = None):
    """out, lse and sum of weight * |value| of one row, by the definition."""
    terms = [s for s in scores if s != -math.inf] + ([] if sink is None else [sink])
    if not terms:
        return [0.0] * len(values[0]), -math.inf, [0.0] * len(values[0])
    top = max(terms)
    total = math.fsum(math.exp(t - top) for t in terms)
    weights = [0.0 if s == -math.inf else math.exp(s - top) / total for s in scores]
    columns = list(zip(*values, strict=True))
    out = [math.fsum(w * x for w, x in zip(weights, column, strict=True)) for column in columns]
    size = [
        math.fsum(w * abs(x) for w, x in zip(weights, column, strict=True)) for column in columns
    ]
    return out, top + math.log(total), size


def random_keys(count: int, spread: float, seed: int = 0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, H, S, count, generator=generator, dtype=dtype) * spread
    return scores, torch.randn(B, H, count, DV, generator=generator, dtype=dtype)


def assert_is_softmax(
    out: Tensor, lse: Tensor, scores: Tensor, values: Tensor, slack: float, sink=None
):
    """out within slack * eps of the sum of weight * |value|, lse within 32 eps of its size."""
    eps = EPS[out.dtype]
    for b, h, i in itertools.product(range(B), range(H), range(S)):
        logit = None if sink is None else sink[h].item()
        row, log, size = scalar_row(scores[b, h, i].tolist(), values[b, h].tolist(), logit)
        found = out[b, i, h].tolist()
        for d in range(DV):
            assert abs(found[d] - row[d]) <= slack * eps * size[d], (b, h, i, d)
        if math.isinf(log):
            assert lse[b, h, i].item() == log
        else:
            assert abs(lse[b, h, i].item() - log) <= 32 * eps * max(1.0, abs(log)), (b, h, i)


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_two_halves_make_the_whole_in_fp64(spread):
    scores, values = random_keys(9, spread)
    parts = [partial(scores[..., a:b], values[..., a:b, :]) for a, b in ((0, 4), (4, 9))]
    out, lse = merge(*parts[0], *parts[1])
    assert out.dtype == lse.dtype == torch.float64
    assert_is_softmax(out, lse, scores, values, slack=32)
    other_out, other_lse = merge(*parts[1], *parts[0])
    assert torch.equal(lse, other_lse)
    assert torch.equal(out, other_out)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
@pytest.mark.parametrize("gap", [0.0, 3.0, 80.0, 2e4])
def test_large_logits_neither_overflow_nor_vanish(offset, gap):
    scores, values = random_keys(6, 1.0)
    scores = scores + offset
    scores[..., 3:] -= math.copysign(gap, offset)
    parts = [partial(scores[..., a:b], values[..., a:b, :]) for a, b in ((0, 3), (3, 6))]
    out, lse = merge(*parts[0], *parts[1])
    # exp turns the rounding of a score of 1e4 into a relative error of 1e4 * eps.
    assert_is_softmax(out, lse, scores, values, slack=1e5)
    single = [(a.float(), b.float()) for a, b in parts]
    out, lse = merge(*single[0], *single[1])
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


def test_hidden_keys_and_rows_of_every_kind():
    scores, values = random_keys(8, 2.0)
    scores[0, 0, 0, :4] = -math.inf  # empty on the left
    scores[0, 1, 1, 4:] = -math.inf  # empty on the right
    scores[1, 0, 2] = -math.inf  # empty on both
    scores[1, 1, 0, 2:6] = -math.inf
    left, right = (
        partial(scores[..., :4], values[..., :4, :]),
        partial(scores[..., 4:], values[..., 4:, :]),
    )
    out, lse = merge(*left, *right)
    assert_is_softmax(out, lse, scores, values, slack=32)
    assert torch.equal(out[0, 0, 0], right[0][0, 0, 0])
    assert lse[0, 0, 0] == right[1][0, 0, 0]
    assert torch.equal(out[0, 1, 1], left[0][0, 1, 1])
    assert lse[0, 1, 1] == left[1][0, 1, 1]
    assert lse[1, 0, 2] == -math.inf
    assert not out[1, 2, 0].any()


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_an_empty_side_may_hold_anything(dtype, poison):
    """The other side comes through bit for bit, the sign of zero included; empty on both sides is 0."""
    full = torch.full((1, 1, 2, 3), poison, dtype=dtype)
    out = torch.tensor([0.0, -0.0, 1 / 3], dtype=dtype).expand(1, 1, 2, 3)
    lse = torch.tensor([[[0.7], [-900.0]]], dtype=dtype)
    empty = torch.full_like(lse, -math.inf)
    for found, log in (merge(full, empty, out, lse), merge(out, lse, full, empty)):
        assert torch.equal(found, out)
        assert torch.equal(torch.signbit(found), torch.signbit(out))
        assert torch.equal(log, lse)
    found, log = merge(full, empty, full, empty)
    assert torch.equal(found, torch.zeros_like(found))
    assert torch.equal(log, empty)


@pytest.mark.parametrize("left", [True, False])
def test_a_nan_in_a_side_that_has_keys_is_not_hidden(left):
    good, bad = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1, 2), math.nan)
    lse = torch.zeros(1, 1, 1)
    for other_out, other_lse in ((bad, lse), (good, lse * math.nan), (bad, lse - 500)):
        sides = (
            ((other_out, other_lse), (good, lse)) if left else ((good, lse), (other_out, other_lse))
        )
        out, log = merge(*sides[0], *sides[1])
        assert out.isnan().all()
        assert torch.equal(log.isnan(), other_lse.isnan())


def test_a_large_output_of_small_weight_does_not_cancel():
    """The error is relative to the sum of weight * |out|, not to the larger of the two outputs."""
    out, other_out = torch.full((1, 1, 1, 1), 1e6), torch.full((1, 1, 1, 1), 1.0)
    lse, other_lse = torch.full((1, 1, 1), -20.0), torch.zeros(1, 1, 1)
    weight = math.exp(-20.0) / (1 + math.exp(-20.0))
    expected = 1e6 * weight + (1 - weight)
    for found, _ in (merge(out, lse, other_out, other_lse), merge(other_out, other_lse, out, lse)):
        assert abs(found.item() - expected) <= 4 * EPS[torch.float32] * expected


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_the_order_of_three_tiles_does_not_matter(dtype, spread):
    scores, values = random_keys(9, spread, seed=3)
    scores[0, 0, 0, 3:6] = -math.inf
    scores[1, 1, 1, :6] = -math.inf
    parts = []
    for a in (0, 3, 6):
        out, lse = partial(scores[..., a : a + 3], values[..., a : a + 3, :])
        parts.append((out.to(dtype), lse.to(dtype)))
    bound = scores.abs().masked_fill(scores == -math.inf, 0.0).amax().item()
    for a, b, c in itertools.permutations(parts):
        out, lse = merge(*merge(*a, *b), *c)
        assert_is_softmax(out, lse, scores, values, slack=8 * (1 + bound))
        nested_out, nested_lse = merge(*a, *merge(*b, *c))
        assert_is_softmax(nested_out, nested_lse, scores, values, slack=8 * (1 + bound))


# ------------------------------------------------------------------ the sink


def sink_case(spread: float = 2.0):
    scores, values = random_keys(5, spread, seed=5)
    scores[0, 1, 0] = -math.inf
    return scores, values, torch.tensor([0.0, -1.5], dtype=torch.float64)


@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_sink_enters_the_denominator(spread):
    scores, values, sink = sink_case(spread)
    out, lse = apply_sink(*partial(scores, values), sink, torch.ones(B, S, dtype=torch.bool))
    assert_is_softmax(out, lse, scores, values, slack=32, sink=sink)
    # A valid row without keys: out 0, lse the sink.
    assert lse[0, 1, 0] == sink[1]
    assert not out[0, 0, 1].any()


@pytest.mark.parametrize("alpha", [-1e4, 1e4, -math.inf, math.inf])
def test_extreme_sinks(alpha):
    scores, values, _ = sink_case()
    out, lse = partial(scores, values)
    sink = torch.full((H,), alpha, dtype=torch.float64)
    found, log = apply_sink(out, lse, sink, torch.ones(B, S, dtype=torch.bool))
    if alpha < 0:
        assert torch.equal(found, out)
        assert torch.equal(log, lse.clamp(min=alpha))
    else:
        assert not found.any()
        assert (log == alpha).all()


def test_rows_outside_every_sequence_get_no_sink():
    scores, values, sink = sink_case()
    valid = torch.tensor([[True, True, False], [False, True, True]])
    out, lse = partial(scores, values)
    rows = ~valid.unsqueeze(1).expand(B, H, S)
    lse = lse.masked_fill(rows, -math.inf)
    out = out.masked_fill(rows.transpose(1, 2).unsqueeze(-1), math.nan)
    found, log = apply_sink(out, lse, sink, valid)
    assert (log[rows] == -math.inf).all()
    assert not found.transpose(1, 2)[rows].any()
    assert torch.isfinite(found).all()
    whole, whole_lse = apply_sink(
        *partial(scores, values), sink, torch.ones(B, S, dtype=torch.bool)
    )
    assert torch.equal(found[valid], whole[valid])
    assert torch.equal(log[~rows], whole_lse[~rows])


def test_dtypes_of_out_and_lse_are_kept():
    scores, values, sink = sink_case()
    out, lse = partial(scores, values)
    found, log = apply_sink(
        out.bfloat16(), lse.float(), sink.float(), torch.ones(B, S, dtype=torch.bool)
    )
    assert (found.dtype, log.dtype) == (torch.bfloat16, torch.float32)


def test_a_sink_after_the_merge_is_the_sink_of_the_whole():
    scores, values, sink = sink_case()
    halves = [partial(scores[..., a:b], values[..., a:b, :]) for a, b in ((0, 2), (2, 5))]
    valid = torch.ones(B, S, dtype=torch.bool)
    out, lse = apply_sink(*merge(*halves[0], *halves[1]), sink, valid)
    assert_is_softmax(out, lse, scores, values, slack=32, sink=sink)


def test_sink_gradient_is_that_of_the_definition():
    """Against autograd of the scalar definition, through out and lse; rows without keys add 0, also with dlse."""
    scores, values, alpha = sink_case()
    generator = torch.Generator().manual_seed(8)
    dout = torch.randn(B, S, H, DV, generator=generator, dtype=torch.float64)
    dlse = torch.randn(B, H, S, generator=generator, dtype=torch.float64)
    valid = torch.ones(B, S, dtype=torch.bool)
    out, lse = apply_sink(*partial(scores, values), alpha, valid)
    seen = (scores > -math.inf).any(-1)

    sink = alpha.clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for b, h, i in itertools.product(range(B), range(H), range(S)):
        if seen[b, h, i]:
            denominator = scores[b, h, i].exp().sum() + sink[h].exp()
            row = (scores[b, h, i].exp() / denominator) @ values[b, h]
            loss = loss + row @ dout[b, i, h] + denominator.log() * dlse[b, h, i]
    (expected,) = torch.autograd.grad(loss, sink)

    delta = (dout * out).sum(-1).transpose(1, 2) - dlse
    found = sink_gradient(lse, delta, alpha, seen)
    assert found.shape == (H,)
    assert (found - expected).abs().max() < 1e-13

    # Whatever stands in rows without a visible key does not reach the gradient.
    delta[~seen], lse[~seen] = math.nan, -math.inf
    assert torch.equal(sink_gradient(lse, delta, alpha, seen), found)
    lse[~seen], delta[~seen] = math.nan, math.inf
    assert torch.equal(sink_gradient(lse, delta, alpha, seen), found)
    assert not sink_gradient(lse, delta, alpha, torch.zeros_like(seen)).any()
    assert sink_gradient(lse.float(), delta.float(), alpha, seen).dtype == torch.float32


def test_scalar_sink_gradient():
    """One row by hand: dsink = -p_sink * delta."""
    lse, delta = torch.tensor([[[1.25]]]), torch.tensor([[[0.5]]])
    found = sink_gradient(lse, delta, torch.tensor([0.25]), torch.ones(1, 1, 1, dtype=torch.bool))
    assert found.item() == pytest.approx(-math.exp(-1.0) * 0.5, rel=2e-7)
