"""``gradtruth doctor``: the programme, the matrix, exit codes, files, and one line for each error of the user."""

import json
import re
from xml.etree import ElementTree

import pytest
import torch

from gradtruth.backends import ORDER, get
from gradtruth.cli.main import main
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import CHECKS, Check, NotReached
from gradtruth.verify.doctor.examination import examine
from gradtruth.verify.doctor.programme import PROGRAMME, case_of
from gradtruth.verify.findings import Row, row_of_json

THD, DENSE = "thd-documents-d64", "tail-64-large-logits-d64"
ONE = ["doctor", "--device", "cpu", "--cases", THD, "--checks", "forward,backward", "--jobs", "0"]


def _columns(line):
    return re.split(r"\s{2,}", line.strip())


def _matrix(text):
    """Per check, per backend the cell."""
    table = text.split("\n\n", maxsplit=1)[0].splitlines()
    names = _columns(table[0])
    return {row[0]: dict(zip(names[1:], row[1:], strict=True)) for row in map(_columns, table[1:])}


def test_the_quick_programme_on_two_healthy_backends(capsys):
    quick = [item.name for item in PROGRAMME if item.quick]
    assert 5 <= len(quick) < len(PROGRAMME)
    arguments = ["--device", "cpu", "--quick", "--backend", "reference,sdpa_flash"]
    assert main(["doctor", *arguments, "--checks", "forward,backward,gqa_expand"]) == 0
    found = capsys.readouterr()
    cells = _matrix(found.out)
    assert cells["forward"]["reference"] == f"right {len(quick)}"
    assert cells["backward"]["sdpa_flash"] == f"right {len(quick)}"
    assert cells["problems refused"]["sdpa_flash"] == f"0 of {len(quick)}"
    grouped = sum(item.recipe.problem.group_size > 1 for item in PROGRAMME if item.quick)
    assert cells["gqa_expand"]["reference"] == f"right {grouped}"
    assert "\n0 findings\n" in found.out
    assert "minimise" not in found.out, "nothing to look closer at"
    assert re.search(r"^device cpu, torch \S+, gradtruth ", found.out, re.MULTILINE)
    assert re.search(r"\n\d+ s, of which compiling \d+ s\n$", found.out)
    assert found.err == ""
    assert "\x1b" not in found.out


def test_a_finding_is_placed_advised_and_leads_to_the_minimiser(planted, capsys):
    arguments = ["--device", "cpu", "--cases", f"{DENSE},{THD}", "--checks", "backward"]
    named = "reference,planted,refusing"
    assert main(["doctor", *arguments, "--jobs", "0", "--backend", named]) == 1
    out = capsys.readouterr().out
    cells = _matrix(out)
    assert cells["backward"] == {"reference": "right 2", "planted": "WRONG 1 of 2"}
    assert "\n1 findings\n" in out
    line = next(line for line in out.splitlines() if line.startswith("planted"))
    backend, check, tensor, kind, cases, what, advice = _columns(line)
    assert (backend, check, tensor, kind, cases) == ("planted", "backward", "dq", "value", THD)
    last = case_of(next(i.recipe for i in PROGRAMME if i.name == THD)).problem.num_heads - 1
    assert re.match(rf"sequence \d, head {last}: ", what)
    assert advice == "gradients are wrong: do not train with it for this problem"
    hint = f"gradtruth minimise FOLDER/{THD}.safetensors --backend planted --check backward"
    assert f"add --save FOLDER, then: {hint}" in out
    refusal = next(line for line in out.splitlines() if line.startswith("refusing"))
    assert _columns(refusal)[1], "why it is not examined"


def test_a_backend_that_only_refuses_is_unsupported(planted, capsys):
    assert main([*ONE, "--backend", "refusing"]) == 3
    out = capsys.readouterr().out
    assert "not examined, or not to the end:" in out
    assert "\n0 findings\n" in out


def test_the_case_of_a_finding_is_saved_and_no_other(planted, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    arguments = ["--device", "cpu", "--cases", f"{DENSE},{THD}", "--checks", "backward"]
    assert main(["doctor", *arguments, "--backend", "planted", "--save", str(folder)]) == 1
    assert f"gradtruth minimise {folder}/{THD}.safetensors" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == [f"{THD}.safetensors"]
    item = next(item for item in PROGRAMME if item.name == THD)
    saved = Case.load(folder / f"{THD}.safetensors")
    assert saved.id == case_of(item.recipe).id
    assert saved.provenance["recipe"] == item.recipe.encode()


def test_json_lines_and_document_hold_the_same_rows(planted, tmp_path, capsys):
    lines, document = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    for target in (lines, document):
        assert main([*ONE, "--backend", "planted,refusing", "--json", str(target)]) == 1
    capsys.readouterr()
    whole = json.loads(document.read_text())
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    for row in [*rows, *whole["rows"]]:
        row["seconds"] = None
    assert rows == whole["rows"]
    assert whole["cases"] == {THD: {"why": "packed documents"}}
    assert {"device", "torch", "gradtruth", "seconds", "seconds_compiling"} <= set(whole["facts"])
    wrong = [row for row in map(row_of_json, rows) if row.kind]
    assert [(row.check, row.tensor, row.verdict.value) for row in wrong] == [
        ("backward", "dq", "WRONG")
    ]
    assert {row.backend for row in map(row_of_json, rows)} == {"planted", "refusing"}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("r.html", ("<!DOCTYPE html>", "Errors by position", "WRONG 1 of 1", "do not train")),
        ("r.md", ("# Attention examined", "| backward | WRONG 1 of 1 |", "packed documents")),
    ],
)
def test_report(planted, tmp_path, capsys, name, parts):
    target = tmp_path / name
    assert main([*ONE, "--backend", "planted,refusing", "--report", str(target)]) == 1
    capsys.readouterr()
    text = target.read_text()
    for part in parts:
        assert part in text
    assert "refusing" in text, "and why it was not examined"


