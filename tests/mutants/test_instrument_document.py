"""docs/instrument.md is what the code of today finds: its budgets, faults, checks, and a sample of its cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import false_alarms
from benchmarks.instrument import elementwise, planted, sensitivity
from benchmarks.instrument.budgets import budgets, same
from benchmarks.instrument.document import render
from benchmarks.instrument.results import alarms
from benchmarks.instrument.tasks import columns, tasks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks/results"
RESULTS = json.loads((FOLDER / "instrument.json").read_text())
ALARMS = {found["device"]: found for found in alarms(FOLDER)}
FAULTS = planted.planted()


def test_the_document_is_rendered_from_the_results():
    assert (ROOT / "docs/instrument.md").read_text() == render(RESULTS, alarms(FOLDER))


def test_it_was_made_with_the_budgets_of_today():
    assert same(RESULTS["budgets"], budgets())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("budget._C_LINE", 1.00001),
        ("verdicts._APART", 1.00001),
        ("causal-gqa-d64 bfloat16 dq projection", 1.00001),
    ],
)
def test_another_budget_is_another_one(name, change):
    assert not same(
        RESULTS["budgets"] | {name: RESULTS["budgets"][name] * change}, RESULTS["budgets"]
    )
    assert not same({x: y for x, y in RESULTS["budgets"].items() if x != name}, RESULTS["budgets"])


def test_it_knows_every_fault_and_asked_every_check():
    assert tasks(RESULTS) == []
    for part in ("checks", "families", "problems", "probes"):
        assert {name: set(cells) for name, cells in RESULTS[part].items()} == {
            name: columns(part, fault.item) for name, fault in FAULTS.items()
        }
    assert set(RESULTS["elementwise"]) == set(FAULTS)


def test_every_fault_is_found_by_its_check():
    silent = [
        name
        for name, fault in FAULTS.items()
        if fault.finding not in RESULTS["checks"][name][fault.check].split()
    ]
    assert silent == []


def test_the_sensitivity_is_what_is_asked_for():
    found = RESULTS["sensitivity"]
    assert set(found) == set(sensitivity.lines())
    blunt = [x for x in found if found[x]["worst"] > sensitivity.LIMITS[x.split()[1]]]
    assert blunt == []


@pytest.mark.parametrize("dtype", sensitivity.DTYPES)
def test_a_line_of_the_sensitivity_is_measured_again(dtype):
    bench = sensitivity.Bench(sensitivity.INPUTS[0], dtype)
    for tensor in sensitivity.GRADIENTS:
        line = RESULTS["sensitivity"][f"{sensitivity.INPUTS[0]} {dtype} {tensor}"]
        e, place = line["worst"], (tensor, *line["at"])
        assert bench.both(*place, 1.05 * e)
        assert not bench.both(*place, 0.9 * e)


@pytest.mark.parametrize("item", ["one-key-d64", "decode-gqa-d128"])
def test_a_sample_of_the_cells_is_found_again(item):
    faults = planted.groups()[item]
    for name, cells in planted.values(item, faults, "outlier").items():
        assert cells["outlier"] == RESULTS["families"][name]["outlier"]
    assert elementwise.caught(item, faults) == {
        x.name: RESULTS["elementwise"][x.name] for x in faults
    }


@pytest.mark.parametrize("device", ALARMS)
def test_healthy_backends_raised_no_alarm_with_the_budgets_of_today(device):
    found = ALARMS[device]
    assert same(found["budgets"], RESULTS["budgets"])
    assert found["problems"] >= 3000
    assert found["alarms"] == []


def test_the_healthy_backends_of_a_cpu_were_asked_in_every_dtype():
    counts = ALARMS["cpu"]["counts"]
    assert set(counts) >= set(false_alarms.HEALTHY)
    right = {(x, d): counts[x][d].get("right", 0) for x in counts for d in false_alarms.DTYPES}
    assert {key: n for key, n in right.items() if n < 100} == {}
