"""``gradtruth verify``: exit codes, plain text, files, and one line for each error of the user."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from gradtruth.backends import ORDER, get
from gradtruth.cli import verify as command
from gradtruth.cli.app import app
from gradtruth.cli.main import main
from gradtruth.verify.findings import row_of_json


class _Zero:
    name = "zero"

    def __getattr__(self, name):
        return getattr(get("reference"), name)

    def backward(self, *arguments):
        found = get("reference").backward(*arguments)
        return replace(found, dq=found.dq * 0)


def test_verified(case_file):
    result = CliRunner().invoke(app, ["verify", str(case_file), "--backend", "reference"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:5] == ["case", "backend", "check", "tensor", "verdict"]
    assert lines[1].split()[:5] == ["layer3", "reference", "forward", "out", "right"]
    assert "\x1b" not in result.output
    assert "0 WRONG" in lines[-1]


def test_findings(case_file, monkeypatch):
    monkeypatch.setattr(command, "get", lambda _: _Zero())
    result = CliRunner().invoke(app, ["verify", str(case_file), "--backend", "reference"])
    assert result.exit_code == 1
    wrong = [line.split() for line in result.stdout.splitlines() if " WRONG " in line]
    assert wrong[0][:5] == ["layer3", "zero", "backward", "dq", "WRONG"]
    assert wrong[0][5] == "1.00e+00", "relative L2 of a zero gradient"


def test_unsupported_when_the_named_backend_refuses(case_file, capsys):
    assert main(["verify", str(case_file), "--backend", "sdpa_math"]) == 3
    found = capsys.readouterr()
    assert found.out.startswith("refuse every case:")
    assert "learnable" in found.out
    assert found.err == ""


def test_all_backends_have_a_row(case_file, tmp_path, capsys):
    target = tmp_path / "rows.json"
    assert main(["verify", str(case_file), "--json", str(target)]) == 0
    capsys.readouterr()
    document = json.loads(target.read_text())
    rows = [row_of_json(row) for row in document["rows"]]
    assert [*dict.fromkeys(row.backend for row in rows)] == list(ORDER)
    assert document["cases"] == {"layer3": {"model": "[b]tiny"}}
    assert "torch" in document["facts"]


@pytest.mark.parametrize(
    ("name", "start"), [("r.html", "<!DOCTYPE html>"), ("r.md", "# Attention")]
)
def test_report(case_file, tmp_path, capsys, name, start):
    target = tmp_path / name
    assert main(["verify", str(case_file), "--backend", "reference", "--report", str(target)]) == 0
    capsys.readouterr()
    text = target.read_text()
    assert text.startswith(start)
    assert "dsoftmax_offset" in text
    assert "layer3" in text


def test_cases_with_the_same_name_are_told_apart(case_file, tmp_path, capsys):
    other = tmp_path / "other" / "layer3.safetensors"
    other.parent.mkdir()
    other.write_bytes(case_file.read_bytes())
    assert main(["verify", str(case_file), str(other), "--backend", "reference"]) == 0
    names = {
        line.split()[0] for line in capsys.readouterr().out.splitlines() if " forward " in line
    }
    assert {str(case_file), str(other)} <= names


def _damaged(tmp_path):
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify"], "Missing argument 'CASE...'"),
        (["verify", "nowhere.safetensors"], "nowhere.safetensors: No such file"),
        (["verify", "{damaged}"], "not a gradtruth case"),
        (["verify", "{folder}"], "not a regular file"),
        (["verify", "{case}", "--backend", "cudnn9"], "backend is 'cudnn9', expected"),
        (["verify", "{case}", "--backend", ""], "backend is ''"),
        (["verify", "{case}", "--device", "tpu"], "--device is 'tpu'"),
        (["verify", "{case}", "--device", "cuda:99"], "CUDA devices"),
        (["verify", "{case}", "--report", "x.pdf"], "--report is 'x.pdf', expected a name in"),
        (
            ["verify", "{case}", "--report", "/no/where/x.md"],
            "expected a file in a folder that exists",
        ),
        (["verify", "{case}", "--json", "{folder}"], "expected a file in a folder that exists"),
        (["verify", "{case}", "--json", "{case}"], "neither a case nor another result"),
        (["verify", "{case}", "--json", "x.md", "--report", "x.md"], "--report is 'x.md'"),
        (["verify", "{case}", "--jsom", "x"], "No such option"),
        (["verfy"], "No such command"),
        (["--what"], "No such option"),
    ],
)
def test_usage_is_one_line_on_stderr(case_file, tmp_path, capsys, arguments, message):
    places = {"case": str(case_file), "folder": str(tmp_path), "damaged": _damaged(tmp_path)}
    assert main([argument.format(**places) for argument in arguments]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("\n") == 1
    assert found.err.startswith("gradtruth: error: ")
    assert message in found.err


def test_a_damaged_file_stops_before_any_work(case_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "verify_case", lambda *_, **__: pytest.fail("ran"))
    assert main(["verify", str(case_file), _damaged(tmp_path)]) == 2
    assert "damaged.safetensors: the metadata is not" in capsys.readouterr().err


def test_as_a_process_in_a_pipe(case_file):
    command_line = [
        sys.executable,
        "-m",
        "gradtruth.cli.main",
        "verify",
        str(case_file),
        "--backend",
        "unfused",
    ]
    found = subprocess.run(command_line, capture_output=True, text=True, check=False, timeout=120)
    assert (found.returncode, found.stderr) == (0, "")
    assert "\x1b" not in found.stdout
    lines = found.stdout.splitlines()
    assert max(map(len, lines)) > 120, "nothing is wrapped at the width of a terminal"
    assert len([line for line in lines if line.startswith("layer3")]) == 2 + 4 + 4 + 2 + 1


def test_progress_is_on_stderr_and_only_on_a_terminal(case_file, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["verify", str(case_file), "--backend", "reference"]) == 0
    found = capsys.readouterr()
    assert "layer3" in found.err
    assert "━" in found.err
    assert "\x1b" not in found.out
