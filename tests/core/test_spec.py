"""Spec: legal values alone, one canonical string per value, and no text that breaks the reader."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtruth.core.mask import BAND_LIMIT, Band
from gradtruth.core.spec import Spec
from gradtruth.core.strict import json_object, shown
from gradtruth.errors import InvalidProblem

CHOICES = {
    "layout": ["bshd", "sbhd", "thd"],
    "packing": ["separate", "3hd", "h3d", "2hd", "h2d"],
    "lengths": ["full", "cu_seqlens", "padding_mask", "extents"],
    "alignment": ["top_left", "bottom_right"],
    "bias": ["none", "pre_scale", "post_scale"],
    "softmax": ["vanilla", "off-by-one", "learnable"],
}
FLAGS = [
    "arbitrary",
    "alibi",
    "max_logit",
    "lse_grad",
    "deterministic",
    "batch_invariant",
    "allow_tf32",
]
BOUND = st.none() | st.integers(0, BAND_LIMIT - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    given_ = {name: draw(st.sampled_from(values)) for name, values in CHOICES.items()}
    if given_["layout"] == "thd":
        given_["lengths"] = draw(st.sampled_from(["cu_seqlens", "extents"]))
    return Spec(
        **given_,
        **{name: draw(st.booleans()) for name in FLAGS},
        left=draw(BOUND),
        right=draw(BOUND),
        scale=draw(st.none() | FLOATS),
        softcap=draw(st.none() | POSITIVE),
        dropout_p=draw(st.floats(0, 1)),
    )


def test_every_field_is_covered_here():
    assert {f.name for f in fields(Spec)} == {
        *CHOICES, *FLAGS, "left", "right", "scale", "softcap", "dropout_p",
    }  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(spec=specs(), other=specs())
def test_encode_and_decode_are_inverse_and_canonical(spec, other):
    text = spec.encode()
    back = Spec.decode(text)
    assert back == spec
    assert back.encode() == text
    assert Spec.decode(text) is back
    assert hash(back) == hash(spec)
    assert (other.encode() == text) == (other == spec)
    # One spelling: sorted names, no spaces, defaults left out, plain ASCII.
    found = json.loads(text)
    assert text == json.dumps(found, sort_keys=True, separators=(",", ":"))
    assert text.isascii()
    assert all(value != getattr(Spec(), name) for name, value in found.items())
    # Other spellings mean the same.
    every = {f.name: getattr(spec, f.name) for f in fields(Spec)}
    assert Spec.decode(json.dumps(dict(reversed(every.items())), indent=1)) == spec


def test_strings_that_files_hold():
    """Changing these breaks every case file and compiled graph."""
    assert Spec().encode() == "{}"
    spec = Spec(
        layout="thd", lengths="cu_seqlens", right=0, alignment="bottom_right", dropout_p=0.25
    )
    assert spec.encode() == (
        '{"alignment":"bottom_right","dropout_p":0.25,"layout":"thd","lengths":"cu_seqlens","right":0}'
    )
    assert Spec(scale=0.1, deterministic=False).encode() == '{"deterministic":false,"scale":0.1}'


@pytest.mark.parametrize("name", [f.name for f in fields(Spec)])
def test_every_field_is_in_the_string_and_in_the_hash(name):
    other = {
        "layout": "sbhd", "packing": "h3d", "lengths": "extents", "alignment": "bottom_right",
        "bias": "pre_scale", "softmax": "learnable", "left": 0, "right": 0, "scale": 2.0, "softcap": 3.0,
        "dropout_p": 1.0, **{flag: not getattr(Spec(), flag) for flag in FLAGS},
    }[name]  # fmt: skip
    changed = replace(Spec(), **{name: other})
    assert changed != Spec()
    assert changed.encode() == json.dumps({name: other}, separators=(",", ":"))
    assert Spec.decode(changed.encode()) == changed


def test_equal_floats_have_one_string():
    for zero in (0.0, -0.0, np.float64(-0.0)):
        assert Spec(scale=zero).encode() == '{"scale":0.0}'
        assert Spec(dropout_p=zero).encode() == "{}"
    spec = Spec(scale=np.float64(0.1), softcap=np.float64(2.0))
    assert type(spec.scale) is type(spec.softcap) is float
    assert math.copysign(1, Spec.decode('{"scale":-0.0}').scale) == 1


def test_frozen_hashable_picklable():
    spec = Spec(right=0)
    with pytest.raises(FrozenInstanceError):
        spec.right = 1
    assert {spec: 1}[Spec(right=0)] == 1
    assert pickle.loads(pickle.dumps(spec)) == spec


NOT_INTS = [True, False, 1.0, "1", [], {}, -1, BAND_LIMIT, 10**30, math.nan]
NOT_FLOATS = [True, 1, 10**400, "1", [], {}, math.nan, math.inf, -math.inf]
NOT_BOOLS = [None, 0, 1, 1.0, "true", [], {}]
WRONG = [
    *(
        (name, value)
        for name, allowed in CHOICES.items()
        for value in [
            None,
            "",
            "no",
            allowed[0].upper(),
            allowed[0] + " ",
            0,
            True,
            1.5,
            [],
            [allowed[0]],
            {},
        ]
    ),
    *((name, value) for name in ("left", "right") for value in NOT_INTS),
    *((name, value) for name in ("scale", "softcap") for value in NOT_FLOATS),
    *(("softcap", value) for value in (0.0, -0.0, -1.0)),
    *(("dropout_p", value) for value in [*NOT_FLOATS, None, -0.1, 1.0000001, 5e300]),
    *((name, value) for name in FLAGS for value in NOT_BOOLS),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda x: shown(x)[:30])
def test_illegal_values_are_refused_and_named(name, value):
    with pytest.raises(InvalidProblem, match=rf"^{name} is .*, expected ") as raised:
        Spec(**{name: value})
    assert len(str(raised.value)) < 500
    try:
        text = json.dumps({name: value})
    except ValueError:
        return
    with pytest.raises(InvalidProblem):
        Spec.decode(text)


@pytest.mark.parametrize("lengths", ["full", "padding_mask"])
def test_thd_has_lengths(lengths):
    with pytest.raises(InvalidProblem, match=f"lengths is '{lengths}', expected 'cu_seqlens'"):
        Spec(layout="thd", lengths=lengths)


def nested(depth: int, bracket: str = "[") -> str:
    return "[" * depth + "]" * depth if bracket == "[" else '{"a":' * depth + "1" + "}" * depth


HOSTILE_TEXTS = {
    "empty": "",
    "blank": " \n",
    "null": "null",
    "number": "5",
    "string": '"bshd"',
    "list": "[]",
    "list of pairs": '[["layout","bshd"]]',
    "open": "{",
    "two": "{}{}",
    "trailing": "{},",
    "comment": "{} // x",
    "single quotes": "{'layout':'bshd'}",
    "nul": '{"layout":"bshd"}\0',
    "byte order mark": "\ufeff{}",
    "unknown": '{"layouts":"bshd"}',
    "dunder": '{"__class__":"x"}',
    "self": '{"self":1}',
    "lone surrogate": '{"layout":"\\ud800"}',
    "name with surrogate": '{"\\ud800":1}',
    "twice": '{"right":0,"right":0}',
    "nan": '{"scale":NaN}',
    "infinity": '{"softcap":Infinity}',
    "overflow": '{"scale":1e999}',
    "long int": '{"left":' + "9" * 4000 + "}",
    "longer int": '{"left":' + "9" * 50_000 + "}",
    "long float": '{"left":1e' + "9" * 5000 + "}",
    "deep list": nested(100_000),
    "deep object": nested(100_000, "{"),
    "deep value": '{"left":' + nested(500) + "}",
    "deeper value": '{"left":' + nested(900) + "}",
    "deepest value": '{"layout":' + nested(100_000) + "}",
    "deep object value": '{"scale":' + nested(900, "{") + "}",
    "long text": '{"layout":"' + "x" * 10**6 + '"}',
    "many fields": "{" + ",".join(f'"f{n}":1' for n in range(10_000)) + "}",
}


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_hostile_texts_give_a_short_clear_error(name):
    with pytest.raises(InvalidProblem, match="expected") as raised:
        Spec.decode(HOSTILE_TEXTS[name])
    assert len(str(raised.value)) < 1500


def test_values_nested_to_any_depth_give_a_clear_error():
    """Every depth around the interpreter's own limit: reading, printing and comparing recurse too."""
    for depth in range(1, 1100, 13):
        for bracket in "[{":
            with pytest.raises(InvalidProblem):
                Spec.decode('{"right":' + nested(depth, bracket) + "}")


