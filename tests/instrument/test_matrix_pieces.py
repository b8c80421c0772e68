"""The matrix is made in pieces: all of it, nothing twice, and the same file in whatever order they come."""

from __future__ import annotations

import json
import random

import pytest
from benchmarks.instrument import probing, results, tasks
from benchmarks.instrument.document import render

BUDGETS = {"c": 1.0}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(results, "budgets", lambda: dict(BUDGETS))
    monkeypatch.setattr(probing, "there", lambda: True)


def faked(task):
    """What a piece would find, if every cell were "value"."""
    if task.part == "sensitivity":
        return {" ".join((task.item, *task.mutants)): {"worst": 0.001, "at": [0, 1]}}
    if task.part == "elementwise":
        return dict.fromkeys(task.mutants, False)
    wanted = (
        tasks.columns("checks", task.item) if task.part == "checks" else {task.family or task.item}
    )
    return {name: dict.fromkeys(wanted, "value") for name in task.mutants}


def made(path, order):
    found = results.load(path)
    todo = tasks.tasks(found)
    order.shuffle(todo)
    for task in todo:
        results.merge(found, task, faked(task))
    results.save(path, found)
    return len(todo)


def test_the_pieces_are_everything_and_their_order_does_not_matter(tmp_path):
    for name in "ab":
        assert made(tmp_path / name, random.Random(name)) > 100
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    assert tasks.tasks(results.load(tmp_path / "a")) == []


def test_what_is_missing_is_all_that_is_made_again(tmp_path):
    path = tmp_path / "found"
    made(path, random.Random(0))
    whole = path.read_text()
    found = json.loads(whole)
    del found["checks"]["NegatedDq"]["backward"]
    del found["families"]["NegatedDq"]["outlier"]
    del found["probes"]["DsinkIsZero"]["sink-window-gqa-d64"]
    del found["sensitivity"]["causal-gqa-d64 float32 dk"]
    results.save(path, found)
    left = tasks.tasks(results.load(path))
    assert {(x.part, x.mutants, x.family) for x in left} == {
        ("checks", ("NegatedDq",), None),
        ("families", ("NegatedDq",), "outlier"),
        ("probes", ("DsinkIsZero",), None),
        ("sensitivity", ("float32", "dk"), None),
    }
    made(path, random.Random(0))
    assert path.read_text() == whole


def test_other_budgets_make_everything_again(tmp_path, monkeypatch):
    path = tmp_path / "found"
    count = made(path, random.Random(0))
    monkeypatch.setitem(BUDGETS, "c", 1.0 + 1e-5)
    assert len(tasks.tasks(results.load(path))) == count


def test_a_mark_says_what_alone_finds_a_fault(tmp_path):
    path = tmp_path / "found"
    made(path, random.Random(0))
    found = results.load(path)
    found["families"]["NegatedDq"] |= {
        "outlier": "value law",
        "peaked": "law",
        "tagged": "",
        "gaussian": "-",
    }
    found["probes"]["NegatedDq"] |= {"peaked": "", "tagged": "", "gaussian": ""}
    head, row = lines(render(found), "## By family", "NegatedDq")
    marks = dict(zip(head, row, strict=True))
    assert [marks[x] for x in ("outlier", "peaked", "tagged", "gaussian", "maskprobe")] == [
        "xLP", "L", ".", "-", "xP",
    ]  # fmt: skip
    head, row = lines(render(found), "## By check", "NegatedDq")
    assert {row[head.index(x)] for x in ("backward", "forward", "probes")} == {"**●**", "x"}


def lines(text, title, fault):
    """The head of a matrix and the row of a fault."""
    part = text[text.index(title) :]
    return [
        next(x for x in part.splitlines() if x.startswith(f"| {start} |")).strip("| ").split(" | ")
        for start in ("fault", fault)
    ]
