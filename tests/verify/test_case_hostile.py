"""Damaged and hostile case files: each is refused with a clear text, without a crash or a large allocation."""

import json
import resource
import struct

import pytest
import torch

from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.errors import CaseFormatError
from gradtruth.verify.cases.case import Case

_KEY = "gradtruth.case"


def _case():
    q = torch.arange(2 * 5 * 4 * 8.0).view(2, 5, 4, 8)
    return Case.of(Spec(right=0), Inputs(q=q, k=q + 1, v=q + 2), q + 3, provenance={"layer": 1})


def _thd_case(cu=(0, 3, 5)):
    q = torch.ones(5, 2, 8)
    lengths = torch.tensor(cu, dtype=torch.int32)
    inputs = Inputs(q=q, k=q + 1, v=q + 2, cu_seqlens_q=lengths, cu_seqlens_kv=lengths.clone())
    return Case.of(Spec(layout="thd", lengths="cu_seqlens"), inputs, q + 3)


def _taken_apart(case=None):
    data = (case or _case()).to_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    return header, json.loads(header["__metadata__"][_KEY]), data[8 + size :]


def _file(header, body, document=None):
    if document is not None:
        text = document if isinstance(document, str) else json.dumps(document)
        header = header | {"__metadata__": {_KEY: text}}
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _with_document(change, case=None):
    header, document, body = _taken_apart(case)
    return _file(header, body, change(document) or document)


def _with_header(change):
    header, _, body = _taken_apart()
    return _file(change(header) or header, body)


def _view(name, **fields):
    return lambda d: d["views"][name].update(fields)


def _problem(**fields):
    return lambda d: d["problem"].update(fields)


def _set(**fields):
    return lambda d: d.update(fields)


def _drop(name):
    return lambda d: d["views"].pop(name) and None


def _entry(name, **fields):
    return lambda h: h[name].update(fields)


_GOOD = _case().to_bytes()
_DEEP = "[" * 100_000 + "]" * 100_000
_HUGE = 2**62

_CONTAINER = {
    "empty": (b"", "0 bytes"),
    "seven bytes": (_GOOD[:7], "7 bytes"),
    "only the length": (_GOOD[:8], "truncated"),
    "half a header": (_GOOD[:100], "truncated"),
    "one byte short": (_GOOD[:-1], "truncated or damaged"),
    "one byte more": (_GOOD + b"\0", "truncated or damaged"),
    "a header of 2**63 bytes": (
        struct.pack("<Q", 2**63) + _GOOD[8:],
        "header says 9223372036854775808",
    ),
    "a header that ends early": (struct.pack("<Q", 20) + _GOOD[8:], "not JSON"),
    "zeros": (bytes(4096), "not JSON"),
    "a pickle": (b"\x80\x04\x95" + bytes(200), "not a safetensors file"),
    "a zip": (b"PK\x03\x04" + bytes(300), "not a safetensors file"),
    "not UTF-8": (_file(b'{"\xff": 1}', b""), "not UTF-8"),
    "an array": (_file([1, 2], b""), "expected a JSON object"),
    "deep": (_file(_DEEP.encode(), b""), "not JSON"),
    "no metadata": (_with_header(lambda h: h.pop("__metadata__") and None), "not a gradtruth case"),
    "metadata of another program": (
        _with_header(_set(__metadata__={"format": "pt"})),
        "not a gradtruth case",
    ),
    "two metadata keys": (
        _with_header(lambda h: h["__metadata__"].update(more="x")),
        "not a gradtruth case",
    ),
    "metadata that is a number": (
        _with_header(_set(__metadata__={_KEY: 1})),
        "not a gradtruth case",
    ),
    "twice the same tensor": (
        _file(
            b'{"__metadata__":{"gradtruth.case":"{}"},'
            b'"q":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"q":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            bytes(4),
        ),
        "stands twice",
    ),
    "a shape that overflows": (_with_header(_entry("q", shape=[_HUGE])), "has offsets"),
    "a negative shape": (_with_header(_entry("q", shape=[-320])), "expected one dim"),
    "a shape of floats": (_with_header(_entry("q", shape=[320.0])), "expected one dim"),
    "a shape of bools": (_with_header(_entry("q", shape=[True])), "expected one dim"),
    "two dims": (_with_header(_entry("q", shape=[2, 160])), "expected one dim"),
    "a wrong number of elements": (_with_header(_entry("q", shape=[319])), "has offsets"),
    "offsets past the end": (
        _with_header(_entry("q", shape=[_HUGE], data_offsets=[0, 4 * _HUGE])),
        "starts at byte",
    ),
    "overlapping tensors": (_with_header(_entry("q", data_offsets=[0, 1280])), "starts at byte"),
    "an unknown dtype": (
        _with_header(_entry("q", dtype="F8_E4M3", shape=[1280])),
        "has dtype 'F8_E4M3'",
    ),
    "a dtype that is a list": (_with_header(_entry("q", dtype=["F32"])), "has dtype"),
    "an entry that is a text": (
        _with_header(_set(q="F32")),
        "expected dtype, shape and data_offsets",
    ),
    "an entry with more": (
        _with_header(_entry("q", more=1)),
        "expected dtype, shape and data_offsets",
    ),
}

