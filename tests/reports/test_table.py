"""docs/reports.md is what the marks and docstrings of these tests say, and covers every report."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import defaultdict
from pathlib import Path

from tests.reports import harness

from gradtruth.backends import get
from gradtruth.core.support import Reason, ReasonCode, Support

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "docs" / "reports.md"
REPORTS = 79

HEAD = """# Public reports as regression cases

Faults of attention implementations that were reported in public, each as a small problem with its right value, run on
every own backend (tests/reports/). The small inputs are closed forms, so the same numbers come back on any device and
in any framework (docs/families.md). Right values are stated without a reference where there is one to state: integers,
exact zeros, counts, logarithms. All others are fp64 within the measured budget.

Generated from the tests: `pytest tests/reports/test_table.py --update-golden` writes it anew.
tests/reports/test_planted.py plants the faults and shows that their tests fail.

| report | kind of fault | what was wrong | what is right | test |
| --- | --- | --- | --- | --- |
"""


def marked():
    """(public id, kind, right, docstring, module, test) of every marked test, in the order of the files."""
    for path in sorted(HERE.glob("test_*.py")):
        if path.stem == "test_table":
            continue
        module = importlib.import_module(f"tests.reports.{path.stem}")
        for name, found in vars(module).items():
            if not (inspect.isfunction(found) and name.startswith("test_")):
                continue
            for mark in getattr(found, "pytestmark", []):
                if mark.name == "report":
                    yield (*mark.args, found.__doc__, path.stem, name)


def table() -> str:
    rows = defaultdict(list)
    for public_id, *rest in marked():
        rows[public_id].append(rest)
    lines = []
    for public_id, tests in rows.items():
        kind, right, wrong = tests[0][:3]
        where = ", ".join(f"`{module}.{name}`" for *_, module, name in tests)
        owner, number = public_id.rsplit("#", 1)
        link = f"[{public_id}](https://github.com/{owner}/issues/{number})"
        cells = (kind, " ".join(wrong.split()), right, where)
        lines.append(
            " | ".join([f"| {link}", *(cell.replace("|", r"\|") for cell in cells)]) + " |"
        )
    return HEAD + "\n".join(lines) + "\n"


def test_the_table_is_what_the_tests_say(request):
    text = table()
    if request.config.getoption("--update-golden"):
        TABLE.write_text(text, encoding="utf-8")
    assert TABLE.read_text(encoding="utf-8") == text


def test_every_report_has_a_row_and_every_row_a_test():
    ids = set(
        re.findall(
            r"^\| \[([\w.-]+/[\w.-]+#\d+)\]", TABLE.read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert len(ids) == REPORTS
    assert {public_id for public_id, *_ in marked()} == ids


def test_marks_of_one_report_agree_and_every_test_runs_on_every_own_backend():
    said = defaultdict(set)
    for public_id, kind, right, doc, _, name in marked():
        said[public_id].add((kind, right))
        assert doc, name
    assert [public_id for public_id, texts in said.items() if len(texts) > 1] == []
    for path in HERE.glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if path.stem not in ("test_table", "test_planted"):
            tests = re.findall(r"^def (test_\w+)\(own\b", text, re.MULTILINE)
            assert len(tests) == len(re.findall(r"^def test_", text, re.MULTILINE)), path


class NeedsGpu:
    def supports(self, problem, device):
        reason = Reason(ReasonCode.DEVICE, "needs a GPU")
        return Support(() if device.type == "cuda" else (reason,))


def test_an_own_backend_that_needs_a_gpu_joins_marked_so(monkeypatch):
    monkeypatch.setattr(harness, "OWN", ("reference", "unfused", "new"))
    monkeypatch.setattr(harness, "get", lambda name: NeedsGpu() if name == "new" else get(name))
    found = {param.id: [mark.name for mark in param.marks] for param in harness.places()}
    assert found["reference"] == found["unfused"] == []
    assert found["new-cuda"] == ["gpu", "skipif"]
    assert "new" not in found
