"""The search for false alarms finds a fault, repeats nothing that it has done, and writes one file in any order."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from benchmarks import alarms as alarms_module
from benchmarks import false_alarms
from benchmarks.alarms import Alarms

from gradtruth.verify.suite.recipe import Recipe

BROKEN = "tests.instrument.broken_backend:NEGATED"


@pytest.fixture(autouse=True)
def budgets(monkeypatch):
    found = {"c": 1.0}
    monkeypatch.setattr(alarms_module, "budgets", lambda: dict(found))
    return found


def entered(numbers, names=("reference",)):
    found = Alarms("cpu", "here", {"c": 1.0})
    for at in numbers:
        for name in names:
            bad = at == 3
            found.enter(at, "float32", name, "alarm" if bad else "right", ["dq"] * bad, "again")
    return found


def test_a_fault_is_an_alarm_and_an_exception_does_not_end_the_run():
    answers = {}
    for recipe in islice(false_alarms.recipes(24), 24):
        broken, right = false_alarms.Examiner("cpu").examine(recipe, [BROKEN, "reference"])
        assert right == ("reference", "right", [])
        answers.setdefault((recipe.problem.layout == "thd", broken[1]), broken[2])
    assert any("dv is wrong" in line for line in answers[False, "alarm"])
    assert answers[True, "raised"] == ["RuntimeError: no thd"]


def test_the_first_problems_are_the_same_in_every_run():
    few, more = list(false_alarms.recipes(30)), list(false_alarms.recipes(1700))
    assert more[:30] == few
    assert len(more) == 1700
    assert {x.problem.dtype for x in more} == set(false_alarms.DTYPES)
    assert Recipe.decode(more[-1].encode()) == more[-1]


def test_a_file_is_the_same_in_whatever_order_answers_come(tmp_path):
    for name, numbers in (("a", [0, 1, 2, 3, 7]), ("b", [7, 3, 2, 0, 1])):
        entered(numbers, ("sdpa_math", "reference")).save(tmp_path / name)
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    stored = json.loads((tmp_path / "a").read_text())
    assert stored["problems"] == 5
    assert stored["done"] == {"reference": [[0, 3], [7, 7]], "sdpa_math": [[0, 3], [7, 7]]}
    assert stored["counts"]["reference"] == {"float32": {"alarm": 1, "right": 4}}
    assert [(x["backend"], x["problem"]) for x in stored["alarms"]] == [
        ("reference", 3),
        ("sdpa_math", 3),
    ]


def test_a_stopped_run_goes_on_and_counts_nothing_twice(tmp_path):
    path = tmp_path / "found.json"
    entered([0, 1, 3]).save(path)
    again = Alarms.load(path, "cpu", "here")
    left = list(false_alarms.tasks(again, ["reference", "unfused"], 5, 1))
    assert [(at, names) for at, _, names in left] == [
        (1, ("unfused",)),
        (2, ("reference", "unfused")),
        (3, ("unfused",)),
        (4, ("reference", "unfused")),
    ]
    again.enter(3, "float32", "reference", "alarm", ["dq"], "again")
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_results_with_other_budgets_are_not_added_to(tmp_path, budgets):
    path = tmp_path / "found.json"
    entered([0]).save(path)
    assert Alarms.load(path, "cpu", "here").examined == 1
    budgets["c"] = 1.001
    assert Alarms.load(path, "cpu", "here").examined == 0
