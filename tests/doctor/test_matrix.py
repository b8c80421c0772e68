"""The matrix: the gravest verdict of a case counts, findings are gathered, the worst case comes first."""

import math
from xml.etree import ElementTree

import pytest

from gradtruth.verify.checks import CHECKS
from gradtruth.verify.doctor import advice as words
from gradtruth.verify.doctor.advice import advice
from gradtruth.verify.doctor.matrix import matrix
from gradtruth.verify.findings import PROCESS, SUPPORT, Kind, Measured, Row, Run, Verdict
from gradtruth.verify.report.junit import junit
from gradtruth.verify.report.matrix import finding_line, notes


def _row(case="a", backend="x", check="backward", verdict=Verdict.RIGHT, used=None, **more):
    worst = (
        None
        if used is None
        else Measured(
            relative_l2=0.1, cosine=None, norm_ratio=None, used=used, budget=0.1, sequence=1, head=2
        )
    )
    return Row(
        case=case,
        case_id="",
        problem="",
        backend=backend,
        check=check,
        verdict=verdict,
        worst=worst,
        **more,
    )


def _wrong(case="a", used=3.0, **more):
    return _row(case, verdict=Verdict.WRONG, tensor="dq", kind=Kind.VALUE, used=used, **more)


@pytest.mark.parametrize(
    ("verdicts", "cell"),
    [
        ({"a": [Verdict.RIGHT, Verdict.WRONG], "b": [Verdict.RIGHT]}, "WRONG 1 of 2"),
        ({"a": [Verdict.ERROR], "b": [Verdict.WRONG]}, "WRONG 2 of 2"),
        ({"a": [Verdict.RIGHT], "b": [Verdict.NOT_REACHED]}, "right 1"),
        ({"a": [Verdict.NOT_CLAIMED, Verdict.RIGHT], "b": [Verdict.RIGHT]}, "right 2"),
        ({"a": [Verdict.NOT_CLAIMED], "b": [Verdict.NOT_REACHED]}, "not claimed"),
        ({"a": [Verdict.NOT_REACHED]}, "not reached"),
        ({"a": [Verdict.WRONG], "b": [Verdict.NOT_REACHED]}, "WRONG 1 of 1"),
    ],
)
def test_a_cell(verdicts, cell):
    rows = [_row(case, verdict=v) for case, found in verdicts.items() for v in found]
    assert matrix(rows).cells == ((cell,),)
    assert matrix(rows[::-1]).cells == ((cell,),), "whatever the order"


def test_a_check_that_a_backend_never_came_to_has_an_empty_cell():
    found = matrix([_row(), _row(backend="y", check="forward")])
    assert (found.checks, found.backends) == (("backward", "forward"), ("x", "y"))
    assert found.cells == (("right 1", "-"), ("-", "right 1"))


def test_refusals_are_counted_and_the_commonest_reason_is_told():
    rows = [
        _row("a", "x", SUPPORT, Verdict.REFUSES, detail=("dtype", "layout")),
        _row("b", "x", SUPPORT, Verdict.REFUSES, detail=("layout",)),
        _row("a", "y", SUPPORT, Verdict.REFUSES, detail=("dtype",)),
        _row("b", "y"),
        _row("b", "oracle", SUPPORT, Verdict.ERROR, detail=("no oracle",)),
    ]
    found = matrix(rows)
    assert found.refused == {"x": (2, 2), "y": (1, 2)}
    assert found.refusals == {"x": "layout"}
    (table,) = notes(found)
    assert table == ("Not examined, or not to the end", ("backend", "why"), [("x", "layout")])
    assert "oracle" not in found.backends


def test_one_finding_for_one_fault_with_the_worst_case_first():
    rows = [
        _wrong("mild", 2.0, detail=("a little",)),
        _wrong("grave", 9.0, detail=("a lot", "everywhere")),
        _wrong("grave", 4.0),
        _wrong("middle", 3.0),
        _row("mild", verdict=Verdict.WRONG, tensor="dk", kind=Kind.VALUE, used=2.0),
        _row("mild", verdict=Verdict.WRONG, tensor="dq", kind=Kind.NOT_ZERO, used=2.0),
        _row("mild", verdict=Verdict.NOT_CLAIMED, tensor="dv", kind=Kind.BITS),
    ]
    first, *others = matrix(rows).findings
    assert first.cases == ("grave", "mild", "middle")
    assert (first.place, first.detail) == ("sequence 1, head 2", "a lot; everywhere")
    assert [(f.tensor, f.kind) for f in others] == [("dk", Kind.VALUE), ("dq", Kind.NOT_ZERO)]