_DOCUMENT = {
    "not JSON": (lambda _: "{", "not JSON"),
    "a text": (lambda _: '"x"', "expected an object"),
    "deep": (lambda _: _DEEP, "not JSON"),
    "a number of 5000 digits": (lambda _: '{"format": ' + "1" * 5000 + "}", "not JSON"),
    "NaN": (lambda _: '{"format": NaN}', "NaN is not allowed"),
    "a name twice": (lambda _: '{"format": 1, "format": 1}', "stands twice"),
    "format 2": (_set(format=2), "format is 2, this release reads 1"),
    "format 1.0": (_set(format=1.0), "format is 1.0"),
    "format true": (_set(format=True), "format is True"),
    "no format": (lambda d: d.pop("format") and None, "format is None"),
    "an unknown key": (_set(extra=1), "the case document has"),
    "no history": (lambda d: d.pop("history") and None, "the case document has"),
    "history of numbers": (_set(history=[1]), "history is"),
    "history that is a text": (_set(history="x"), "history is a str"),
    "provenance of floats": (_set(provenance={"a": 0.5}), "provenance has 'a'"),
    "provenance that is a list": (_set(provenance=[]), "provenance is a list"),
    "views that are a list": (_set(views=[]), "views is a list"),
    "no q": (_drop("q"), r"lacks \['q'\]"),
    "no dout": (_drop("dout"), r"lacks \['dout'\]"),
    "an unknown tensor": (
        lambda d: d["views"].update(w=d["views"]["q"]),
        r"unknown tensors \['w'\]",
    ),
    "a view that is a list": (lambda d: d["views"].update(q=[1]), "the view of q is not an object"),
    "a view with more": (_view("q", more=1), "the view of q is not an object"),
    "a view of nothing": (_view("q", base="nothing"), "q is a view of 'nothing'"),
    "a base that is a list": (_view("q", base=["q"]), "the view of q is not made of"),
    "a base without a view": (_view("q", base="k"), r"bases \['q'\] have no view"),
    "an offset past the base": (
        _view("q", offset=1),
        "q reaches element 321 of base 'q', which has 320",
    ),
    "a stride past the base": (_view("q", stride=[160, 32, 8, 2]), "q reaches element 327"),
    "a size past the base": (_view("q", size=[3, 5, 4, 8]), "q reaches element 480"),
    "a negative stride": (_view("q", stride=[160, 32, -8, 1]), "expected non-negative numbers"),
    "a negative size": (_view("q", size=[2, 5, -4, 8]), "expected non-negative numbers"),
    "a negative offset": (_view("q", offset=-1), "expected non-negative numbers"),
    "an offset of 2**62": (_view("q", offset=_HUGE), "expected non-negative numbers"),
    "a stride of 2**62": (_view("q", stride=[_HUGE, 32, 8, 1]), "expected non-negative numbers"),
    "a size of 2**62": (
        _view("q", size=[_HUGE, 5, 4, 8], stride=[0, 0, 0, 0]),
        "expected non-negative",
    ),
    "sizes that overflow": (
        _view("q", size=[2**32, 2**32, 4, 8], stride=[0] * 4),
        "at most 1099511627776 elements",
    ),
    "sizes that overflow, empty": (
        _view("q", size=[0, 2**63, 4, 8]),
        "expected non-negative numbers",
    ),
    "more strides than sizes": (_view("q", stride=[160, 32, 8, 1, 1]), "expected as many of each"),
    "a hundred dims": (_view("q", size=[1] * 100, stride=[1] * 100), "at most 8"),
    "a stride of 0.5": (_view("q", stride=[160, 32, 8, 0.5]), "the view of q is not made of"),
    "a size of true": (_view("q", size=[2, 5, 4, True]), "the view of q is not made of"),
    "three dims": (_view("q", size=[10, 4, 8], stride=[32, 8, 1]), r"q has shape \[10, 4, 8\]"),
    "another head dim": (
        _view("k", size=[2, 5, 8, 4], stride=[160, 32, 4, 1]),
        "k's last dim is 4",
    ),
    "a problem that is a text": (_set(problem="x"), "problem is a str"),
    "a problem without a spec": (lambda d: d["problem"].pop("spec") and None, "expected spec"),
    "a problem with more": (_problem(extra=1), "problem has fields"),
    "a problem of another length": (_problem(seqlen_q=6), "its tensors say"),
    "a problem of length 2**62": (_problem(seqlen_q=_HUGE), "seqlen_q is 4611686018427387904"),
    "a problem of negative length": (_problem(seqlen_q=-1), "seqlen_q is -1"),
    "a problem of another dtype": (_problem(dtype="float16"), "its tensors say"),
    "a problem of an unknown dtype": (_problem(dtype="int8"), "dtype is 'int8'"),
    "a problem of a listed dtype": (_problem(dtype=["float32"]), "dtype is"),
    "a problem of other strides": (_problem(strides={"q": "ue"}), "its tensors say"),
    "a bound that is a text": (_problem(max_seqlen_q="x"), "max_seqlen"),
    "a bound of 2**62": (_problem(max_seqlen_q=_HUGE), "max_seqlen is"),
    "a mask without a shape": (_problem(spec={"arbitrary": True}), "mask_shape is None"),
    "a mask that is not there": (
        _problem(spec={"arbitrary": True}, mask_shape=[1, 1, 5, 5]),
        "attention_mask is None",
    ),
    "a layout that it is not": (_problem(spec={"layout": "sbhd"}), "its tensors say"),
    "an unknown layout": (_problem(spec={"layout": "dhsb"}), "layout is 'dhsb'"),
    "a spec with more": (_problem(spec={"more": 1}), "unknown fields"),
    "a spec of a listed layout": (_problem(spec={"layout": ["bshd"]}), "layout is"),
    "a scale that is a text": (_problem(spec={"scale": "x"}), "scale is 'x'"),
    "a window that is a float": (_problem(spec={"left": 1.5}), "left is 1.5"),
}


