"""``gradtruth minimise``: what it prints and writes, exit codes, and errors of the user."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradtruth.backends import get
from gradtruth.cli.main import main
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.verify.cases.case import Case

FAULTS = f"{Path(__file__).parents[1] / 'verify' / 'planted.py'}"
QUERYLESS = Path(__file__).parents[2] / "examples" / "cases" / "thd-gqa-queryless.safetensors"


@pytest.fixture
def batch_file(tmp_path):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(3, 12, heads, 8, generator=generator) for heads in (4, 2, 2, 4))
    path = tmp_path / "step7.safetensors"
    Case.of(Spec(right=0), Inputs(q=q, k=k, v=v), dout, provenance={"layer": 3}).save(path)
    return path


def test_a_finding_of_call_order_becomes_calls(capsys):
    """The example with gaps: the call before it is written out, so that a check of values finds it."""
    backend = f"{FAULTS}:WORKSPACE"
    get(backend).workspace.clear()
    code = main(["minimise", str(QUERYLESS), "--backend", backend, "--check", "call_order"])
    said = capsys.readouterr().out
    assert code == 1, said
    assert said.startswith("finding  ")
    assert "thd" in said


def test_nothing_found(batch_file, capsys):
    arguments = ["minimise", str(batch_file), "--backend", "reference", "--check", "backward"]
    assert main(arguments) == 0
    assert "no finding: step7.safetensors shows none with reference" in capsys.readouterr().out
    arguments = ["minimise", str(batch_file), "--backend", f"{FAULTS}:DELTA", "--tensor", "dv"]
    assert main([*arguments, "--check", "backward"]) == 0


def test_refused(tmp_path, batch_file, capsys):
    case = Case.load(batch_file)
    sink = replace(case.inputs, softmax_offset=torch.zeros(4))
    path = tmp_path / "sink.safetensors"
    Case.of(Spec(softmax="learnable"), sink, case.dout).save(path)
    assert main(["minimise", str(path), "--backend", "sdpa_math"]) == 3
    assert capsys.readouterr().out.startswith("sdpa_math refuses: ")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--confirm", "3/2"], "--confirm is '3/2'"),
        (["--confirm", "2"], "--confirm is '2'"),
        (["--check", "none"], "check is 'none'"),
        (["--backend", "nothing"], "backend is 'nothing'"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--out", "/nowhere/x.safetensors"], "expected a file in a folder that exists"),
        (["--kind", "odd"], "'odd'"),
    ],
)
def test_errors_of_the_user(batch_file, capsys, more, text):
    assert main(["minimise", str(batch_file), "--backend", "reference", *more]) == 2
    found = capsys.readouterr()
    assert text in found.err
    assert found.err.count("\n") == 1


def test_a_case_is_not_written_over(batch_file, capsys):
    arguments = ["minimise", str(batch_file), "--backend", "reference", "--out", str(batch_file)]
    assert main(arguments) == 2
    assert "expected another file" in capsys.readouterr().err
