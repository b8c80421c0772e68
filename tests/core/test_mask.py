"""Mask names and the band, against the inequality of the definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.definition import INT32_MAX, band_shows

from gradtruth.core.mask import BAND_LIMIT, MASK_TYPES, Band, MaskType, band_of, parse_mask_type
from gradtruth.errors import InvalidProblem

BOUNDS = (None, 0, 1, 2, 4)
SIZES = range(5)
DIAGONALS = range(-5, 6)


def bands() -> list[Band]:
    return [Band(left, right) for left, right in itertools.product(BOUNDS, BOUNDS)]


@pytest.mark.parametrize("band", bands(), ids=str)
def test_visible_is_the_inequality(band: Band):
    i, j = torch.arange(5, dtype=torch.int32)[:, None], torch.arange(6, dtype=torch.int32)
    for diagonal in DIAGONALS:
        expected = [
            [band_shows(band.left, band.right, diagonal, a, b) for b in range(6)] for a in range(5)
        ]
        if band.open:
            assert all(map(all, expected))
            assert band.visible(i, j, diagonal) is None
            continue
        assert band.visible(i, j, diagonal).tolist() == expected
        assert [[band.visible(a, b, diagonal) for b in range(6)] for a in range(5)] == expected


def test_visible_takes_a_diagonal_per_sequence():
    diagonal = torch.tensor([-1, 0, 2], dtype=torch.int32)[:, None, None]
    i, j = torch.arange(4, dtype=torch.int32)[:, None], torch.arange(4, dtype=torch.int32)
    found = Band(1, 0).visible(i, j, diagonal)
    assert found.dtype == torch.bool
    for n, off in enumerate((-1, 0, 2)):
        assert found[n].tolist() == [
            [band_shows(1, 0, off, a, b) for b in range(4)] for a in range(4)
        ]


def test_visible_of_the_widest_band_stays_inside_int32():
    far = 2**30 - 1
    i = torch.tensor([[0], [far]], dtype=torch.int32)
    j = torch.tensor([0, far], dtype=torch.int32)
    band = Band(BAND_LIMIT - 1, BAND_LIMIT - 1)
    assert band.visible(i, j, 0).all()
    assert band.visible(i, j, -far).tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("band", bands(), ids=str)
def test_extent_counts_the_visible_pairs(band: Band):
    for length_q, length_kv, diagonal in itertools.product(SIZES, SIZES, DIAGONALS):
        pairs = [
            band_shows(band.left, band.right, diagonal, i, j)
            for i in range(length_q)
            for j in range(length_kv)
        ]
        expected = "none" if not any(pairs) else "all" if all(pairs) else "some"
        assert band.extent(length_q, length_kv, diagonal) == expected, (
            length_q,
            length_kv,
            diagonal,
        )


def exact_range(seen: list[int]) -> tuple[int, int]:
    return (min(seen), max(seen) + 1)


@pytest.mark.parametrize("band", bands(), ids=str)
def test_ranges_hold_what_is_visible_and_no_more(band: Band):
    size = 5
    for first, last, diagonal in itertools.product(range(size), range(size + 1), DIAGONALS):
        shows = [
            [band_shows(band.left, band.right, diagonal, i, j) for j in range(size)]
            for i in range(size)
        ]
        keys = [j for j in range(size) if any(shows[i][j] for i in range(first, last))]
        queries = [i for i in range(size) if any(shows[i][j] for j in range(first, last))]
        for found, seen in (
            (band.key_range(first, last, size, diagonal), keys),
            (band.query_range(first, last, size, diagonal), queries),
        ):
            if seen:
                assert found == exact_range(seen), (first, last, diagonal)
            else:
                assert found[0] == found[1], (first, last, diagonal)
                assert 0 <= found[0] <= size


@settings(max_examples=150, deadline=None)
@given(
    left=st.none() | st.integers(0, 40),
    right=st.none() | st.integers(0, 40),
    diagonal=st.integers(-60, 60),
    sizes=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    ends=st.lists(st.integers(0, 30), min_size=4, max_size=4),
)
def test_larger_bands(left, right, diagonal, sizes, ends):
    band = Band(left, right)
    length_q, length_kv = sizes
    i0, i1 = sorted(min(e, length_q) for e in ends[:2])
    j0, j1 = sorted(min(e, length_kv) for e in ends[2:])
    pairs = {
        (i, j)
        for i in range(length_q)
        for j in range(length_kv)
        if band_shows(left, right, diagonal, i, j)
    }
    expected = "none" if not pairs else "all" if len(pairs) == length_q * length_kv else "some"
    assert band.extent(length_q, length_kv, diagonal) == expected
    keys = [j for i, j in pairs if i0 <= i < i1]
    low, high = band.key_range(i0, i1, length_kv, diagonal)
    assert (low, high) == exact_range(keys) if keys else low == high
    queries = [i for i, j in pairs if j0 <= j < j1]
    low, high = band.query_range(j0, j1, length_q, diagonal)
    assert (low, high) == exact_range(queries) if queries else low == high
    # A tile that starts at (i0, j0) is the same band with another diagonal.
    moved = {(i - i0, j - j0) for i, j in pairs if i0 <= i < i1 and j0 <= j < j1}
    assert moved == {
        (i, j)
        for i in range(i1 - i0)
        for j in range(j1 - j0)
        if band.open or band.visible(i, j, diagonal + i0 - j0)
    }


NAMES = {
    "no_mask": MaskType(False, False, False, None),
    "padding": MaskType(True, False, False, None),
    "causal": MaskType(False, True, False, "top_left"),
    "padding_causal": MaskType(True, True, False, "top_left"),
    "causal_bottom_right": MaskType(False, True, False, "bottom_right"),
    "padding_causal_bottom_right": MaskType(True, True, False, "bottom_right"),
    "arbitrary": MaskType(False, False, True, None),
    "arbitrary,no_mask": MaskType(False, False, True, None),
    "arbitrary,padding": MaskType(True, False, True, None),
    "arbitrary,causal": MaskType(False, True, True, "top_left"),
    "arbitrary,padding_causal": MaskType(True, True, True, "top_left"),
    "arbitrary,causal_bottom_right": MaskType(False, True, True, "bottom_right"),
    "arbitrary,padding_causal_bottom_right": MaskType(True, True, True, "bottom_right"),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_name(name: str):
    assert parse_mask_type(name) == NAMES[name]


def test_no_name_is_missing_from_the_list():
    assert set(MASK_TYPES) <= set(NAMES)
    assert set(NAMES) - set(MASK_TYPES) <= {"arbitrary,no_mask"}


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("padding,causal", "padding_causal"),
        ("causal,padding", "padding_causal"),
        ("causal_padding", "padding_causal"),
        ("padding, causal", "padding_causal"),
        ("padding,causal_bottom_right", "padding_causal_bottom_right"),
        ("padding,causal,bottom_right", "padding_causal_bottom_right"),
        ("arbitrary, causal", "arbitrary,causal"),
        ("arbitrary,causal,padding", "arbitrary,padding_causal"),
        ("arbitrary,padding,causal", "arbitrary,padding_causal"),
        ("arbitrary,causal_padding", "arbitrary,padding_causal"),
        ("arbitrary,padding,causal_bottom_right", "arbitrary,padding_causal_bottom_right"),
    ],
)
def test_other_spellings(spelling: str, name: str):
    assert parse_mask_type(spelling) == NAMES[name]


@pytest.mark.parametrize(
    "name",
    [
        "", ",", "Causal", "CAUSAL", "causal_", "_causal", "causal_top_left", "bottom_right", "pad", "none",
        "padding_arbitrary", "causal,arbitrary", "arbitrary,", "arbitrary,arbitrary", "arbitrary_causal",
        "arbitrary,,causal", "no_mask,causal", "padding,padding", "causal\0", "cau sal", "padding causal",
        "sliding_window", None, 3, 1.5, True, ["causal"], ("causal",), {"causal": 1}, b"causal",
    ],
    ids=repr,
)  # fmt: skip
def test_unknown_names_are_refused(name: object):
    with pytest.raises(InvalidProblem, match="attn_mask_type is ") as raised:
        parse_mask_type(name)
    assert repr(name) in str(raised.value)
    assert "'padding_causal_bottom_right'" in str(raised.value)


CAUSAL, PLAIN = MaskType(causal=True, alignment="top_left"), MaskType()


@pytest.mark.parametrize(
    ("mask", "window", "band"),
    [
        (PLAIN, (-1, -1), Band(None, None)),
        (PLAIN, (3, -1), Band(3, None)),
        (PLAIN, (-1, 2), Band(None, 2)),
        (PLAIN, (0, 0), Band(0, 0)),
        (CAUSAL, (-1, -1), Band(None, 0)),
        (CAUSAL, (-1, 0), Band(None, 0)),
        (CAUSAL, (4, 0), Band(4, 0)),
        (CAUSAL, (4, 7), Band(4, 0)),
        (PLAIN, (BAND_LIMIT, INT32_MAX), Band(None, None)),
        (PLAIN, (BAND_LIMIT - 1, 10**40), Band(BAND_LIMIT - 1, None)),
    ],
)
def test_band_of_a_window(mask, window, band):
    assert band_of(mask, window) == band


@pytest.mark.parametrize("window", [(-2, 0), (0, -2), (-5, -5)])
def test_a_window_under_minus_one_is_refused(window):
    with pytest.raises(InvalidProblem, match="window_size is "):
        band_of(PLAIN, window)
