"""The keep mask: published vectors of Philox-4x32-10, a scalar generator, statistics, independence of tiling."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtruth.core.dropout import keep_mask, philox, threshold

WORD = 2**32


def scalar_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox-4x32-10 of Salmon et al. (SC 2011) in Python ints."""
    c, (k0, k1) = list(counter), key
    for round_ in range(10):
        if round_:
            k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
        high0, low0 = divmod(0xD2511F53 * c[0], WORD)
        high1, low1 = divmod(0xCD9E8D57 * c[2], WORD)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
    return tuple(c)


def scalar_keep(p: float, seed: int, n: int, h: int, i: int, j: int) -> bool:
    """Kept when word j & 3 of counter (j >> 2, i, h, n) is at least floor(p * 2^32)."""
    bits = seed % 2**64
    word = scalar_philox((j >> 2, i, h, n), (bits % WORD, bits // WORD))[j & 3]
    return word >= int(Fraction(p) * WORD)


def signed(bits: int) -> torch.Tensor:
    """64 bits as an int64 tensor."""
    return torch.tensor(bits - 2**64 if bits >= 2**63 else bits)


# Random123 1.14, tests/kat_vectors, philox 4x32 10.
KNOWN = {
    "zeros": ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((WORD - 1,) * 4, (WORD - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name):
    counter, key, expected = KNOWN[name]
    assert scalar_philox(counter, key) == expected
    words = philox(tuple(torch.tensor(c) for c in counter), signed(key[0] + key[1] * WORD))
    assert tuple(w.item() for w in words) == expected
    assert {w.dtype for w in words} == {torch.int64}


words = st.integers(0, WORD - 1) | st.sampled_from([0, 1, 2**31 - 1, 2**31, WORD - 1])


@settings(max_examples=100, deadline=None)
@given(counter=st.tuples(words, words, words, words), key=st.tuples(words, words))
def test_philox_is_the_scalar_generator(counter, key):
    found = philox(tuple(torch.tensor([c]) for c in counter), signed(key[0] + key[1] * WORD))
    assert tuple(w.item() for w in found) == scalar_philox(counter, key)


SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_keep_mask_is_the_scalar_rule(seed, dtype):
    shape = (2, 3, 3, 9)
    n, h, i, j = (
        torch.arange(size, dtype=dtype).view([-1 if d == axis else 1 for d in range(4)])
        for axis, size in enumerate(shape)
    )
    kept = keep_mask(0.4, torch.tensor(seed), n, h, i, j)
    assert kept.dtype == torch.bool
    assert kept.shape == shape
    for at in itertools.product(*map(range, shape)):
        assert kept[at].item() == scalar_keep(0.4, seed, *at), at


index = st.integers(0, 2**31 - 1)


@settings(max_examples=100, deadline=None)
@given(
    p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    at=st.tuples(index, index, index, index),
)
def test_keep_mask_at_any_index(p, seed, at):
    places = (torch.tensor(x, dtype=torch.int32) for x in at)
    assert keep_mask(p, torch.tensor(seed), *places).item() == scalar_keep(p, seed, *at)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.0, 0),
        (1.0, WORD),
        (0.5, 2**31),
        (2.0**-32, 1),
        (2.0**-33, 0),
        (1 - 2.0**-33, WORD - 1),
        (0.1, 429496729),
    ],
)
def test_threshold_is_the_floor(p, expected):
    assert threshold(p) == expected


@pytest.mark.parametrize("lane", range(4))
def test_a_word_at_the_threshold_is_kept(lane):
    word = KNOWN["zeros"][2][lane]
    places = [torch.tensor(x) for x in (0, 0, 0, lane)]
    zero = torch.tensor(0)
    assert keep_mask(word / WORD, zero, *places).item()
    assert not keep_mask((word + 1) / WORD, zero, *places).item()


def drawn(p: float, seed: int, sizes: tuple[int, int, int, int] = (2, 4, 64, 128)) -> torch.Tensor:
    return keep_mask(
        p,
        torch.tensor(seed),
        torch.arange(sizes[0])[:, None, None, None],
        torch.arange(sizes[1])[:, None, None],
        torch.arange(sizes[2])[:, None],
        torch.arange(sizes[3]),
    )


def test_nothing_is_dropped_at_0_and_everything_at_1():
    assert drawn(0.0, 3).all()
    assert not drawn(1.0, 3).any()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_kept_share_is_one_minus_p(p):
    kept = drawn(p, 20240607).double()
    # 4.5 standard deviations, of the whole and of every lane, row, head and sequence alone.
    for dims in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        share = kept.mean(dims)
        count = kept.numel() / share.numel()
        assert ((share - (1 - p)).abs() < 4.5 * (p * (1 - p) / count) ** 0.5).all(), dims


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    """Standard deviations between the share of equal places and the half that independence gives."""
    return abs((a == b).double().mean().item() - 0.5) * 2 * a.numel() ** 0.5


def test_neighbours_and_seeds_are_independent():
    kept = drawn(0.5, 11)
    pairs = {
        "sequences": (kept[:1], kept[1:]),
        "heads": (kept[:, :-1], kept[:, 1:]),
        "queries": (kept[:, :, :-1], kept[:, :, 1:]),
        "keys": (kept[..., :-1], kept[..., 1:]),
        "keys four apart": (kept[..., :-4], kept[..., 4:]),
        "queries and keys": (kept[..., :64], kept[..., :64].transpose(2, 3)),
        "low half of the seed": (kept, drawn(0.5, 12)),
        "high half of the seed": (kept, drawn(0.5, 11 + 2**32)),
        "sign of the seed": (kept, drawn(0.5, 11 - 2**63)),
    }
    for name, (a, b) in pairs.items():
        assert agreement(a, b) < 4.5, name


@settings(max_examples=60, deadline=None)
@given(origin=st.tuples(*[st.integers(0, 2**31 - 20)] * 4), cut=st.tuples(*[st.integers(0, 6)] * 4))
def test_a_tile_draws_what_the_whole_draws(origin, cut):
    sizes = (2, 2, 3, 6)
    whole = [
        (start + torch.arange(size)).view([-1 if d == axis else 1 for d in range(4)])
        for axis, (start, size) in enumerate(zip(origin, sizes, strict=True))
    ]
    seed = torch.tensor(77)
    full = keep_mask(0.3, seed, *whole)
    part = [
        at.narrow(d, min(cut[d], sizes[d]), sizes[d] - min(cut[d], sizes[d]))
        for d, at in enumerate(whole)
    ]
    rows = tuple(slice(min(cut[d], sizes[d]), None) for d in range(4))
    assert torch.equal(keep_mask(0.3, seed, *part), full[rows])
