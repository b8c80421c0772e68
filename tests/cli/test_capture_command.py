"""``gradtruth capture``: a training script as a subprocess, its arguments, its errors, its exit code."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gradtruth
from gradtruth.cli.main import main
from gradtruth.verify.cases.case import Case

SCRIPT = '''
"""A trainer."""
import argparse, json, os, pickle, sys
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class Kept:
    value: int

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--end", default="")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    assert pickle.loads(pickle.dumps(Kept(3))) == Kept(3)
    assert sys.modules["__main__"].Kept is Kept
    import beside
    print(json.dumps({"argv": sys.argv, "path": sys.path[0], "beside": beside.__file__}), flush=True)
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block(), Block())
    run = torch.compile(net, backend="eager") if given.compile else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(given.steps):
        run(torch.randn(2, 5, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if given.end == "raise":
        raise LookupError("boom")
    if given.end == "interrupt":
        raise KeyboardInterrupt
    if given.end == "kill":
        os.kill(os.getpid(), 9)
    sys.exit(json.loads(given.end) if given.end else None)

if __name__ == "__main__":
    main()
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("")
    return tmp_path


def _run(folder, *arguments):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(gradtruth.__file__).parents[1]),
    }
    return subprocess.run(
        [sys.executable, "-m", "gradtruth.cli.main", "capture", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def _index(folder):
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


def test_what_was_written_outlives_a_killed_process(folder):
    done = _run(folder, "train.py", "--steps", "2", "--end", "kill")
    assert done.returncode == -signal.SIGKILL
    lines = _index(folder / "captured")
    assert len(lines) == 6
    for line in lines:
        assert Case.load(folder / "captured" / line["file"]).id == line["id"]
    assert len(list((folder / "captured").iterdir())) == 7


# ---------------------------------------------------------------- in this process


@pytest.fixture
def here(folder, monkeypatch):
    """What a program may change of this process is put back."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    yield folder
    sys.modules.pop("beside", None)


def test_a_training_script(here, capsys):
    code = main([
        "capture", "-o", "cases", "--layer", "1-2", "--step", "0,2-:2", "--max-cases", "5",
        "--prefix", "tiny", "train.py", "--", "--steps", "6", "--end", "7",
    ])  # fmt: skip
    done = capsys.readouterr()
    assert code == 7, done.err
    assert json.loads(done.out) == {
        "argv": ["train.py", "--steps", "6", "--end", "7"],
        "path": str(here),
        "beside": str(here / "beside.py"),
    }
    lines = _index(here / "cases")
    assert [(line["layer"], line["step"]) for line in lines] == [
        ("2", 0), ("1", 0), ("2", 2), ("1", 2), ("2", 4),
    ]  # fmt: skip
    assert "gradtruth capture: 5 cases, " in done.err
    assert "gradtruth capture: dropped 1: max_cases is 5" in done.err
    assert "gradtruth capture: not selected: 3" in done.err
    file = here / "cases" / lines[0]["file"]
    assert file.name == "tiny-step000000-2-call0.safetensors"
    assert Case.load(file).id == lines[0]["id"]
    assert main(["verify", str(file), "--backend", "reference"]) == 0
    assert " right " in capsys.readouterr().out


def test_a_crash_of_the_script_is_the_scripts(here, capsys):
    assert main(["capture", "train.py", "--steps", "1", "--end", "raise"]) == 1
    found = capsys.readouterr().err
    trace = found.splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[1].startswith('  File "')
    assert "train.py" in trace[1]
    assert "LookupError: boom" in trace
    assert "runpy" not in found
    assert "gradtruth/cli" not in found
    assert "gradtruth capture: 3 cases" in trace[-1]
    for line in _index(here / "captured"):
        Case.load(here / "captured" / line["file"])


@pytest.mark.parametrize(("compiled", "cases"), [([], 0), (["--eager"], 3)])
def test_compiled_code(here, capsys, compiled, cases):
    assert main(["capture", *compiled, "train.py", "--compile"]) == 0
    found = capsys.readouterr().err
    assert f"gradtruth capture: {cases} cases" in found
    assert ("use --eager" in found) is (cases == 0)
    assert "Dynamo" not in found


def test_a_module(here, capsys):
    sys.modules.pop("train", None)
    assert main(["capture", "-o", "cases", "-m", "train", "--", "--steps", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["argv"] == [str(here / "train.py"), "--steps", "1"]
    assert len(_index(here / "cases")) == 3


def test_the_list(here, capsys):
    assert main(["capture", "--list", "train.py", "--steps", "2"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "gradtruth capture: 6 attention calls seen"
    assert lines[1].split()[:4] == ["index", "layer", "entry", "calls"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2"]
    assert "b2 s5 h2/2 d8 fp32 bshd causal" in lines[2]
    assert not (here / "captured").exists()


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [("null", 0, ""), ("3", 3, ""), ("true", 1, ""), ('"no data"', 1, "no data\n"),
     ("interrupt", 130, "KeyboardInterrupt")],
)  # fmt: skip
def test_exit_codes(here, capsys, end, code, error):
    assert main(["capture", "train.py", "--end", end]) == code
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a script, or -m and a module"),
        (["nowhere.py"], "script is 'nowhere.py', and there is no such file"),
        (["-m", "nowhere"], "--module is 'nowhere', and there is no such module"),
        (["-m", "nowhere.at.all"], "--module is 'nowhere.at.all', and there is no such module"),
        (["--step", "soon", "train.py"], "step is 'soon'"),
        (["--max-bytes", "0", "train.py"], "max_bytes is '0'"),
        (["--max-cases", "0", "train.py"], "max_cases is 0"),
        (["--prefix", "a/b", "train.py"], "prefix is 'a/b'"),
        (["--function", "beside:nothing", "train.py"], "nothing"),
        (["-o", "train.py", "train.py"], "train.py: File exists"),
    ],
)
def test_errors_of_the_user(here, capsys, arguments, message):
    assert main(["capture", *arguments]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    (line,) = found.err.splitlines()
    assert line.startswith("gradtruth: error: ")
    assert message in line


def test_ranks_write_to_one_folder(here, capsys):
    for rank in (0, 1):
        assert main(["capture", "--this-rank", str(rank), "--layer", "0", "train.py"]) == 0
    capsys.readouterr()
    lines = _index(here / "captured")
    assert [(line["rank"], line["file"]) for line in lines] == [
        (rank, f"rank0000{rank}-step000000-0-call0.safetensors") for rank in (0, 1)
    ]
    assert main(["capture", "-o", "none", "--this-rank", "1", "--rank", "0", "train.py"]) == 0
    assert not (here / "none" / "index.jsonl").exists()


def test_the_example(here, capsys):
    example = Path(__file__).parents[2] / "examples/capture_training.py"
    arguments = ["-o", "cases", "--layer", "*.1.*", str(example), "--", "--steps", "2"]
    assert main(["capture", *arguments]) == 0
    assert "2 cases" in capsys.readouterr().err
    lines = _index(here / "cases")
    assert [(line["layer"], line["step"]) for line in lines] == [
        ("layers.1.attention", 0), ("layers.1.attention", 1),
    ]  # fmt: skip
    assert {line["problem"] for line in lines} == {"b8 s23 h4/4 d8 fp32 bshd causal"}
