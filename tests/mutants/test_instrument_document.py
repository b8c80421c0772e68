"""docs/instrument.md is what the code of today finds: its budgets, faults, checks, and a sample of its cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.instrument import elementwise, planted, sensitivity
from benchmarks.instrument.document import constants, render

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks/results/instrument.json").read_text())
FAULTS = planted.planted()


def test_the_document_is_rendered_from_the_results():
    assert (ROOT / "docs/instrument.md").read_text() == render(RESULTS)


def test_it_was_made_with_the_budgets_of_today():
    assert RESULTS["constants"] == constants()
    assert {"budget._FACTOR", "budget._C_LINE", "budget._LIMIT", "verdicts._APART"} <= set(
        constants()
    )


def test_it_knows_every_fault_and_asked_every_check():
    columns = {check.name for check in planted.ASKED} | set(planted.LAWS)
    assert (
        set(RESULTS["checks"])
        == set(RESULTS["problems"])
        == set(RESULTS["families"])
        == set(FAULTS)
    )
    assert all(set(cells) == columns for cells in RESULTS["checks"].values())
    assert all(set(cells) == set(planted.FAMILIES) for cells in RESULTS["families"].values())
    assert all(set(cells) == set(planted.QUICK) for cells in RESULTS["problems"].values())


def test_every_fault_is_found_by_its_check():
    silent = [
        name
        for name, fault in FAULTS.items()
        if fault.finding not in RESULTS["checks"][name][fault.check].split()
    ]
    assert silent == []


def test_the_sensitivity_is_what_is_asked_for():
    lines = RESULTS["sensitivity"]
    asked = {
        (i, d, t)
        for i in sensitivity.INPUTS
        for d in sensitivity.DTYPES
        for t in sensitivity.GRADIENTS
    }
    assert {(x["input"], x["dtype"], x["tensor"]) for x in lines} == asked
    blunt = [x for x in lines if x["worst"] > sensitivity.LIMITS.get(x["dtype"], float("inf"))]
    assert blunt == []


@pytest.mark.parametrize("dtype", sensitivity.DTYPES)
def test_a_line_of_the_sensitivity_is_measured_again(dtype):
    bench = sensitivity.Bench(sensitivity.INPUTS[0], dtype)
    for line in RESULTS["sensitivity"]:
        if (line["input"], line["dtype"]) == (sensitivity.INPUTS[0], dtype):
            e, place = line["worst"], (line["tensor"], *line["at"])
            assert bench.found(*place, 1 + 1.05 * e)
            assert bench.found(*place, 1 - 1.05 * e)
            assert not (bench.found(*place, 1 + 0.9 * e) and bench.found(*place, 1 - 0.9 * e))


SAMPLE = ("one-key-d64", "decode-gqa-d128")


@pytest.mark.parametrize("item", SAMPLE)
def test_a_sample_of_the_cells_is_found_again(item):
    faults = planted.groups()[item]
    for name, cells in planted.values(item, faults, "outlier").items():
        assert cells["outlier"] == RESULTS["families"][name]["outlier"]
    again = elementwise.caught(item, faults)
    assert {name: again[name] for name in again if name} == {
        f.name: RESULTS["elementwise"][f.name] for f in faults
    }