@pytest.mark.parametrize("name", _CONTAINER)
def test_damaged_container(name):
    data, message = _CONTAINER[name]
    with pytest.raises(CaseFormatError, match=message):
        Case.from_bytes(data)


@pytest.mark.parametrize("name", _DOCUMENT)
def test_hostile_document(name):
    change, message = _DOCUMENT[name]
    with pytest.raises(CaseFormatError, match=message):
        Case.from_bytes(_with_document(change))


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ((0, 5, 3), "never decrease"),
        ((-1, 3, 5), "never decrease"),
        ((0, 3, 9), "ends at 9"),
        ((0, 2**31 - 1, 5), "never decrease"),
    ],
)
def test_lengths_that_say_nothing(cu, message):
    with pytest.raises(CaseFormatError, match=message):
        Case.from_bytes(_thd_case(cu).to_bytes())


def test_lengths_that_are_expanded_to_a_tera():
    view = {"size": [2**39], "stride": [0], "offset": 0}

    def change(document):
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            document["views"][name].update(view)

    with pytest.raises(CaseFormatError, match="cu_seqlens_q is expanded"):
        Case.from_bytes(_with_document(change, _thd_case()))


def test_bools_other_than_0_and_1():
    q = torch.ones(1, 3, 1, 4)
    mask = torch.zeros(1, 3, dtype=torch.bool)
    inputs = Inputs(q=q, k=q + 1, v=q + 2, padding_mask_q=mask, padding_mask_kv=mask.clone())
    header, _, body = _taken_apart(Case.of(Spec(lengths="padding_mask"), inputs, q + 3))
    first = header["padding_mask_q"]["data_offsets"][0]
    damaged = body[:first] + b"\x07" + body[first + 1 :]
    with pytest.raises(CaseFormatError, match="bools other than 0 and 1"):
        Case.from_bytes(_file(header, damaged))


def test_every_truncation_is_refused():
    for size in range(0, len(_GOOD), 7):
        with pytest.raises(CaseFormatError):
            Case.from_bytes(_GOOD[:size])


def test_every_damaged_byte_of_the_header_is_refused_or_harmless():
    header_end = 8 + struct.unpack("<Q", _GOOD[:8])[0]
    for at in range(header_end):
        damaged = bytearray(_GOOD)
        damaged[at] ^= 0x15
        try:
            found = Case.from_bytes(bytes(damaged))
        except CaseFormatError:
            continue
        assert found.problem == _case().problem, at


def test_not_a_file(tmp_path):
    with pytest.raises(CaseFormatError, match="not a regular file"):
        Case.load(tmp_path)
    with pytest.raises(CaseFormatError, match="/dev/zero: not a regular file"):
        Case.load("/dev/zero")
    with pytest.raises(FileNotFoundError):
        Case.load(tmp_path / "absent")


def test_the_message_names_the_file(tmp_path):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(_GOOD[:-1])
    with pytest.raises(CaseFormatError, match=r"broken\.safetensors: .*truncated"):
        Case.load(path)


def test_a_huge_file_with_a_bad_header_is_not_read(tmp_path):
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CaseFormatError, match="header says"):
        Case.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_tile_whose_bias_is_too_small():
    from gradtruth.core.tile import tile

    q = torch.ones(1, 6, 2, 8)
    inputs = Inputs(q=q, k=q + 1, v=q + 2, bias=torch.ones(1, 2, 6, 6))
    whole = Case.of(Spec(bias="post_scale"), inputs, q + 3)
    problem, part = tile(whole.problem, whole.inputs, queries=(2, 6))
    case = Case.of(problem.spec, part, q + 3)
    assert Case.from_bytes(case.to_bytes()).problem == case.problem
    part.extents[5] += 1
    with pytest.raises(CaseFormatError, match="index_q of extents leaves bias"):
        Case.from_bytes(case.to_bytes())
