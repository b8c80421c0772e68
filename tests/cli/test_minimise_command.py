"""``gradtruth minimise``: what it prints and writes, exit codes, and errors of the user."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

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


def test_minimised_with_a_script_that_shows_it(batch_file, tmp_path, capsys):
    out, reproduce = tmp_path / "small.safetensors", tmp_path / "reproduce.py"
    arguments = ["minimise", str(batch_file), "--backend", f"{FAULTS}:DELTA", "--out", str(out)]
    arguments.append("--shared")
    assert main([*arguments, "--script", str(reproduce), "--check", "backward"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("finding  backward: dq: value: ")
    assert "from     b3 s12 h4/2 d8 fp32 bshd causal\n" in said
    assert "to       b2 s1 h1/1 d" in said, said
    assert f"wrote {reproduce}; it shows the finding" in said
    small, origin = Case.load(out), Case.load(batch_file)
    assert small.problem.batch == 2
    assert small.provenance["minimised_from"] == origin.id
    assert small.provenance["layer"] == 3
    assert str(small.provenance["finding"]).startswith("backward: dq")
    done = subprocess.run(
        [sys.executable, str(reproduce)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "dq found" in done.stdout
    assert done.stderr == ""


def test_calls_before_it_are_given_and_written(tmp_path, capsys):
    """The workspace fault: right alone, wrong after a call that has queries everywhere.

    Every candidate is looked at in a process of its own, or what an earlier one left would do for the other call.
    """
    case = Case.load(QUERYLESS)
    full = case.inputs.cu_seqlens_q_padded
    filled = replace(case.inputs, cu_seqlens_q=full.clone(), cu_seqlens_kv=full.clone())
    before = tmp_path / "before.safetensors"
    Case.of(case.problem.spec, filled, case.dout).save(before)
    backend, out = f"{FAULTS}:WORKSPACE", tmp_path / "small.safetensors"
    arguments = ["minimise", str(before), str(QUERYLESS), "--backend", backend]
    code = main(
        [*arguments, "--check", "backward", "--tensor", "dv", "--budget", "3", "--out", str(out)]
    )
    said = capsys.readouterr().out
    assert code == 1, said
    assert said.count("wrote ") == 2
    assert Case.load(tmp_path / "small.before-1.safetensors").problem.batch <= 2
    assert Case.load(out).problem.spec.layout == "thd"


def test_a_finding_of_call_order_becomes_calls(capsys):
    """The example with gaps: the call before it is written out, so that a check of values finds it."""
    backend = f"{FAULTS}:WORKSPACE"
    arguments = ["minimise", str(QUERYLESS), "--backend", backend, "--check", "call_order"]
    assert main([*arguments, "--budget", "0"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("finding  backward: dk: nonzero")
    assert "from     b2 s12 h2/1 d8 fp16 thd full; then b2 s12" in said
    assert "the budget ended the search" in said


def test_a_fault_of_fresh_memory_behind_a_slow_start(tmp_path, capsys, monkeypatch):
    """Right in a process of its own, where memory is 0: found, reduced and replayed with memory that is filled.

    One process looks at all candidates; the first look, the last one and the script have their own.
    """
    starts, reproduce = tmp_path / "starts", tmp_path / "reproduce.py"
    library = tmp_path / "library.py"
    library.write_text(
        f"import runpy\nSTALE = runpy.run_path({FAULTS!r})['StaleScratch']({str(starts)!r})\n"
    )
    monkeypatch.setattr("gradtruth.cli.minimise._DEAR", 0.5)
    arguments = ["minimise", str(QUERYLESS), "--backend", f"{library}:STALE", "--tensor", "dk"]
    code = main([*arguments, "--script", str(reproduce), "--budget", "60"])
    said = capsys.readouterr().out
    assert code == 1
    assert said.startswith("finding  backward: dk, where fresh memory holds 0x3c: nonzero")
    assert "; it shows the finding" in said, said
    tried = int(said.split(" runs in ")[0].splitlines()[-1])
    assert tried > 10
    assert len(starts.read_text().split()) == 4, said
    assert "memory=0x3c" in reproduce.read_text()
    done = subprocess.run([sys.executable, str(reproduce)], check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (1, b"")


def test_nothing_found(batch_file, capsys):
    arguments = ["minimise", str(batch_file), "--backend", "reference", "--check", "backward"]
    arguments.append("--shared")
    assert main(arguments) == 0
    assert "no finding: step7.safetensors shows none with reference" in capsys.readouterr().out
    arguments = ["minimise", str(batch_file), "--backend", f"{FAULTS}:DELTA", "--tensor", "dv"]
    assert main([*arguments, "--shared", "--check", "backward"]) == 0


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
    assert "expected a file that is neither a case" in capsys.readouterr().err