@pytest.mark.parametrize(
    "value", [None, 5, 1.5, True, b"{}", bytearray(b"{}"), [], {}, ["{}"], Spec()]
)
def test_only_text_is_decoded(value):
    with pytest.raises(InvalidProblem, match=r"spec is .*, expected a string"):
        Spec.decode(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([value for values in CHOICES.values() for value in values]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(found=st.dictionaries(st.sampled_from([f.name for f in fields(Spec)]), JSON, max_size=3))
def test_any_json_is_read_or_refused(found):
    try:
        spec = Spec.decode(json.dumps(found))
    except InvalidProblem:
        return
    assert all(getattr(spec, name) == value for name, value in found.items())
    assert Spec.decode(spec.encode()) == spec


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_is_read_or_refused(text):
    try:
        Spec.decode(text)
    except InvalidProblem:
        return
    assert isinstance(json.loads(text), dict)


def test_json_object_names_what_it_reads():
    assert json_object("header", '{"a":[1,2.5,null]}') == {"a": [1, 2.5, None]}
    for text in ("[]", "nope", 3):
        with pytest.raises(InvalidProblem, match=r"^header is "):
            json_object("header", text)


def test_shown_is_short():
    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    assert len(shown(deep)) < 100
    assert len(shown("x" * 10**6)) <= 200
    assert shown("bshd") == "'bshd'"
    assert shown(None) == "None"


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        (Spec(), "full"),
        (Spec(right=0), "causal"),
        (Spec(right=0, alignment="bottom_right"), "causal br"),
        (Spec(left=128, right=0), "window(128,0)"),
        (Spec(left=3), "window(3,-1)"),
        (Spec(right=2), "window(-1,2)"),
        (Spec(left=0, right=0, alignment="bottom_right"), "window(0,0) br"),
        (Spec(alignment="bottom_right"), "full"),
        (Spec(lengths="cu_seqlens"), "padding"),
        (Spec(lengths="padding_mask", right=0), "padding causal"),
        (Spec(layout="thd", lengths="cu_seqlens", right=0), "causal"),
        (Spec(arbitrary=True), "arbitrary"),
        (
            Spec(arbitrary=True, lengths="cu_seqlens", right=0, alignment="bottom_right"),
            "arbitrary padding causal br",
        ),
    ],
)
def test_mask_label(spec, label):
    assert spec.mask_label() == label


def test_derived_properties():
    assert Spec(left=3, right=0).band == Band(3, 0)
    assert not Spec().ragged
    for lengths in ("cu_seqlens", "padding_mask", "extents"):
        assert Spec(lengths=lengths).ragged
    assert [Spec(softmax=s).sink for s in CHOICES["softmax"]] == [False, True, True]


@pytest.mark.parametrize("found", [None, 3, "{}", [], [("right", 0)]])
def test_from_fields_takes_a_dict(found):
    with pytest.raises(InvalidProblem, match=r"spec is .*, expected a JSON object"):
        Spec.from_fields(found)
    assert Spec.from_fields({"right": 0}) == Spec(right=0)
