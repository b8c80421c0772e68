from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradtruth.core.extents import resolve
from gradtruth.core.layout import canonical
from gradtruth.core.problem import Problem, StrideClass
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Forward
from gradtruth.errors import InvalidProblem
from gradtruth.verify.suite.arrangement import ARRANGEMENTS, arrange
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.poison import poison, poison_forward, restride, valid_places
from gradtruth.verify.suite.recipe import Recipe
from gradtruth.verify.suite.suite import suite

SIZES = {
    "batch": 2, "num_heads": 2, "num_gqa_groups": 2, "head_dim_qk": 8, "head_dim_v": 8, "dtype": "float32",
}  # fmt: skip
DENSE = Problem(
    spec=Spec(lengths="padding_mask", arbitrary=True, bias="post_scale", lse_grad=True),
    seqlen_q=9,
    seqlen_kv=9,
    bias_shape=(2, 2, 9, 9),
    bias_dtype="float32",
    mask_shape=(1, 1, 9, 9),
    **SIZES,
)


def with_spec(**changes):
    return replace(DENSE, spec=replace(DENSE.spec, **changes))


PLACES = ((2, 7, 0, 5), (0, 4, 3, 6))
RECIPE = Recipe(problem=DENSE, places=PLACES, poison="nan", dlse=True, seed=4)
SOME = suite().recipes[::40]


@pytest.mark.parametrize("recipe", SOME, ids=lambda r: f"seed{r.seed}")
def test_a_recipe_survives_encoding_and_makes_the_same_bits_again(recipe):
    again = Recipe.decode(recipe.encode())
    assert again == recipe
    one, two = make(recipe), make(again)
    assert one.problem == two.problem
    for (name, x), (other, y) in zip(one.inputs.items(), two.inputs.items(), strict=True):
        assert name == other
        assert x.stride() == y.stride()
        assert x.dtype == y.dtype
        assert torch.equal(x.nan_to_num(), y.nan_to_num())
        assert torch.equal(x.isnan(), y.isnan())


@pytest.mark.parametrize("recipe", SOME, ids=lambda r: f"seed{r.seed}")
def test_sequences_lie_where_the_recipe_says(recipe):
    sample = make(recipe)
    where = resolve(sample.problem, sample.inputs)
    hints = [
        n if n is not None else 1 << 30
        for n in (recipe.problem.max_seqlen_q, recipe.problem.max_seqlen_kv)
    ]
    for n, (start_q, length_q, start_kv, length_kv) in enumerate(recipe.resolved_places):
        found = [int(getattr(where, name)[n]) for name in ("length_q", "length_kv")]
        assert found == [min(length_q, hints[0]), min(length_kv, hints[1])]
        if length_q:
            assert int(where.start_q[n]) == start_q
        if length_kv:
            assert int(where.start_kv[n]) == start_kv


@pytest.mark.parametrize("recipe", SOME, ids=lambda r: f"seed{r.seed}")
def test_valid_places_are_finite_and_all_others_poisoned(recipe):
    sample = make(recipe)
    valid_q, valid_kv = valid_places(sample.problem, sample.inputs)
    for name in ("q", "k", "v"):
        tensor = canonical(getattr(sample.inputs, name), sample.problem.spec.layout)
        valid = valid_q if name == "q" else valid_kv
        assert tensor[valid].isfinite().all()
        assert not (tensor[~valid].abs() < 1e4).any()


def test_poison_leaves_the_original_alone_and_the_valid_bits_as_they_are():
    sample = make(replace(RECIPE, poison="none"))
    before = {name: tensor.clone() for name, tensor in sample.inputs.items()}
    poisoned = poison(sample.problem, sample.inputs, float("inf"))
    for name, tensor in sample.inputs.items():
        assert torch.equal(tensor, before[name])
    valid_q, valid_kv = valid_places(sample.problem, sample.inputs)
    assert torch.equal(poisoned.q[valid_q], sample.inputs.q[valid_q])
    assert (poisoned.q[~valid_q] == torch.inf).all()
    assert torch.equal(poisoned.v[valid_kv], sample.inputs.v[valid_kv])
    assert (poisoned.k[~valid_kv] == torch.inf).all()


def test_poison_reaches_bias_and_mask_only_outside_every_sequence():
    sample = make(replace(RECIPE, poison="none"))
    poisoned = poison(sample.problem, sample.inputs)
    used = torch.zeros(2, 9, 9, dtype=torch.bool)
    for n, (start_q, length_q, start_kv, length_kv) in enumerate(PLACES):
        used[n, start_q : start_q + length_q, start_kv : start_kv + length_kv] = True
    assert torch.equal(poisoned.bias.isnan(), ~used[:, None].expand(2, 2, 9, 9))
    flipped = poisoned.attention_mask != sample.inputs.attention_mask
    assert torch.equal(flipped[0, 0], ~used.any(0))


