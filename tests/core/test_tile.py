"""tile: every cover of a problem by tiles shows each visible pair once, with the same numbers in its score."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.definition import Case, cases, cumulated, int32, pairs_of_tensors

from gradtruth.core.dropout import keep_mask
from gradtruth.core.extents import resolve
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.core.tile import tile
from gradtruth.errors import InvalidProblem

Part = tuple[Problem, Inputs]


def split(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """A cover of [0, size) by consecutive ranges, empty ones among them."""
    ends = sorted(draw(st.lists(st.integers(0, size), max_size=2)))
    return list(zip([0, *ends], [*ends, size], strict=True))


def split_sequences(draw: st.DrawFn, batch: int, longest: int) -> list[tuple]:
    """A cover of the places of all sequences: the same ranges for all, or others for each, as tensors."""
    if draw(st.booleans()):
        return split(draw, longest)
    cuts = [draw(st.integers(0, longest)) for _ in range(batch)]
    middle = torch.tensor(cuts, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    return [(0, middle), (middle, longest)]


def cover(draw: st.DrawFn, parts: list[Part]) -> list[Part]:
    """Replace each part by tiles that cover it."""
    found = []
    for problem, inputs in parts:
        axis = draw(st.sampled_from(["queries", "keys", "both", "groups", "sequences", "all"]))
        sequences = split(draw, problem.batch) if axis in ("sequences", "all") else [None]
        groups = split(draw, problem.num_gqa_groups) if axis in ("groups", "all") else [None]
        for taken in sequences:
            batch = problem.batch if taken is None else taken[1] - taken[0]
            queries, keys = [None], [None]
            if axis in ("queries", "both", "all"):
                queries = split_sequences(draw, batch, problem.seqlen_q)
            if axis in ("keys", "both", "all"):
                keys = split_sequences(draw, batch, problem.seqlen_kv)
            found += [
                tile(problem, inputs, queries=q, keys=k, groups=g, sequences=taken)
                for g in groups
                if g is None or g[0] < g[1]
                for q in queries
                for k in keys
            ]
    return found


@settings(max_examples=200, deadline=None)
@given(case=cases(), data=st.data())
def test_a_cover_shows_every_visible_pair_once(case: Case, data: st.DataObject):
    """Global indices, q, k and v, bias, mask and ALiBi of every pair are those of the whole."""
    parts = [(case.problem(), case.inputs())]
    for _ in range(data.draw(st.integers(1, 2))):
        parts = cover(data.draw, parts)
    found = {}
    for problem, inputs in parts:
        pairs = pairs_of_tensors(problem, inputs)
        assert not pairs.keys() & found.keys(), "two tiles show the same pair"
        found |= pairs
    assert found == case.pairs()


@settings(max_examples=60, deadline=None)
@given(case=cases(), data=st.data())
def test_one_tile_is_the_rectangle_of_its_ranges(case: Case, data: st.DataObject):
    ends = st.tuples(st.integers(-2, 7), st.integers(-2, 7))
    queries, keys = data.draw(ends), data.draw(ends)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, case.batch)] * 2)))
    part = tile(case.problem(), case.inputs(), queries=queries, keys=keys, sequences=(first, last))
    expected = {
        (n, h, i, j): made_of
        for (n, h, i, j), made_of in case.pairs().items()
        if first <= n < last and queries[0] <= i < queries[1] and keys[0] <= j < keys[1]
    }
    assert pairs_of_tensors(*part) == expected
    steps = tile(case.problem(), case.inputs(), keys=keys)
    steps = tile(*steps, sequences=(first, last))
    steps = tile(*steps, queries=queries)
    assert pairs_of_tensors(*steps) == expected
    assert torch.equal(steps[1].extents, part[1].extents)


@pytest.mark.parametrize("huge", [2**31, 2**40, torch.tensor([2**40, 2**32])])
def test_ends_far_beyond_int32_are_the_end_of_the_sequence(huge):
    q = torch.zeros(2, 3, 1, 2)
    inputs = Inputs(q=q, k=q, v=q)
    _, part = tile(Problem.of(Spec(), inputs), inputs, queries=(1, huge), keys=(huge, huge))
    extents = resolve(Problem.of(Spec(lengths="extents"), part), part)
    assert extents.start_q.tolist() == [1, 1]
    assert extents.length_q.tolist() == [2, 2]
    assert extents.length_kv.tolist() == [0, 0]


def test_ranges_that_are_reversed_or_negative_are_empty_or_clamped():
    q = torch.zeros(1, 4, 1, 2)
    inputs = Inputs(q=q, k=q, v=q)
    problem = Problem.of(Spec(), inputs)
    for queries, expected in (
        ((3, 1), (3, 0)),
        ((-5, 2), (0, 2)),
        ((-5, -1), (0, 0)),
        ((4, 9), (4, 0)),
    ):
        extents = resolve(*tile(problem, inputs, queries=queries))
        assert (extents.start_q.item(), extents.length_q.item()) == expected


def whole(layout: str = "bshd", **tensors) -> Part:
    """Three sequences, four heads in two groups, with everything that a tile must carry along."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"q": (3, 5, 4, 8), "k": (3, 6, 2, 8), "v": (3, 6, 2, 4)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    lengths = {}
    if layout == "sbhd":
        made = {name: tensor.transpose(0, 1) for name, tensor in made.items()}
    if layout == "thd":
        made = {name: tensor.flatten(0, 1) for name, tensor in made.items()}
        lengths = {
            "cu_seqlens_q": int32(cumulated([5, 2, 4])),
            "cu_seqlens_kv": int32(cumulated([3, 6, 1])),
            "cu_seqlens_q_padded": int32([0, 5, 10, 15]),
            "cu_seqlens_kv_padded": int32([0, 6, 12, 18]),
        }
    inputs = Inputs(
        **made,
        **lengths,
        attention_mask=torch.zeros(3, 1, 5, 6, dtype=torch.bool),
        bias=torch.randn(3, 4, 5, 6, generator=generator),
        alibi_slopes=torch.rand(3, 4, generator=generator),
        softmax_offset=torch.ones(4),
        dropout_seed=torch.tensor(9),
        **tensors,
    )
    spec = Spec(
        layout=layout,
        lengths="cu_seqlens" if layout == "thd" else "full",
        left=2,
        right=1,
        alignment="bottom_right",
        arbitrary=True,
        scale=0.3,
        softcap=20.0,
        bias="pre_scale",
        alibi=True,
        softmax="learnable",
        dropout_p=0.25,
        max_logit=True,
        deterministic=False,
    )
    return Problem.of(spec, inputs), inputs


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
def test_what_a_tile_keeps_and_what_it_drops(layout):
    problem, inputs = whole(layout)
    part, tensors = tile(problem, inputs, queries=(1, 3), keys=(2, 5))
    changed = {"lengths": "extents", "softmax": "vanilla"}
    for field in fields(Spec):
        expected = changed.get(field.name, getattr(problem.spec, field.name))
        assert getattr(part.spec, field.name) == expected, field.name
    for field in fields(Problem):
        if field.name != "spec":
            assert getattr(part, field.name) == getattr(problem, field.name), field.name
    for name in ("q", "k", "v", "attention_mask", "bias", "alibi_slopes", "dropout_seed"):
        assert getattr(tensors, name) is getattr(inputs, name), name
    assert tensors.softmax_offset is None
    assert not [name for name, _ in tensors.items() if name.startswith("cu_seqlens")]
    assert tensors.extents.shape == (11, 3)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
