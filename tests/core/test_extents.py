"""Where sequences lie: every form of lengths against scalar loops, and content that no one should pass."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.definition import (
    INT32_MAX,
    INT32_MIN,
    Case,
    cases,
    cumulated,
    dense_place,
    int32,
    mask_place,
    pairs_of_tensors,
    thd_place,
)

from gradtruth.core.extents import Extents, resolve
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.errors import InvalidProblem

NAMES = [f.name for f in fields(Extents)]


def dense(
    batch: int, seqlen_q: int, seqlen_kv: int, layout: str = "bshd"
) -> dict[str, torch.Tensor]:
    q, k = torch.zeros(batch, seqlen_q, 2, 4), torch.zeros(batch, seqlen_kv, 1, 4)
    if layout == "sbhd":
        q, k = q.transpose(0, 1), k.transpose(0, 1)
    return {"q": q, "k": k, "v": k}


def thd(tokens_q: int, tokens_kv: int) -> dict[str, torch.Tensor]:
    k = torch.zeros(tokens_kv, 1, 4)
    return {"q": torch.zeros(tokens_q, 2, 4), "k": k, "v": k}


def found(spec: Spec, inputs: Inputs, max_q: int | None = None, max_kv: int | None = None):
    """resolve, as a dict of lists; checks what holds of every extents."""
    problem = Problem.of(spec, inputs, max_q, max_kv)
    extents = resolve(problem, inputs)
    for name in NAMES:
        value = getattr(extents, name)
        assert value.dtype == torch.int32, name
        assert value.shape == (problem.batch,), name
        assert value.device == inputs.q.device
    lists = {name: getattr(extents, name).tolist() for name in NAMES}
    for side, places in (("q", problem.seqlen_q), ("kv", problem.seqlen_kv)):
        for start, length in zip(lists[f"start_{side}"], lists[f"length_{side}"], strict=True):
            assert 0 <= start <= places
            assert 0 <= length <= places - start
    return lists


def places(lists: dict[str, list[int]], side: str) -> list[tuple[int, int]]:
    return list(zip(lists[f"start_{side}"], lists[f"length_{side}"], strict=True))


# ------------------------------------------------------------------ each form


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_kv"), [(2, 3, 5), (1, 0, 4), (3, 4, 0), (0, 2, 2)]
)
def test_full(layout, batch, seqlen_q, seqlen_kv):
    lists = found(Spec(layout=layout), Inputs(**dense(batch, seqlen_q, seqlen_kv, layout)))
    assert lists == {
        **dict.fromkeys(NAMES, [0] * batch),
        "length_q": [seqlen_q] * batch,
        "length_kv": [seqlen_kv] * batch,
        "sequence": list(range(batch)),
    }


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_cu_seqlens_of_a_dense_tensor(layout):
    for lengths in itertools.product(range(4), repeat=2):
        inputs = Inputs(
            **dense(2, 3, 4, layout),
            cu_seqlens_q=int32(cumulated(list(lengths))),
            cu_seqlens_kv=int32(cumulated(list(lengths[::-1]))),
        )
        lists = found(Spec(layout=layout, lengths="cu_seqlens"), inputs)
        assert places(lists, "q") == [(0, n) for n in lengths]
        assert places(lists, "kv") == [(0, n) for n in lengths[::-1]]
        assert lists["index_q"] == lists["index_kv"] == [0, 0]


HOSTILE = (INT32_MIN, -5, -1, 0, 1, 3, 6, 9, INT32_MAX)


def test_hostile_cu_seqlens_of_a_dense_tensor():
    for a, b, c in itertools.product(HOSTILE, repeat=3):
        cu = [a, b, c]
        inputs = Inputs(**dense(2, 6, 4), cu_seqlens_q=int32(cu), cu_seqlens_kv=int32(cu))
        lists = found(Spec(lengths="cu_seqlens"), inputs)
        assert places(lists, "q") == [dense_place(cu, n, 6) for n in range(2)], cu
        assert places(lists, "kv") == [dense_place(cu, n, 4) for n in range(2)], cu


def test_hostile_content_of_thd():
    # Length and start of a sequence depend on four integers, so all quadruples say everything.
    for first, last, begin, end in itertools.product(HOSTILE, repeat=4):
        cu, padded = [first, last], [begin, end]
        inputs = Inputs(
            **thd(6, 4),
            cu_seqlens_q=int32(cu),
            cu_seqlens_kv=int32(cu),
            cu_seqlens_q_padded=int32(padded),
            cu_seqlens_kv_padded=int32(padded),
        )
        problem = Problem.of(Spec(layout="thd", lengths="cu_seqlens"), inputs)
        extents = resolve(problem, inputs)
        q = (extents.start_q.item(), extents.length_q.item())
        kv = (extents.start_kv.item(), extents.length_kv.item())
        assert q == thd_place(cu, padded, 0, 6), (cu, padded)
        assert kv == thd_place(cu, padded, 0, 4), (cu, padded)
        for (start, length), tokens in ((q, 6), (kv, 4)):
            assert 0 <= start <= start + length <= tokens


@settings(max_examples=100, deadline=None)
@given(
    cu=st.lists(
        st.sampled_from(HOSTILE) | st.integers(INT32_MIN, INT32_MAX), min_size=4, max_size=4
    ),
    padded=st.lists(st.sampled_from(HOSTILE) | st.integers(-9, 9), min_size=4, max_size=4),
    tokens=st.integers(0, 9),
    bottom_right=st.booleans(),
)
def test_hostile_thd_with_defaulted_offsets(cu, padded, tokens, bottom_right):
    """The query side takes cu_seqlens for its offsets, the key side has its own."""
    inputs = Inputs(
        **thd(tokens, 7),
        cu_seqlens_q=int32(cu),
        cu_seqlens_kv=int32(cu),
        cu_seqlens_kv_padded=int32(padded),
    )
    alignment = "bottom_right" if bottom_right else "top_left"
    lists = found(Spec(layout="thd", lengths="cu_seqlens", alignment=alignment), inputs)
    assert places(lists, "q") == [thd_place(cu, cu, n, tokens) for n in range(3)]
    assert places(lists, "kv") == [thd_place(cu, padded, n, 7) for n in range(3)]
    differences = [b - a for a, b in zip(lists["length_q"], lists["length_kv"], strict=True)]
    assert lists["diagonal"] == (differences if bottom_right else [0, 0, 0])


def test_thd_with_gaps_zero_lengths_and_a_tail():
    inputs = Inputs(
        **thd(20, 12),
        cu_seqlens_q=int32([0, 0, 3, 3, 7, 7]),
        cu_seqlens_q_padded=int32([0, 2, 7, 7, 15, 15]),
        cu_seqlens_kv=int32([0, 4, 4, 5, 11, 11]),
    )
    lists = found(Spec(layout="thd", lengths="cu_seqlens", alignment="bottom_right"), inputs)
    assert places(lists, "q") == [(0, 0), (2, 3), (7, 0), (7, 4), (15, 0)]
    assert places(lists, "kv") == [(0, 4), (4, 0), (4, 1), (5, 6), (11, 0)]
    assert lists["diagonal"] == [4, -3, 1, 2, 0]
    assert lists["sequence"] == [0, 1, 2, 3, 4]
    for name in ("index_q", "index_kv", "origin_q", "origin_kv", "head"):
        assert lists[name] == [0] * 5, name


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("width", range(6))
def test_every_padding_mask_of_a_width(layout, width):
    rows = [list(row) for row in itertools.product([False, True], repeat=width)]
    hidden = torch.tensor(rows, dtype=torch.bool).view(len(rows), width)
    inputs = Inputs(
        **dense(len(rows), width, width, layout),
        padding_mask_q=hidden,
        padding_mask_kv=hidden.flip(1),
    )
    for alignment in ("top_left", "bottom_right"):
        spec = Spec(layout=layout, lengths="padding_mask", alignment=alignment)
        lists = found(spec, inputs)
        expected_q = [mask_place(row) for row in rows]
        expected_kv = [mask_place(row[::-1]) for row in rows]
        assert places(lists, "q") == expected_q
        assert places(lists, "kv") == expected_kv
        off = [b[1] - a[1] for a, b in zip(expected_q, expected_kv, strict=True)]
        assert lists["diagonal"] == (off if alignment == "bottom_right" else [0] * len(rows))
        # Bias and masks are indexed by storage position, dropout and ALiBi from the first valid place.
        assert lists["index_q"] == lists["start_q"]
        assert lists["index_kv"] == lists["start_kv"]
        assert lists["origin_q"] == lists["origin_kv"] == [0] * len(rows)


def test_one_padding_mask_leaves_the_other_side_full():
    hidden = torch.tensor([[True, False, True], [False, False, True]])
    spec = Spec(lengths="padding_mask")
    lists = found(spec, Inputs(**dense(2, 4, 3), padding_mask_kv=hidden))
    assert places(lists, "q") == [(0, 4), (0, 4)]
    assert places(lists, "kv") == [(1, 1), (0, 2)]
    lists = found(spec, Inputs(**dense(2, 3, 4), padding_mask_q=hidden))
    assert places(lists, "q") == [(1, 1), (0, 2)]
    assert places(lists, "kv") == [(0, 4), (0, 4)]


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("bound", [0, 1, 3, 5, 2**31 - 1, 2**31, 2**40])
def test_max_seqlen_clamps_and_a_larger_one_changes_nothing(alignment, bound):
    lengths = [0, 2, 5]
    cu = int32(cumulated(lengths))
    hidden = torch.arange(5) < torch.tensor([[5], [3], [0]])
    clamped = [min(n, bound) for n in lengths]
    sources = {
        "thd": (Spec(layout="thd", lengths="cu_seqlens", alignment=alignment), thd(7, 7)),
        "cu_seqlens": (Spec(lengths="cu_seqlens", alignment=alignment), dense(3, 5, 5)),
        "padding_mask": (Spec(lengths="padding_mask", alignment=alignment), dense(3, 5, 5)),
    }
    for name, (spec, tensors) in sources.items():
        kind = "padding_mask" if name == "padding_mask" else "cu_seqlens"
        both = {f"{kind}_{side}": hidden if kind == "padding_mask" else cu for side in ("q", "kv")}
        inputs = Inputs(**tensors, **both)
        whole = found(spec, inputs)
        assert whole["length_q"] == whole["length_kv"] == lengths
        queries = found(spec, inputs, max_q=bound)
        assert queries["length_q"] == clamped
        assert queries["length_kv"] == lengths
        assert queries["start_q"] == whole["start_q"]
        off = [n - m for n, m in zip(lengths, clamped, strict=True)]
        assert queries["diagonal"] == (off if alignment == "bottom_right" else [0, 0, 0])
        keys = found(spec, inputs, max_kv=bound)
        assert keys["length_q"] == lengths
        assert keys["length_kv"] == clamped


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_every_form_as_the_scalar_loops_say(case: Case):
    lists = found(case.spec(), case.inputs(), case.bound["q"], case.bound["kv"])
    for side in ("q", "kv"):
        assert places(lists, side) == [case.place(side, n) for n in range(case.batch)]
    assert lists["diagonal"] == [case.diagonal(n) for n in range(case.batch)]
    indices = [case.indices(n, 0, 0) for n in range(case.batch)]
    assert list(zip(lists["index_q"], lists["index_kv"], strict=True)) == indices
    assert pairs_of_tensors(case.problem(), case.inputs()) == case.pairs()


def test_left_padded_right_padded_and_thd_forms_lie_alike():
    """The same three sequences in three forms have the same lengths, diagonals and origins."""
    lengths = [2, 0, 4]
    place = torch.arange(4)
    right = place >= torch.tensor(lengths)[:, None]
    left = right.flip(1)
    cu = int32(cumulated(lengths))
    forms = [
        (
            Spec(lengths="padding_mask"),
            Inputs(**dense(3, 4, 4), padding_mask_q=right, padding_mask_kv=left),
        ),
        (
            Spec(lengths="padding_mask"),
            Inputs(**dense(3, 4, 4), padding_mask_q=left, padding_mask_kv=right),
        ),
        (Spec(lengths="cu_seqlens"), Inputs(**dense(3, 4, 4), cu_seqlens_q=cu, cu_seqlens_kv=cu)),
        (
            Spec(layout="thd", lengths="cu_seqlens"),
            Inputs(**thd(9, 6), cu_seqlens_q=cu, cu_seqlens_kv=cu),
        ),
    ]
    for spec, inputs in forms:
        lists = found(spec, inputs)
        assert lists["length_q"] == lists["length_kv"] == lengths
        assert lists["origin_q"] == lists["origin_kv"] == lists["diagonal"] == [0, 0, 0]


# ------------------------------------------------------------------ the packed form


def numbered(batch: int) -> Extents:
    packed = torch.arange(len(NAMES) * batch, dtype=torch.int32).view(len(NAMES), batch)
    return Extents(**dict(zip(NAMES, packed, strict=True)))


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_pack_and_unpack_are_inverse(batch):
    extents = numbered(batch)
    packed = extents.pack()
    assert packed.shape == (11, batch)
    assert packed.dtype == torch.int32
    back = Extents.unpack(packed)
    for name in NAMES:
        assert torch.equal(getattr(back, name), getattr(extents, name)), name


@pytest.mark.parametrize("shape", [(10, 2), (12, 2), (11,), (11, 2, 1), ()])
def test_unpack_refuses_other_shapes(shape):
    with pytest.raises(InvalidProblem, match=r"extents has shape .* expected \[11, batch\]"):
        Extents.unpack(torch.zeros(shape, dtype=torch.int32))


def test_a_tile_without_extents_is_refused():
    inputs = Inputs(**dense(1, 2, 2))
    problem = Problem.of(Spec(lengths="extents"), inputs)
    with pytest.raises(InvalidProblem, match="extents is None"):
        resolve(problem, inputs)


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(
        st.sampled_from(HOSTILE) | st.integers(INT32_MIN, INT32_MAX), min_size=22, max_size=22
    )
)
def test_hostile_extents_of_a_tile_stay_inside_the_tensors(values):
    packed = int32(values).view(11, 2)
    inputs = Inputs(**dense(2, 5, 3), extents=packed)
    lists = found(Spec(lengths="extents"), inputs)
    for name, row in zip(NAMES, packed.tolist(), strict=True):
        if not name.startswith(("start", "length")):
            assert lists[name] == row, name
    for side, size in (("q", 5), ("kv", 3)):
        starts = packed[NAMES.index(f"start_{side}")].tolist()
        lengths = packed[NAMES.index(f"length_{side}")].tolist()
        for n in range(2):
            start = min(max(starts[n], 0), size)
            assert places(lists, side)[n] == (start, max(0, min(lengths[n], size - start)))


def test_lengths_on_the_device_are_read_without_a_copy_to_the_host():
    """resolve works on tensors without content, so it cannot have looked at any."""
    meta = {name: tensor.to("meta") for name, tensor in dense(2, 4, 4).items()}
    hidden = torch.zeros(2, 4, dtype=torch.bool, device="meta")
    cu = torch.zeros(3, dtype=torch.int32, device="meta")
    forms = {
        "padding_mask": {"padding_mask_q": hidden, "padding_mask_kv": hidden},
        "cu_seqlens": {"cu_seqlens_q": cu, "cu_seqlens_kv": cu},
        "extents": {"extents": torch.zeros(11, 2, dtype=torch.int32, device="meta")},
        "full": {},
    }
    for lengths, tensors in forms.items():
        problem = Problem(
            spec=Spec(lengths=lengths, alignment="bottom_right"), batch=2, seqlen_q=4, seqlen_kv=4,
            num_heads=2, num_gqa_groups=1, head_dim_qk=4, head_dim_v=4, dtype="float32",
        )  # fmt: skip
        extents = resolve(problem, Inputs(**meta, **tensors))
        assert extents.start_q.device.type == extents.diagonal.device.type == "meta"