def test_junit(planted, tmp_path, capsys):
    target = tmp_path / "r.xml"
    assert main([*ONE, "--backend", "planted,refusing", "--report", str(target)]) == 1
    capsys.readouterr()
    suites = {suite.get("name"): suite for suite in ElementTree.parse(target).getroot()}
    assert set(suites) == {"planted", "refusing"}
    assert suites["planted"].get("failures") == "1"
    failure = suites["planted"].find(".//failure")
    assert failure.get("type") == "value"
    assert suites["refusing"].get("skipped") == "1"


def test_the_list_names_every_problem_and_check_and_runs_nothing(capsys, monkeypatch):
    monkeypatch.setattr("gradtruth.cli.doctor.examine", None)
    assert main(["doctor", "--list"]) == 0
    whole = capsys.readouterr().out
    listed, checks = whole.strip().split("\n\n")
    assert [line.split()[0] for line in listed.splitlines()] == [item.name for item in PROGRAMME]
    assert all(item.why in whole for item in PROGRAMME)
    assert checks == "checks: " + ", ".join(check.name for check in CHECKS)
    assert main(["doctor", "--list", "--quick"]) == 0
    listed, checks = capsys.readouterr().out.strip().split("\n\n")
    assert [line.split()[0] for line in listed.splitlines()] == [
        item.name for item in PROGRAMME if item.quick
    ]
    assert checks == "checks: " + ", ".join(check.name for check in CHECKS if check.quick)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "nobody"], "backend is 'nobody'"),
        (["--checks", "nothing"], "check is 'nothing'"),
        (["--cases", "nowhere"], "--cases has 'nowhere', expected some of causal-gqa-d64"),
        (["--quick", "--cases", "long-d64"], "--cases has 'long-d64'"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--device", "cuda:99"], "--device is 'cuda:99', but this machine has"),
        (["--report", "r.pdf"], "--report is 'r.pdf', expected a name in .html"),
        (["--report", "missing/r.md"], "expected a file in a folder that exists"),
        (["--json", "."], "--json is '.'"),
        (["--json", "r.md", "--report", "r.md"], "neither a case nor another result"),
        (["--backend", "gradtruth.errors:Nothing"], "gradtruth.errors:Nothing"),
        (["--quikc"], "--quikc"),
    ],
)
def test_usage_is_one_line_on_stderr_before_any_work(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("gradtruth.cli.doctor.examine", None)
    assert main(["doctor", *arguments]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("gradtruth: error: ")
    assert found.err.count("\n") == 1
    assert message in found.err


def test_a_save_folder_that_is_a_file_is_an_error_of_the_user(tmp_path, capsys):
    target = tmp_path / "file"
    target.write_text("kept")
    assert main([*ONE, "--backend", "reference", "--save", str(target)]) == 2
    assert capsys.readouterr().err.startswith(f"gradtruth: error: {target}: ")
    assert target.read_text() == "kept"


def test_a_check_that_makes_its_own_problems_is_asked_once_per_backend():
    asked = []

    def run(subject):
        asked.append((subject.backend.name, subject.case.problem.spec.softcap))
        yield NotReached("counted")

    check = Check("once", run, once=True)
    items = [item for item in PROGRAMME if item.name in ("softcap-window-d128", "one-key-d64", THD)]
    assert items[0].name == THD
    items = [items[-1], *items[:-1]]
    backends = [get("reference"), get("sdpa_flash")]
    rows = [
        event
        for event in examine(items, backends, [check], torch.device("cpu"))
        if isinstance(event, Row)
    ]
    # sdpa_flash has no softcap, so it is asked beside the second item.
    assert sorted(asked) == [("reference", 5.0), ("sdpa_flash", None)]
    assert [row.check for row in rows if row.backend == "sdpa_flash"] == ["support", "once"]


def test_every_backend_is_asked_by_default(capsys):
    arguments = ["--device", "cpu", "--cases", "one-key-d64", "--checks", "forward"]
    assert main(["doctor", *arguments]) == 0
    out = capsys.readouterr().out
    examined = set(_matrix(out)["forward"])
    refused = {
        _columns(line)[0]
        for line in out.split("not examined, or not to the end:\n")[1].splitlines()[1:]
    }
    assert set(ORDER) <= examined | refused
    assert {"reference", "unfused", "sdpa_math"} <= examined


def test_what_is_known_is_told_when_all_is_in_one_process_and_stopped(monkeypatch, capsys):
    from gradtruth.cli import doctor as module

    def stopped(*arguments):
        for event in examine(*arguments):
            yield event
            if event == "tail-64-large-logits-d64: reference backward":
                raise KeyboardInterrupt

    examine = module.examine
    monkeypatch.setattr(module, "examine", stopped)
    arguments = ["doctor", "--device", "cpu", "--backend", "reference", "--jobs", "0"]
    arguments += ["--cases", "tail-64-large-logits-d64", "--checks", "forward,backward"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "it was stopped in tail-64-large-logits-d64: reference backward" in out
    assert "1 not reached" in out