def test_groups_and_sequences_are_views_of_the_storage(layout):
    problem, inputs = whole(layout)
    part, tensors = tile(problem, inputs, groups=(1, 2), sequences=(1, 3))
    assert (part.batch, part.num_heads, part.num_gqa_groups) == (2, 2, 1)
    sequence_dim = {"bshd": 0, "sbhd": 1, "thd": None}[layout]
    for name, heads in (("q", slice(2, 4)), ("k", slice(1, 2)), ("v", slice(1, 2))):
        given, taken = getattr(inputs, name), getattr(tensors, name)
        assert taken.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        expected = given[..., heads, :]
        if sequence_dim is not None:
            expected = expected.index_select(sequence_dim, torch.tensor([1, 2]))
        assert torch.equal(taken, expected), name
    assert torch.equal(tensors.bias, inputs.bias[1:3, 2:4])
    assert torch.equal(tensors.attention_mask, inputs.attention_mask[1:3])
    assert torch.equal(tensors.alibi_slopes, inputs.alibi_slopes[1:3, 2:4])
    extents = resolve(part, tensors)
    assert extents.sequence.tolist() == [1, 2]
    assert extents.head.tolist() == [2, 2]
    assert part.bias_shape == (2, 2, 5, 6)


def test_padding_masks_stay_with_their_sequences():
    hidden = torch.tensor([[False, True, False], [True, False, False]])
    q = torch.zeros(2, 3, 1, 2)
    inputs = Inputs(q=q, k=q, v=q, padding_mask_q=hidden, padding_mask_kv=~hidden)
    problem = Problem.of(Spec(lengths="padding_mask"), inputs)
    part, tensors = tile(problem, inputs, sequences=(1, 2))
    assert torch.equal(tensors.padding_mask_q, hidden[1:])
    assert torch.equal(tensors.padding_mask_kv, ~hidden[1:])
    assert resolve(part, tensors).start_q.tolist() == [1]


