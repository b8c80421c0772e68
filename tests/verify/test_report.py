"""Reports: the same rows for a pipe, a terminal, a program and a reader."""

import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gradtruth.verify.findings import (
    SUPPORT,
    ExitCode,
    Measured,
    Row,
    Run,
    Verdict,
    exit_code,
    row_of_json,
)
from gradtruth.verify.report.cells import summary
from gradtruth.verify.report.console import print_verification
from gradtruth.verify.report.html import html
from gradtruth.verify.report.jsonl import write_json
from gradtruth.verify.report.markdown import markdown


def _measured(used, **place):
    return Measured(
        relative_l2=used / 100, cosine=0.5, norm_ratio=2.0, used=used, budget=0.01, **place
    )


def _row(**changes):
    heads = tuple(_measured(0.1 + n + h, sequence=n, head=h) for n in range(2) for h in range(3))
    given = {
        "case": "layer3",
        "case_id": "ab" * 32,
        "problem": "b2 s8 h3/1 d8 bf16 bshd causal",
        "backend": "reference",
        "check": "backward",
        "tensor": "dq",
        "verdict": Verdict.WRONG,
        "whole": _measured(3.1),
        "worst": heads[-1],
        "heads": heads,
        "detail": ("a | b", "<script>alert(1)</script>"),
        "seconds": 0.5,
    }
    return Row(**given | changes)


_REFUSAL = _row(
    backend="sdpa_flash",
    check=SUPPORT,
    tensor=None,
    verdict=Verdict.REFUSES,
    whole=None,
    worst=None,
    heads=(),
    detail=("no bias", "a window\nof 3\x1b[31m tokens " + "x" * 300),
    seconds=None,
)
_RIGHT = _row(
    verdict=Verdict.RIGHT, check="forward", tensor="out", detail=(), whole=_measured(math.nan)
)
_RUN = Run(
    rows=(_row(), _REFUSAL, _RIGHT),
    facts={"torch": "2.13.0", "threads": 2},
    cases={"layer3": {"model": "<b>tiny</b>", "layer": 3}},
)


def _text(rows):
    stream = io.StringIO()
    print_verification(rows, stream)
    return stream.getvalue()


def _plain():
    """Of a run where sdpa_flash refuses one case and takes another."""
    return _text((*_RUN.rows, replace(_RIGHT, case="layer4", backend="sdpa_flash")))


def test_plain_text_has_one_aligned_line_per_row():
    lines = _plain().splitlines()
    table = lines[: lines.index("")]
    assert len(table) == 2 + len(_RUN.rows)
    for name in ("backend", "verdict", "detail"):
        at = table[0].index(name)
        assert all(line[at - 2 : at] == "  " and line[at] != " " for line in table[1:]), name
    refusal = next(line for line in table if "refuses" in line)
    assert "x" * 300 in refusal, "nothing is cut"
    assert "a window of 3" in refusal


def test_what_refuses_every_case_is_said_once_with_its_reason():
    twice = (replace(_REFUSAL, case=name, backend="flash_attn_2") for name in ("layer3", "layer4"))
    text = _text((*_RUN.rows, *twice))
    assert text.count("flash_attn_2") == 1
    below = text.split("refuse every case:\n")[1].splitlines()
    assert below[0].split() == ["backend", "why"]
    assert below[2].startswith("flash_attn_2  no bias; a window of 3")
    assert text.endswith("1 right, 1 WRONG, 3 refuses, 0 not claimed, 0 not reached, 0 error\n")


def test_where_all_refuse_there_is_no_empty_table():
    assert _text((_REFUSAL,)).startswith("refuse every case:\n")


def test_plain_text_has_no_escape_codes():
    assert "\x1b" not in _plain()


def test_summary_takes_the_gravest_verdict():
    text = _plain()
    summary = text.split("\n\n")[1].splitlines()
    assert summary[1].split() == ["layer3", "reference", "right", "WRONG", "-", "-"]
    assert summary[2].split() == ["layer3", "sdpa_flash", *["refuses"] * 4]
    assert (
        text.splitlines()[-1]
        == "2 right, 1 WRONG, 1 refuses, 0 not claimed, 0 not reached, 0 error"
    )


@pytest.mark.parametrize("order", [1, -1])
def test_a_right_tensor_does_not_hide_a_wrong_one(order):
    rows = [_row(tensor="dq"), _row(tensor="dk", verdict=Verdict.RIGHT)][::order]
    assert summary(rows) == [("layer3", "reference", "-", "WRONG", "-", "-")]


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [100, 250])
def test_terminal_shows_the_same_rows(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    stream = _Terminal()
    print_verification(_RUN.rows, stream)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    first = next(line for line in lines if "reference" in line)
    assert re.search(r"reference +backward +dq +WRONG", first), "a row is one line"
    assert "\x1b[31m tokens" not in stream.getvalue()
    assert ("no room for worst_norm_ratio" in text) == (width == 100)
    assert ("worst_cosine" in lines[0]) == (width == 250)


def test_json_document_round_trips(tmp_path):
    path = tmp_path / "rows.json"
    write_json(_RUN, path)
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert set(found) == {"format", "facts", "cases", "rows"}
    assert found["format"] == 1
    assert [repr(row_of_json(row)) for row in found["rows"]] == [repr(row) for row in _RUN.rows]


def test_json_lines_are_the_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_json(_RUN, path)
    lines = path.read_text().splitlines()
    assert [row_of_json(json.loads(line)).backend for line in lines] == [
        "reference",
        "sdpa_flash",
        "reference",
    ]


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []
        self.open = []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_complete_escaped_and_without_scripts():
    text = html(_RUN)
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.found
    assert "&lt;script&gt;" in text
    assert "&lt;b&gt;tiny" in text
    assert tags.found.count("svg") == 2
    assert tags.found.count("rect") == 12
    assert text.count('class="over"') == 2 * 5
    assert not re.search(r"https?://|src=|@import|url\(", text)


def test_html_shows_the_worst_of_many_heads():
    heads = tuple(_measured(0.001 * at, sequence=at, head=0) for at in range(1000))
    text = html(Run(rows=(_row(heads=heads),)))
    assert "without the 744 that used least" in text
    assert "n999,h0" in text
    assert "n1,h0" not in text


def test_markdown_keeps_its_columns():
    lines = markdown(_RUN).splitlines()
    table = [line for line in lines if line.startswith("| layer3")]
    marks = [len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("| case")]
    assert len(table) == 2 + 1 + 3
    assert len(re.findall(r"(?<!\\)\|", table[-3])) == marks[-1]
    assert "<script>" not in markdown(_RUN)


@pytest.mark.parametrize(
    ("verdicts", "named", "expected"),
    [
        ("right", False, ExitCode.VERIFIED),
        ("right,refuses,not claimed", False, ExitCode.VERIFIED),
        ("right,refuses", True, ExitCode.UNSUPPORTED),
        ("right,not claimed", True, ExitCode.VERIFIED),
        ("refuses,refuses", False, ExitCode.UNSUPPORTED),
        ("not claimed", False, ExitCode.UNSUPPORTED),
        ("right,WRONG,refuses", True, ExitCode.FINDINGS),
        ("right,error", False, ExitCode.FINDINGS),
        ("", False, ExitCode.UNSUPPORTED),
    ],
)
def test_exit_code(verdicts, named, expected):
    rows = [_row(verdict=Verdict(v)) for v in verdicts.split(",") if v]
    assert exit_code(rows, named=named) is expected
