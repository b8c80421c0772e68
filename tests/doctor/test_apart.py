"""Backends examined apart: one that ends its process ends only its own part, and is a finding."""

import re

import pytest

from gradtruth.cli.main import main
from gradtruth.verify.cases.case import Case
from gradtruth.verify.doctor.apart import Apart, examine_apart
from gradtruth.verify.findings import PROCESS, Verdict

THD, DENSE = "thd-documents-d64", "tail-64-large-logits-d64"
_BACKENDS = '''
import os
import sys
from gradtruth.backends import get


class Dying:
    """Breaks the process at its second problem, in the middle of a backward."""

    name = "dying"

    def __getattr__(self, name):
        return getattr(get("reference"), name)

    def backward(self, problem, *arguments):
        if problem.layout == "bshd":
            print("CUDA error: an illegal memory access was encountered", file=sys.stderr)
            print("a last line", file=sys.stderr, flush=True)
            os._exit(3)
        return get("reference").backward(problem, *arguments)


dying = Dying()
'''


@pytest.fixture
def dying(tmp_path):
    path = tmp_path / "own_backends.py"
    path.write_text(_BACKENDS)
    return f"{path}:dying"


def test_a_process_that_dies_ends_only_its_own_backend(dying, tmp_path, capsys):
    folder = tmp_path / "saved"
    arguments = ["doctor", "--device", "cpu", "--cases", f"{THD},{DENSE}", "--jobs", "2"]
    arguments += ["--checks", "forward,backward", "--save", str(folder)]
    assert main([*arguments, "--backend", f"{dying},reference"]) == 1
    out = capsys.readouterr().out
    table = {
        re.split(r"\s{2,}", line)[0]: re.split(r"\s{2,}", line)[1:]
        for line in out.split("\n\n")[0].splitlines()
    }
    assert table["check"] == ["dying", "reference"]
    # The first run of a case, for whichever check, is a forward and a backward.
    assert table["forward"] == ["right 1", "right 2"]
    assert table["backward"] == ["right 1", "right 2"]
    assert table[PROCESS] == ["WRONG 1 of 1", "-"]
    line = next(line for line in out.splitlines() if line.startswith("dying  "))
    assert f"in {DENSE}: dying forward: exit code 3, CUDA error: an illegal memory access" in line
    assert [path.stem for path in folder.iterdir()] == [DENSE]
    assert Case.load(folder / f"{DENSE}.safetensors").problem.layout == "bshd"


def test_a_backend_that_is_not_done_in_time_is_not_reached_and_no_finding():
    how = Apart(device="cpu", cases=[THD], checks=["forward"], jobs=1, patience=0.2)
    done, rows = examine_apart(["reference"], how)
    assert done == "reference"
    (row,) = rows
    assert (row.check, row.verdict, row.kind) == (PROCESS, Verdict.NOT_REACHED, None)
    assert row.detail == ("its process ended: it was not done after 0.2 s",)


def test_a_finding_without_a_case_saves_none_and_leads_nowhere(tmp_path, capsys):
    arguments = ["doctor", "--device", "cpu", "--cases", THD, "--checks", "forward", "--jobs", "1"]
    arguments += ["--backend", "reference", "--patience", "1", "--save", str(tmp_path / "saved")]
    assert main(arguments) == 3
    out = capsys.readouterr().out
    assert "it was not done after 1 s" in out
    assert "minimise" not in out
    assert list((tmp_path / "saved").iterdir()) == []