def test_no_sequences_take_no_slopes():
    q = torch.zeros(1, 2, 2, 2)
    inputs = Inputs(q=q, k=q, v=q, alibi_slopes=torch.ones(1, 2))
    part, tensors = tile(Problem.of(Spec(alibi=True), inputs), inputs, sequences=(0, 0))
    assert part.batch == 0
    assert tensors.alibi_slopes.shape == (0, 2)


def test_a_packed_problem_gives_separate_tiles():
    buffer = torch.zeros(2, 4, 3, 2, 8)
    q, k, v = buffer.unbind(-3)
    inputs = Inputs(q=q, k=k, v=v)
    part, tensors = tile(Problem.of(Spec(packing="3hd"), inputs), inputs, queries=(0, 1))
    assert part.spec.packing == "separate"
    assert tensors.k.data_ptr() == k.data_ptr()


@pytest.mark.parametrize("name", ["groups", "sequences"])
@pytest.mark.parametrize("given", [(-1, 1), (0, 4), (2, 1), (4, 4)])
def test_ranges_outside_the_problem_are_refused(name, given):
    problem, inputs = whole()
    with pytest.raises(InvalidProblem, match=rf"{name} is \({given[0]}, {given[1]}\)"):
        tile(problem, inputs, **{name: given})


def test_a_tile_without_groups_is_refused():
    problem, inputs = whole()
    with pytest.raises(InvalidProblem, match="groups is"):
        tile(problem, inputs, groups=(1, 1))


@settings(max_examples=40, deadline=None)
@given(case=cases(), data=st.data())
def test_dropout_of_a_tile_is_that_of_the_whole(case: Case, data: st.DataObject):
    """Drawn from the tile's origins, the keep mask is the rectangle of the mask of the whole."""
    ends = st.integers(0, 5)
    queries, keys = (tuple(sorted(data.draw(st.tuples(ends, ends)))) for _ in range(2))
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, case.batch)] * 2)))
    group = data.draw(st.integers(0, case.groups - 1))
    problem, inputs = tile(
        case.problem(), case.inputs(),
        queries=queries, keys=keys, groups=(group, group + 1), sequences=(first, last),
    )  # fmt: skip
    extents = resolve(problem, inputs)
    seed = torch.tensor(-(2**61) + 12345)
    every = torch.arange(8)
    full = keep_mask(
        0.5, seed,
        every[:, None, None, None], every[:, None, None], every[:, None], every,
    )  # fmt: skip
    group_size = case.heads // case.groups
    for n in range(problem.batch):
        length_q, length_kv = extents.length_q[n].item(), extents.length_kv[n].item()
        drawn = keep_mask(
            0.5, seed,
            extents.sequence[n],
            extents.head[n] + torch.arange(problem.num_heads)[:, None, None],
            extents.origin_q[n] + torch.arange(length_q)[:, None],
            extents.origin_kv[n] + torch.arange(length_kv),
        )  # fmt: skip
        head = group * group_size
        rows = slice(queries[0], queries[0] + length_q)
        columns = slice(keys[0], keys[0] + length_kv)
        assert torch.equal(drawn, full[first + n, head : head + group_size, rows, columns])
