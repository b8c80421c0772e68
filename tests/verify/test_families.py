from __future__ import annotations

import math

import pytest
import torch

from gradtruth.errors import InvalidProblem
from gradtruth.verify.suite.families import FAMILIES, noise, values

SHAPE = (2, 7, 3, 8)
MASK = (1 << 64) - 1


def splitmix(n: int) -> float:
    """One value of H, in Python's own integers."""
    z = n * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    z ^= z >> 31
    return (2 * (z >> 11) / 2**53 - 1) * math.sqrt(3)


@pytest.mark.parametrize("seed", [0, 1, 5, 2**45, -3])
def test_noise_is_splitmix64_of_the_flat_index(seed):
    found = noise(seed, 3, 5)
    expected = [splitmix(n + seed * 1000003 & MASK) for n in range(1, 16)]
    assert found.dtype == torch.float64
    assert found.flatten().tolist() == expected


def test_noise_has_mean_0_and_variance_1():
    found = noise(1, 100_000)
    assert found.abs().max() < 1.74
    assert found.mean().abs() < 0.01
    assert (found.var() - 1).abs() < 0.01


def test_closed_form_streams_are_those_of_the_reports():
    for role, seed in (("q", 1), ("k", 2), ("v", 3), ("dout", 4), ("bias", 5)):
        assert torch.equal(values("closed_form", role, SHAPE, 0), noise(seed, *SHAPE))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_pure_finite_and_other_for_other_seeds_and_roles(family):
    first = values(family, "k", SHAPE, 3)
    assert first.shape == SHAPE
    assert first.isfinite().all()
    assert torch.equal(first, values(family, "k", SHAPE, 3))
    assert not torch.equal(first, values(family, "k", SHAPE, 4))
    assert not torch.equal(first, values(family, "q", SHAPE, 3))


def test_heterogeneous_differs_between_sequences_heads_and_rows():
    x = values("heterogeneous", "q", (3, 400, 4, 16), 7)
    rms = x.square().mean((1, 3)).sqrt()
    assert rms.max() / rms.min() > 2
    assert len({round(float(m), 6) for m in x.mean((1, 3)).flatten()}) == 12
    inner = x - x.mean(1, keepdim=True)
    rows = inner.square().mean(3).sqrt()
    assert rows[0, :, 0].max() / rows[0, :, 0].min() > 2


def test_outliers_are_channels_of_q_and_k_alone():
    for role, largest in (("q", 4.0), ("k", 12.0), ("v", 0.0)):
        plain = values("heterogeneous", role, SHAPE, 2)
        moved = (values("outlier", role, SHAPE, 2) - plain).abs().amax((1, 2))
        assert ((moved > 0).sum(-1) == (0 if role == "v" else 3)).all()
        assert (moved.amax(-1) >= largest).all()


def test_repeated_keys_have_period_three():
    k = values("repeated_keys", "k", SHAPE, 2)
    assert torch.equal(k[:, 3:], k[:, :-3])
    assert not torch.equal(k[:, 1:], k[:, :-1])


def test_large_offset_and_peaked_are_what_they_say():
    k, v = (values("large_offset", role, SHAPE, 2) for role in ("k", "v"))
    assert k.mean() > 3
    assert v.mean() > 6
    ratio = values("peaked", "q", SHAPE, 2) / values("heterogeneous", "q", SHAPE, 2)
    assert torch.allclose(ratio, torch.full_like(ratio, 4.0))


def test_unknown_names_are_refused():
    with pytest.raises(InvalidProblem, match="family is 'x'"):
        values("x", "q", SHAPE, 0)
    with pytest.raises(InvalidProblem, match="role is 'x'"):
        values("gaussian", "x", SHAPE, 0)
