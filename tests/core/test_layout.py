"""Layouts are views: the same storage, every element at its canonical place."""

from __future__ import annotations

import itertools

import pytest
import torch

from gradtruth.core.layout import (
    canonical,
    canonical_lse,
    empty_like_query,
    empty_lse,
    pack_gradients,
    sequence_dim,
    split_packed,
    stored,
)
from gradtruth.errors import InvalidProblem

B, S, H, D = 2, 3, 4, 5
SHAPES = {"bshd": (B, S, H, D), "sbhd": (S, B, H, D), "thd": (S, H, D)}


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize("layout", SHAPES)
def test_canonical_is_a_view_with_every_element_in_place(layout):
    tensor = numbered(*SHAPES[layout])
    view = canonical(tensor, layout)
    assert same_storage(view, tensor)
    rows = 1 if layout == "thd" else B
    assert view.shape == (rows, S, H, D)
    for b, s, h, d in itertools.product(range(rows), range(S), range(H), range(D)):
        at = {"bshd": (b, s, h, d), "sbhd": (s, b, h, d), "thd": (s, h, d)}[layout]
        assert view[b, s, h, d] == tensor[at]


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("form", ["contiguous", "expanded", "padded"])
def test_stored_is_the_inverse(layout, form):
    shape = SHAPES[layout]
    tensor = {
        "contiguous": numbered(*shape),
        "expanded": numbered(*shape[:-2], 1, D).expand(shape),
        "padded": numbered(*shape[:-1], D + 3)[..., :D],
    }[form]
    back = stored(canonical(tensor, layout), layout)
    assert back.shape == tensor.shape
    assert back.stride() == tensor.stride()
    assert back.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("layout", SHAPES)
def test_canonical_of_empty_tensors(layout):
    shape = [0 if n == S else n for n in SHAPES[layout]]
    view = canonical(torch.empty(shape), layout)
    assert view.shape == (1 if layout == "thd" else B, 0, H, D)
    assert stored(view, layout).shape == tuple(shape)


def test_one_token_of_thd_keeps_its_dims():
    tensor = numbered(1, 1, 1)
    assert stored(canonical(tensor, "thd"), "thd").shape == (1, 1, 1)


@pytest.mark.parametrize("layout", SHAPES)
def test_sequence_dim_counts_places(layout):
    assert SHAPES[layout][sequence_dim(layout)] == S


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "lse_dtype"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_fresh_lse(layout, dtype, lse_dtype):
    lse = empty_lse(torch.empty(SHAPES[layout], dtype=dtype), layout)
    assert lse.dtype == lse_dtype
    if layout == "thd":
        # [tokens, H], stored head-major.
        assert (lse.shape, lse.stride()) == ((S, H), (1, S))
    else:
        assert (lse.shape, lse.stride()) == ((B, H, S), (H * S, S, 1))
    view = canonical_lse(lse, layout)
    assert same_storage(view, lse)
    assert view.shape == (1 if layout == "thd" else B, H, S)
    assert view.is_contiguous()


def test_canonical_lse_puts_every_row_in_place():
    lse = numbered(S, H)
    view = canonical_lse(lse, "thd")
    assert [[view[0, h, t] for t in range(S)] for h in range(H)] == lse.t().tolist()
    dense = numbered(B, H, S)
    assert canonical_lse(dense, "bshd") is dense
    assert canonical_lse(dense, "sbhd") is dense


@pytest.mark.parametrize("layout", SHAPES)
def test_fresh_out_is_contiguous_in_the_storage_layout(layout):
    q = torch.empty((*SHAPES[layout][:-1], 2 * D), dtype=torch.bfloat16)[..., ::2]
    out = empty_like_query(q, 7)
    assert out.shape == (*SHAPES[layout][:-1], 7)
    assert out.is_contiguous()
    assert out.dtype == q.dtype
    assert not same_storage(out, q)


PACKINGS = {"3hd": (3, H, D), "h3d": (H, 3, D), "2hd": (2, H, D), "h2d": (H, 2, D)}


def part(buffer: torch.Tensor, packing: str, index: int) -> torch.Tensor:
    """The elements of part ``index``, by their position in the name of the packing."""
    return buffer[..., index, :, :] if packing in ("3hd", "2hd") else buffer[..., :, index, :]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("lead", [(B, S), (S, B), (S,)], ids=["bshd", "sbhd", "thd"])
def test_packed_tensors_split_into_views_and_gradients_pack_back(packing, lead):
    buffer = numbered(*lead, *PACKINGS[packing])
    q = -numbered(*lead, H, D)
    if packing in ("3hd", "h3d"):
        parts = split_packed(packing, buffer, None, None)
        views = parts
    else:
        parts = split_packed(packing, q, buffer, None)
        assert parts[0] is q
        views = parts[1:]
    assert len(parts) == 3
    for index, view in enumerate(views):
        assert same_storage(view, buffer)
        assert torch.equal(view, part(buffer, packing, index))
        assert view.shape == (*lead, H, D)
    packed = pack_gradients(packing, tuple(views))
    assert torch.equal(packed, buffer)
    assert packed.is_contiguous()
    assert not same_storage(packed, buffer)


def test_separate_tensors_pass():
    q, k, v = numbered(1), numbered(2), numbered(3)
    found = split_packed("separate", q, k, v)
    assert found[0] is q
    assert found[1] is k
    assert found[2] is v


X = torch.zeros(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("packing", "tensors", "message"),
    [
        ("separate", (X, None, X), "key and value"),
        ("separate", (X, X, None), "key and value"),
        (
            "3hd",
            (torch.zeros(2, 2, 4, 5), None, None),
            r"shape \[2, 2, 4, 5\], expected 3 at dim -3",
        ),
        ("h3d", (torch.zeros(2, 3, 4, 5), None, None), "expected 3 at dim -2"),
        ("3hd", (torch.zeros(3, 5), None, None), "expected 3 at dim -3"),
        ("3hd", (torch.zeros(2, 3, 5, 8), X, None), "key or value"),
        ("3hd", (torch.zeros(2, 3, 5, 8), None, X), "key or value"),
        ("2hd", (X, None, None), "one buffer of key and value"),
        ("2hd", (X, torch.zeros(2, 2, 4, 5), X), "one buffer of key and value"),
        ("2hd", (X, torch.zeros(2, 3, 4, 5), None), "expected 2 at dim -3"),
        ("h2d", (X, torch.zeros(2, 3, 4, 5), None), "expected 2 at dim -2"),
    ],
)
def test_wrong_packings_are_refused(packing, tensors, message):
    with pytest.raises(InvalidProblem, match=message):
        split_packed(packing, *tensors)


@pytest.mark.parametrize(("packing", "count"), [("3hd", 2), ("h2d", 3), ("separate", 3)])
def test_a_wrong_number_of_gradients_is_refused(packing, count):
    with pytest.raises(InvalidProblem, match=f"packing is '{packing}'.*got {count}"):
        pack_gradients(packing, (X,) * count)
