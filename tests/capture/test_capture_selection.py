"""Which calls a selection takes, and what sizes and ranges mean."""

import pytest

from gradtruth.errors import InvalidProblem
from gradtruth.verify.capture.budget import Budget, bytes_of, shown_bytes
from gradtruth.verify.capture.folder import Folder
from gradtruth.verify.capture.ranges import Ranges
from gradtruth.verify.capture.selection import Place, Selection


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("3", [3]),
        (3, [3]),
        ([1, 4], [1, 4]),
        (range(2, 5), [2, 3, 4]),
        ("0,10-12", [0, 10, 11, 12]),
        ("10-20:4", [10, 14, 18]),
        ("1, 20-:5", [1, 20, 25, 30, 35]),
        ("36-", [36, 37, 38, 39]),
        ("30-:1", list(range(30, 40))),
    ],
)
def test_ranges(given, expected):
    ranges = Ranges.of("step", given)
    assert [n for n in range(40) if n in ranges] == expected


@pytest.mark.parametrize(
    "given", ["", "a", "3-1", "1-2:0", "-3", "1,,2", "1:2", "1.5", "--", -1, [], [True], [1.0]]
)
def test_ranges_that_mean_nothing(given):
    with pytest.raises(InvalidProblem, match="step"):
        Ranges.of("step", given)


def _place(**changed):
    known = {
        "layer": "model.layers.3.self_attn", "index": 3, "step": 10, "call": 1, "rank": None,
        "entry": "torch.nn.functional.scaled_dot_product_attention",
    }  # fmt: skip
    return Place(**{**known, **changed})


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ({}, True),
        ({"layer": "*.layers.3.*"}, True),
        ({"layer": "*.layers.?.self_attn"}, True),
        ({"layer": "model.layers.3"}, False),
        ({"layer": "self_attn"}, False),
        ({"layer": "3"}, True),
        ({"layer": 3}, True),
        ({"layer": "0-2"}, False),
        ({"layer": "0-2,*.3.*"}, True),
        ({"layer": ["nothing", 3]}, True),
        ({"step": "0-9"}, False),
        ({"step": "0-:5"}, True),
        ({"call": 0}, False),
        ({"call": "1-"}, True),
        ({"rank": 0}, True),
        ({"rank": "1-3"}, False),
        ({"entry": "*scaled_dot*"}, True),
        ({"entry": "scaled_dot_product_attention"}, True),
        ({"entry": "flash_attn*"}, False),
        ({"entry": ["flash_attn*", "torch.*"]}, True),
        ({"layer": 3, "step": 10, "call": 1, "rank": 0, "entry": "torch*"}, True),
        ({"layer": 3, "step": 11, "call": 1}, False),
    ],
)
def test_takes(asked, taken):
    assert Selection.of(**asked).takes(_place()) is taken


def test_ranks_are_told_apart():
    asked = Selection.of(rank="2")
    assert [rank for rank in range(4) if asked.takes(_place(rank=rank))] == [2]


@pytest.mark.parametrize(
    "asked",
    [{"layer": ""}, {"layer": "a,"}, {"layer": []}, {"layer": [1.5]}, {"layer": True}, {"layer": "3-1"},
     {"entry": ""}, {"entry": [3]}, {"step": "x"}, {"call": -1}, {"rank": "a"}],
)  # fmt: skip
def test_selections_that_mean_nothing(asked):
    (name,) = asked
    with pytest.raises(InvalidProblem, match=name):
        Selection.of(**asked)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("500MB", 500_000_000), ("2GiB", 2 << 30), ("4g", 4 << 30), ("1.5 kB", 1500), (17, 17), ("17", 17),
     ("1T", 1 << 40)],
)  # fmt: skip
def test_sizes(given, expected):
    assert bytes_of("max_bytes", given) == expected


@pytest.mark.parametrize("given", ["", "MB", "-1", "0", 0, -5, 1.5, "1e3", "3 apples", "0.1", True])
def test_sizes_that_mean_nothing(given):
    with pytest.raises(InvalidProblem, match="max_bytes"):
        bytes_of("max_bytes", given)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"),
     (2_500_000_000, "2.5 GB")],
)  # fmt: skip
def test_sizes_shown(count, text):
    assert shown_bytes(count) == text


def test_the_budget_is_never_passed():
    budget = Budget(100, 3)
    assert budget.against(100) is None
    assert budget.against(101) == "max_bytes is 100 B"
    budget.spend(60)
    assert budget.against(41) is not None
    assert budget.against(40) is None
    budget.spend(1)
    budget.spend(1)
    assert budget.against(0) == "max_cases is 3"


@pytest.mark.parametrize("cases", [0, -1, True, 1.0])
def test_budgets_that_mean_nothing(cases):
    with pytest.raises(InvalidProblem, match="max_cases"):
        Budget("1MB", cases)


def test_names(tmp_path):
    folder = Folder(tmp_path, "run7")
    assert folder.name(_place()) == "run7-step000010-model.layers.3.self_attn-call1"
    assert folder.name(_place(rank=3, layer="")) == (
        "run7-rank00003-step000010-scaled_dot_product_attention-call1"
    )
    assert folder.name(_place(layer="../../x y")) == "run7-step000010-_.._x_y-call1"
    assert len(folder.name(_place(layer="x" * 500))) < 200
    other = Folder(tmp_path)
    assert other.name(_place(layer="", entry="pkg.mod:attend", call=0)) == "step000010-attend-call0"


@pytest.mark.parametrize("prefix", ["a/b", "..", ".hidden", "a b", 3, "é"])
def test_prefixes_that_no_file_should_have(tmp_path, prefix):
    with pytest.raises(InvalidProblem, match="prefix"):
        Folder(tmp_path, prefix)


def test_nothing_is_written_over(tmp_path):
    folder = Folder(tmp_path / "new" / "folder")
    written = [folder.write("name", bytes([n])) for n in range(3)]
    assert [path.name for path in written] == [
        "name.safetensors", "name.2.safetensors", "name.3.safetensors",
    ]  # fmt: skip
    assert [path.read_bytes() for path in written] == [b"\0", b"\1", b"\2"]
    assert sorted(folder.path.iterdir()) == sorted(written), "nothing unfinished stays"


def test_without_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", refuse)
    folder = Folder(tmp_path)
    assert folder.write("name", b"1").read_bytes() == b"1"
    assert folder.write("name", b"2").name == "name.2.safetensors"
    assert (tmp_path / "name.safetensors").read_bytes() == b"1"
    assert len(list(tmp_path.iterdir())) == 2