def test_nan_is_worse_than_any_number():
    rows = [_wrong("number", 1e9), _wrong("nan", math.nan), _wrong("more", 2e9)]
    assert matrix(rows).findings[0].cases[0] == "nan"


def test_the_line_of_a_finding_names_three_cases():
    found = matrix(
        [_wrong(name, used) for name, used in zip("abcde", range(9, 4, -1), strict=True)]
    )
    line = finding_line(found.findings[0])
    assert line[4] == "a, b, c and 2 more"
    assert finding_line(matrix([_wrong()]).findings[0])[4] == "a"


def test_every_check_has_an_advice_of_its_own():
    names = {check.name for check in CHECKS}
    assert names == set(words._BY_CHECK)
    said = [advice(_row(check=name, kind=Kind.VALUE)) for name in names]
    assert len(set(said)) == len(names)
    assert all(text and text == " ".join(text.split()) for text in said), "one line each"


@pytest.mark.parametrize("check", ["forward", "backward", "backward-from-oracle"])
def test_an_exception_and_nan_have_advices_of_their_own(check):
    value = advice(_row(check=check, kind=Kind.VALUE))
    raised = advice(_row(check=check, kind=Kind.RAISED))
    lost = advice(_row(check=check, kind=Kind.NONFINITE))
    assert len({value, raised, lost}) == 3
    other = advice(_row(check="batch_slice", kind=Kind.RAISED))
    assert other == advice(_row(check="batch_slice", kind=Kind.VALUE))


def test_junit_counts_and_escapes():
    rows = (
        _row(seconds=0.25),
        _wrong(detail=("a < b & \x1b[31mred",)),
        _row(verdict=Verdict.ERROR, kind=Kind.RAISED, detail=("boom",)),
        _row(verdict=Verdict.ERROR, kind=Kind.RAISED, detail=("again",)),
        _row(verdict=Verdict.NOT_CLAIMED, detail=("foreign_lse",)),
        _row(verdict=Verdict.NOT_REACHED, detail=("one head",)),
        _row(backend="y", check=SUPPORT, verdict=Verdict.REFUSES, detail=("layout",)),
    )
    root = ElementTree.fromstring(junit(Run(rows=rows, facts={"torch": "2", "gpu": "<none>"})))
    x, y = root
    counts = [x.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["6", "1", "2", "2"]
    assert y.find("testcase/skipped").get("message") == "refuses: layout"
    failure = x.find(".//failure")
    assert failure.get("type") == "value"
    assert "a < b & " in failure.get("message")
    assert "3.00x of the budget at n1,h2" in failure.get("message")
    assert "\x1b" not in failure.get("message")
    assert x.find(".//error").get("type") == "raised"
    right = x.find("testcase")
    assert (right.get("time"), right.get("classname"), len(right)) == ("0.250", "x.backward", 0)
    assert {p.get("name"): p.get("value") for p in x.find("properties")} == {
        "torch": "2",
        "gpu": "<none>",
    }


def test_what_is_not_reached_says_why_with_backends_together():
    def missed(case, backend, why, check="c"):
        return _row(case, backend, check, Verdict.NOT_REACHED, detail=(why,))

    rows = [
        *(_row("a", backend, "b") for backend in "xyzw"),
        *(missed("a", backend, "one head") for backend in "xy"),
        missed("b", "x", "one head"),
        missed("c", "x", "something else"),
        _row("a", "z", "c"),
        missed("b", "z", "one head"),
        _row("a", "w", PROCESS, Verdict.NOT_REACHED, detail=("it was not done after 1 s",)),
        _row("a", "r", SUPPORT, Verdict.REFUSES, detail=("layout",)),
    ]
    found = matrix(rows)
    assert found.unreached == (
        ("c", ("x", "y"), "one head"),
        ("c", ("w",), "it was not done after 1 s"),
    )
    titles = {title: lines for title, _, lines in notes(found)}
    assert ("c", "x, y", "one head") in titles["Not reached"]


def test_guarantees_that_are_not_claimed_are_named():
    rows = [
        _row("a", "x", "c", Verdict.NOT_CLAIMED, detail=("no_sync: it is not promised",)),
        _row("a", "x", "c"),
        _row("b", "x", "d", Verdict.NOT_CLAIMED, detail=("foreign_lse: its own",)),
        _row("b", "y", "d"),
    ]
    found = matrix(rows)
    assert found.cells[0][0] == "right 1"
    assert found.unclaimed == {"x": ("foreign_lse", "no_sync")}
    lines = [("x", "foreign_lse, no_sync")]
    assert notes(found)[-1] == (
        "Guarantees that are not claimed",
        ("backend", "guarantees"),
        lines,
    )
