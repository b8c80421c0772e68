"""Problem: from tensors, to one canonical string and back, and no text that breaks the reader."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.definition import int32
from tests.core.test_spec import HOSTILE_TEXTS, JSON, nested, specs

from gradtruth.core.problem import DTYPES, Problem, StrideClass
from gradtruth.core.spec import Spec
from gradtruth.core.strict import shown
from gradtruth.core.tensors import Inputs
from gradtruth.core.tile import tile
from gradtruth.errors import InvalidProblem

SIZES = [
    "batch",
    "seqlen_q",
    "seqlen_kv",
    "num_heads",
    "num_gqa_groups",
    "head_dim_qk",
    "head_dim_v",
]
PLAIN = {
    "batch": 2, "seqlen_q": 3, "seqlen_kv": 5, "num_heads": 4, "num_gqa_groups": 2, "head_dim_qk": 16,
    "head_dim_v": 8, "dtype": "bfloat16",
}  # fmt: skip
CLASSES = [
    StrideClass(u, a, e) for u in (False, True) for a in (False, True) for e in (False, True)
]


def plain(**changes) -> Problem:
    return Problem(**{"spec": Spec(), **PLAIN, **changes})


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    spec = draw(specs())
    size = st.integers(0, 2**31 - 1) | st.integers(0, 8)
    groups, ratio = draw(st.integers(1, 100)), draw(st.integers(1, 16))
    dtype = draw(st.sampled_from(list(DTYPES)))
    full = (draw(size), groups * ratio, draw(size), draw(size))
    shape = st.tuples(*(st.sampled_from([1, n]) for n in full))
    names = draw(st.lists(st.sampled_from(["q", "k", "v", "bias", "attention_mask"]), unique=True))
    return Problem(
        spec=spec,
        batch=full[0],
        num_heads=full[1],
        seqlen_q=full[2],
        seqlen_kv=full[3],
        num_gqa_groups=groups,
        head_dim_qk=draw(st.integers(1, 2**31 - 1)),
        head_dim_v=draw(st.integers(1, 300)),
        dtype=dtype,
        max_seqlen_q=draw(st.none() | st.integers(0, 2**40)),
        max_seqlen_kv=draw(st.none() | st.integers(0, 9)),
        bias_shape=draw(shape) if spec.bias != "none" else None,
        bias_dtype=draw(st.sampled_from([dtype, "float32"])) if spec.bias != "none" else None,
        mask_shape=draw(shape) if spec.arbitrary else None,
        slopes_batched=spec.alibi and draw(st.booleans()),
        strides=tuple((name, draw(st.sampled_from(CLASSES))) for name in names),
    )


@settings(max_examples=150, deadline=None)
@given(problem=problems(), other=problems())
def test_encode_and_decode_are_inverse_and_canonical(problem, other):
    text = problem.encode()
    back = Problem.decode(text)
    assert back == problem
    assert hash(back) == hash(problem)
    assert back.encode() == text
    assert Problem.decode(text) is back
    assert (other.encode() == text) == (other == problem)
    found = json.loads(text)
    assert text == json.dumps(found, sort_keys=True, separators=(",", ":"))
    assert Problem.decode(json.dumps(dict(reversed(found.items())), indent=1)) == problem
    assert json.dumps(found["spec"], sort_keys=True, separators=(",", ":")) == problem.spec.encode()
    assert problem.label().startswith(f"b{problem.batch} s{problem.seqlen_q} ")
    assert problem.scale > 0 or problem.spec.scale is not None


def test_strings_that_files_hold():
    assert plain().encode() == (
        '{"batch":2,"dtype":"bfloat16","head_dim_qk":16,"head_dim_v":8,"num_gqa_groups":2,'
        '"num_heads":4,"seqlen_kv":5,"seqlen_q":3,"spec":{}}'
    )
    full = plain(
        spec=Spec(bias="pre_scale", arbitrary=True, alibi=True),
        max_seqlen_q=0, max_seqlen_kv=7, bias_shape=(1, 4, 3, 1), bias_dtype="float32",
        mask_shape=(2, 1, 1, 5), slopes_batched=True, strides=(("v", StrideClass(False, True, True)),),
    )  # fmt: skip
    assert full.encode() == (
        '{"batch":2,"bias_dtype":"float32","bias_shape":[1,4,3,1],"dtype":"bfloat16","head_dim_qk":16,'
        '"head_dim_v":8,"mask_shape":[2,1,1,5],"max_seqlen_kv":7,"max_seqlen_q":0,"num_gqa_groups":2,'
        '"num_heads":4,"seqlen_kv":5,"seqlen_q":3,"slopes_batched":true,'
        '"spec":{"alibi":true,"arbitrary":true,"bias":"pre_scale"},"strides":{"v":"ae"}}'
    )


def test_every_field_is_in_the_string_and_in_the_hash():
    spec = Spec(bias="pre_scale", arbitrary=True, alibi=True)
    base = plain(spec=spec, bias_shape=(1, 1, 1, 1), bias_dtype="bfloat16", mask_shape=(1, 1, 1, 1))
    others = {
        **{name: PLAIN[name] * 2 for name in SIZES},
        "spec": replace(spec, right=0), "dtype": "float32", "max_seqlen_q": 3, "max_seqlen_kv": 5,
        "bias_shape": (1, 1, 3, 1), "bias_dtype": "float32", "mask_shape": (2, 1, 1, 1),
        "slopes_batched": True, "strides": (("q", StrideClass(aligned=False)),),
    }  # fmt: skip
    assert set(others) == {f.name for f in fields(Problem)}
    for name, value in others.items():
        extra = {"bias_dtype": "float32"} if name == "dtype" else {}
        changed = replace(base, **{name: value}, **extra)
        assert changed != base, name
        assert changed.encode() != base.encode(), name
        assert getattr(Problem.decode(changed.encode()), name) == value, name


def test_strides_have_one_order_and_no_defaults():
    odd, wide = StrideClass(aligned=False), StrideClass(expanded=True)
    one = plain(strides=(("attention_mask", odd), ("q", wide), ("k", StrideClass())))
    other = plain(strides=(("q", wide), ("attention_mask", odd)))
    assert one == other
    assert one.encode() == other.encode()
    assert one.stride_class("q") is wide
    assert one.stride_class("attention_mask") is odd
    assert one.stride_class("k") == one.stride_class("bias") == StrideClass()


def test_frozen_hashable_picklable():
    problem = plain()
    with pytest.raises(FrozenInstanceError):
        problem.batch = 1
    assert {problem: 1}[plain()] == 1
    assert pickle.loads(pickle.dumps(problem)) == problem


# ------------------------------------------------------------------ what is refused

BIASED = {
    "spec": Spec(bias="post_scale", arbitrary=True),
    "bias_shape": (1, 1, 1, 1),
    "bias_dtype": "bfloat16",
    "mask_shape": (1, 1, 1, 1),
}
NOT_SIZES = [None, True, False, 1.0, "1", [], {}, -1, 2**31, 10**400, math.nan]
NOT_SHAPES = [
    None, 1, "1111", [], (), (1, 1, 1), (1,) * 5, [1, 1, 1, 1], (1, 1, 1, 1.0), (1, 1, 1, True), (1, 1, 1, None),
    (1, 1, 1, -5), (3, 1, 1, 1), (1, 2, 1, 1), (1, 1, 5, 1), (1, 1, 1, 3), (0, 1, 1, 1), (1, 1, 1, [1]), {},
]  # fmt: skip
WRONG = [
    *((name, value) for name in SIZES for value in NOT_SIZES),
    *((name, 0) for name in ("num_heads", "num_gqa_groups", "head_dim_qk", "head_dim_v")),
    ("num_heads", 3),
    ("num_heads", 1),
    *(
        (name, value)
        for name in ("max_seqlen_q", "max_seqlen_kv")
        for value in [True, 1.0, "1", [], {}, -1, math.nan]
    ),
    *(("dtype", value) for value in [None, "", "bf16", "int64", "Float32", 1, True, [], ["float32"], {}]),
    *((name, value) for name in ("bias_shape", "mask_shape") for value in NOT_SHAPES),
    *(("bias_dtype", value) for value in [None, "", "float16", "float64", 1, True, [], {}]),
    *(("slopes_batched", value) for value in [None, 0, 1, "true", [], {}, True]),
    *(
        ("strides", value)
        for value in [
            None, 1, True, "q", ("q",), [1], (("q", None),), (("q", "ua"),), (("x", CLASSES[0]),), (([], CLASSES[0]),),
            {"q": 1}, (("extents", CLASSES[0]),),
        ]
    ),
    *(("spec", value) for value in [None, {}, "{}", 1, True, []]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda x: shown(x)[:30])
def test_illegal_values_are_refused_and_named(name, value):
    with pytest.raises(InvalidProblem, match=f"{name} is .*, expected ") as raised:
        plain(**{**BIASED, name: value})
    assert len(str(raised.value)) < 500
    if name in ("spec", "max_seqlen_q", "max_seqlen_kv"):
        return
    found = json.loads(plain(**BIASED).encode())
    found[name] = (
        [list(pair) for pair in value] if name == "strides" and isinstance(value, tuple) else value
    )
    try:
        text = json.dumps(found)
    except (TypeError, ValueError):
        return
    if value == [1, 1, 1, 1]:
        assert Problem.decode(text) == plain(**BIASED)
        return
    with pytest.raises(InvalidProblem):
        Problem.decode(text)


@pytest.mark.parametrize("name", ["bias_shape", "bias_dtype", "mask_shape"])
def test_tensors_that_the_spec_does_not_have_are_refused(name):
    with pytest.raises(InvalidProblem, match=f"{name} is "):
        plain(**{name: BIASED[name]})


def test_bias_of_thd_counts_within_a_sequence():
    spec = Spec(layout="thd", lengths="cu_seqlens", bias="post_scale")
    problem = plain(spec=spec, bias_shape=(2, 4, 9, 11), bias_dtype="float32")
    assert Problem.decode(problem.encode()) == problem
    with pytest.raises(InvalidProblem, match="bias_shape"):
        plain(spec=spec, bias_shape=(3, 4, 9, 11), bias_dtype="float32")
    with pytest.raises(InvalidProblem, match="bias_shape"):
        plain(spec=spec, bias_shape=(2, 4, -9, 11), bias_dtype="float32")


def with_field(name: str, text: str) -> str:
    """The string of a legal problem in which one field holds this JSON text."""
    found = json.loads(plain().encode())
    found.pop(name, None)
    return json.dumps(found)[:-1] + f', "{name}": {text}}}'


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_hostile_texts_give_a_short_clear_error(name):
    for text in (HOSTILE_TEXTS[name], with_field("spec", HOSTILE_TEXTS[name])):
        with pytest.raises(InvalidProblem, match="expected") as raised:
            Problem.decode(text)
        assert len(str(raised.value)) < 1500


@pytest.mark.parametrize(
    "name",
    [
        "spec",
        "batch",
        "dtype",
        "bias_shape",
        "bias_dtype",
        "strides",
        "slopes_batched",
        "max_seqlen_q",
    ],
)
def test_values_nested_to_any_depth_give_a_clear_error(name):
    for depth in range(1, 1100, 37):
        for bracket in "[{":
            with pytest.raises(InvalidProblem):
                Problem.decode(with_field(name, nested(depth, bracket)))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"spec":{}}',
        '{"spec":"{}"}',
        with_field("spec", '"{}"'),
        with_field("spec", "null"),
        with_field("spec", "[]"),
        with_field("spec", '{"right":-1}'),
        with_field("extra", "1"),
        with_field("strides", '{"q":"au"}'),
        with_field("strides", '{"q":"uu"}'),
        with_field("strides", '{"q":1}'),
        with_field("strides", '{"q":["u"]}'),
        with_field("strides", '{"extents":"u"}'),
        with_field("strides", '[["q","u"]]'),
        with_field("strides", "null"),
        with_field("batch", "NaN"),
        with_field("batch", "9" * 5000),
        with_field("dtype", '"torch.float32"'),
        json.dumps({k: v for k, v in json.loads(plain().encode()).items() if k != "batch"}),
        json.dumps({k: v for k, v in json.loads(plain().encode()).items() if k != "spec"}),
    ],
)
def test_malformed_texts_are_refused(text):
    with pytest.raises(InvalidProblem):
        Problem.decode(text)


@pytest.mark.parametrize("value", [None, 5, True, b"{}", [], {}, ["{}"], Spec()])
def test_only_text_is_decoded(value):
    with pytest.raises(InvalidProblem, match=r"problem is .*, expected a string"):
        Problem.decode(value)
    with pytest.raises(InvalidProblem, match="strides is "):
        StrideClass.decode(value)


@settings(max_examples=200, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from([f.name for f in fields(Problem)]), JSON, max_size=2)
)
def test_any_json_is_read_or_refused(changes):
    text = json.dumps(json.loads(plain().encode()) | changes)
    try:
        problem = Problem.decode(text)
    except InvalidProblem:
        return
    assert Problem.decode(problem.encode()) == problem


# ------------------------------------------------------------------ from tensors


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
def test_sizes_of_tensors(layout):
    shapes = {
        "bshd": [(2, 5, 6, 8), (2, 7, 3, 8), (2, 7, 3, 16)],
        "sbhd": [(5, 2, 6, 8), (7, 2, 3, 8), (7, 2, 3, 16)],
        "thd": [(5, 6, 8), (7, 3, 8), (7, 3, 16)],
    }[layout]
    q, k, v = (torch.zeros(shape, dtype=torch.float16) for shape in shapes)
    cu = (
        {}
        if layout != "thd"
        else {"cu_seqlens_q": int32([0, 1, 2]), "cu_seqlens_kv": int32([0, 1, 2])}
    )
    spec = Spec(layout=layout, lengths="cu_seqlens" if cu else "full")
    problem = Problem.of(spec, Inputs(q=q, k=k, v=v, **cu), 11, 12)
    assert problem == Problem(
        spec=spec, batch=2, seqlen_q=5, seqlen_kv=7, num_heads=6, num_gqa_groups=3, head_dim_qk=8,
        head_dim_v=16, dtype="float16", max_seqlen_q=11, max_seqlen_kv=12,
    )  # fmt: skip
    assert problem.layout == layout
    assert problem.group_size == 2
    assert problem.torch_dtype == torch.float16


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name):
    dtype = getattr(torch, name)
    q = torch.zeros(1, 2, 3, 4, dtype=dtype)
    bias = torch.zeros(1, 3, 2, 1)
    problem = Problem.of(Spec(bias="pre_scale"), Inputs(q=q, k=q, v=q, bias=bias))
    assert (problem.dtype, problem.torch_dtype) == (name, dtype)
    assert (problem.bias_dtype, problem.bias_shape) == ("float32", (1, 3, 2, 1))
    assert problem.accumulate_dtype == (torch.float64 if name == "float64" else torch.float32)


def test_options_of_tensors():
    q = torch.zeros(2, 4, 3, 8)
    inputs = Inputs(
        q=q, k=q, v=q, attention_mask=torch.zeros(2, 1, 4, 1, dtype=torch.bool), alibi_slopes=torch.ones(2, 3)
    )  # fmt: skip
    problem = Problem.of(Spec(arbitrary=True, alibi=True), inputs)
    assert problem.mask_shape == (2, 1, 4, 1)
    assert problem.bias_shape is problem.bias_dtype is None
    assert problem.slopes_batched
    one = replace(inputs, alibi_slopes=torch.ones(3))
    assert not Problem.of(Spec(arbitrary=True, alibi=True), one).slopes_batched


@pytest.mark.parametrize(
    ("changes", "spec", "message"),
    [
        ({"q": torch.zeros(1, 2, 3, 4, dtype=torch.int32)}, {}, "dtype is 'torch.int32'"),
        (
            {"bias": torch.zeros(1, 1, 1, 1).to(torch.int8)},
            {"bias": "pre_scale"},
            "bias_dtype is 'torch.int8'",
        ),
        (
            {"bias": torch.zeros(2, 4)},
            {"bias": "pre_scale"},
            r"bias has shape \[2, 4\], expected 4 dims",
        ),
        (
            {"attention_mask": torch.zeros(2, 4)},
            {"arbitrary": True},
            r"attention_mask has shape \[2, 4\]",
        ),
        ({}, {"layout": "thd", "lengths": "cu_seqlens"}, "cu_seqlens_q is None"),
        ({"q": torch.zeros(1, 2, 2, 4)}, {}, "num_heads is 2, expected a multiple"),
    ],
)
def test_tensors_that_make_no_problem_are_refused(changes, spec, message):
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(InvalidProblem, match=message):
        Problem.of(Spec(**spec), Inputs(**{"q": q, "k": q, "v": q, **changes}))


def test_batch_of_a_thd_tile_is_that_of_its_extents():
    q = torch.zeros(9, 1, 4)
    cu = int32([0, 2, 5, 9])
    inputs = Inputs(q=q, k=q, v=q, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    problem = Problem.of(Spec(layout="thd", lengths="cu_seqlens"), inputs)
    assert problem.batch == 3
    assert tile(problem, inputs, sequences=(0, 2))[0].batch == 2


# ------------------------------------------------------------------ derived


def test_scale():
    assert plain().scale == 0.25
    assert plain(spec=Spec(scale=3.0)).scale == 3.0
    assert plain(head_dim_qk=2**31 - 1).scale == 1 / math.sqrt(2**31 - 1)


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        (
            {"spec": Spec(right=0), "seqlen_kv": 3, "head_dim_v": 16},
            "b2 s3 h4/2 d16 bf16 bshd causal",
        ),
        ({}, "b2 s3 t5 h4/2 d16/8 bf16 bshd full"),
        (
            {"dtype": "float16", "spec": Spec(layout="sbhd", packing="h3d")},
            "b2 s3 t5 h4/2 d16/8 fp16 sbhd(h3d) full",
        ),
        (
            {
                "dtype": "float32",
                "spec": Spec(layout="thd", lengths="extents", left=2, softmax="off-by-one"),
            },
            "b2 s3 t5 h4/2 d16/8 fp32 thd window(2,-1) tile off-by-one",
        ),
        (
            {**BIASED, "dtype": "float64", "bias_dtype": "float64", "bias_shape": (1, 4, 3, 5)},
            "b2 s3 t5 h4/2 d16/8 fp64 bshd arbitrary post_scale[1,4,3,5]",
        ),
        (
            {
                "spec": Spec(
                    alibi=True,
                    softcap=50.0,
                    softmax="learnable",
                    dropout_p=0.1,
                    lengths="cu_seqlens",
                )
            },
            "b2 s3 t5 h4/2 d16/8 bf16 bshd padding alibi softcap50 learnable dropout0.1",
        ),
    ],
)
def test_label(changes, label):
    assert plain(**changes).label() == label