def test_holes_are_poisoned_too():
    sample = make(replace(RECIPE, holes=True, seed=5))
    hidden = sample.inputs.padding_mask_kv[1, 3:9]
    assert hidden.any()
    assert not hidden[0]
    assert not hidden[-1]
    assert sample.inputs.k[1, 3:9][hidden].isnan().all()


def test_poison_of_a_forward_is_at_invalid_rows():
    sample = make(RECIPE)
    zeros = Forward(out=torch.zeros(2, 9, 2, 8), lse=torch.zeros(2, 2, 9))
    found = poison_forward(sample.problem, sample.inputs, zeros)
    valid = valid_places(sample.problem, sample.inputs)[0]
    assert torch.equal(found.out.isnan().all(-1).all(-1), ~valid)
    assert torch.equal(found.lse.isnan(), ~valid[:, None].expand(2, 2, 9))


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_an_arrangement_keeps_values_and_changes_strides(name):
    sample = make(
        replace(RECIPE, arrangement="expanded_heads" if name == "expanded_heads" else "contiguous")
    )
    plain = (
        make(replace(RECIPE, arrangement="contiguous")).inputs
        if name != "expanded_heads"
        else sample.inputs
    )
    found = arrange(plain, name)
    for (key, x), (_, y) in zip(plain.items(), found.items(), strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())
        if key in ("k", "v") and name != "contiguous":
            assert y.stride() != x.stride() or y.storage_offset() or name == "expanded_heads"
    stride = StrideClass.of(found.k)
    assert stride.unit == (name != "strided_last")
    assert stride.aligned == (name not in ("offset", "wide"))
    assert stride.expanded == (name == "expanded_heads")


def test_restride_keeps_strides_and_puts_nan_between():
    like = torch.zeros(4, 6)[1::2, ::3]
    values = torch.arange(4.0).view(2, 2)
    found = restride(values, like)
    assert torch.equal(found, values)
    assert (found.stride(), found.storage_offset()) == (like.stride(), like.storage_offset())
    assert found.untyped_storage().nbytes() // 4 - 4 == int(
        torch.empty(0).set_(found.untyped_storage()).isnan().sum()
    )
    expanded = torch.zeros(1, 2).expand(3, 2)
    assert restride(torch.ones(3, 2), expanded).stride() == (0, 1)
    assert restride(torch.arange(6.0).view(3, 2), expanded).stride() == (2, 1)


def test_the_same_batch_has_the_same_values_in_every_form():
    left = make(RECIPE)
    right = make(replace(RECIPE, places=((0, 7, 0, 5), (0, 4, 0, 6))))
    assert torch.equal(left.inputs.q[0, 2:9], right.inputs.q[0, :7])
    assert torch.equal(left.inputs.v[1, 3:9], right.inputs.v[1, :6])
    assert torch.equal(left.inputs.bias[1, :, :4, 3:9], right.inputs.bias[1, :, :4, :6])
    assert torch.equal(left.dout[0, 2:9], right.dout[0, :7])
    assert torch.equal(left.dlse[0, :, 2:9], right.dlse[0, :, :7])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "x"}, "family is 'x'"),
        ({"arrangement": "x"}, "arrangement is 'x'"),
        ({"poison": "x"}, "poison is 'x'"),
        ({"dout": "x"}, "dout is 'x'"),
        ({"wanted": ("x",)}, "wanted is"),
        ({"places": ((0, 1, 0, 1),)}, "places has 1 entries"),
        ({"problem": with_spec(lse_grad=False)}, "dlse is True"),
        ({"problem": with_spec(lengths="extents")}, "problem is a tile"),
    ],
)
def test_a_recipe_refuses_what_it_does_not_know(change, message):
    with pytest.raises(InvalidProblem, match=message):
        replace(RECIPE, **change)


def test_places_outside_the_storage_are_refused():
    with pytest.raises(InvalidProblem, match="places has"):
        make(replace(RECIPE, places=((2, 8, 0, 5), (0, 4, 3, 6))))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"problem":{}}', '{"problem":3}', "null", '{"problem":{"spec":{}},"x":1}'],
)
def test_a_damaged_recipe_is_refused(text):
    with pytest.raises(InvalidProblem):
        Recipe.decode(text)
