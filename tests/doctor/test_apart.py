"""Backends examined apart: one that ends its process ends only its own part, and is a finding."""

import os
import re
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from gradtruth.cli.main import main
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import CHECKS
from gradtruth.verify.doctor import apart
from gradtruth.verify.doctor.apart import Apart, examine_apart, parts_of, steps_apart
from gradtruth.verify.doctor.programme import PROGRAMME
from gradtruth.verify.findings import PROCESS, Verdict

THD, DENSE = "thd-documents-d64", "tail-64-large-logits-d64"
_BACKENDS = '''
import os
import sys
import time
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


class Slow(Dying):
    """Never done with its first backward."""

    name = "slow"

    def backward(self, problem, *arguments):
        time.sleep(600)


dying, slow = Dying(), Slow()
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_backends.py"
    path.write_text(_BACKENDS)
    return path


@pytest.fixture
def dying(own):
    return f"{own}:dying"


@pytest.fixture
def slow(own):
    return f"{own}:slow"


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


def test_a_backend_that_is_not_done_in_time_is_not_reached_and_no_finding(slow):
    how = Apart(device="cpu", cases=[THD], checks=["forward"], jobs=1, threads=1, patience=6.0)
    *done, found = examine_apart([slow], how)
    assert done == [THD, slow]
    assert len(done) == steps_apart([slow], how)
    (row,) = found.rows
    assert (row.check, row.verdict, row.kind) == (PROCESS, Verdict.NOT_REACHED, None)
    assert row.detail == (f"its process ended in {THD}: slow forward: it was not done after 6 s",)


def test_a_finding_without_a_case_saves_none_and_leads_nowhere(slow, tmp_path, capsys):
    arguments = ["doctor", "--device", "cpu", "--cases", THD, "--checks", "forward", "--jobs", "1"]
    arguments += ["--backend", slow, "--patience", "5", "--save", str(tmp_path / "saved")]
    assert main(arguments) == 3
    out = capsys.readouterr().out
    assert "it was not done after 5 s" in out
    assert "minimise" not in out
    assert list((tmp_path / "saved").iterdir()) == []


@pytest.mark.parametrize("count", [1, 2, 3, 5, 35])
def test_the_parts_of_a_backend_are_its_whole_programme_once(count):
    cases = [item.name for item in PROGRAMME][:count]
    how = Apart(device="cpu", cases=cases, checks=[check.name for check in CHECKS])
    *parts, (beside, own) = parts_of("reference", how)
    assert len(parts) == min(count, 3)
    assert [case for some, _ in parts for case in some] == cases, "in order"
    assert {checks for _, checks in parts} == {tuple(c.name for c in CHECKS if not c.once)}
    assert (beside, own) == (tuple(cases), tuple(c.name for c in CHECKS if c.once))
    few = Apart(device="cpu", cases=cases, checks=["forward"])
    assert len(parts_of("reference", few)) == min(count, 3)
    many = parts_of("flex", replace(few, device="cuda:1"))
    assert len(many) == -(-count // -(-count // 12)), "those that compile are dealt to more"
    assert [case for some, _ in many for case in some] == cases
    few = Apart(device="cpu", cases=cases, checks=["launch_limits"])
    assert parts_of("reference", few) == [(tuple(cases), ("launch_limits",))]


def test_a_large_part_keeps_no_process_from_what_comes_after_it(tmp_path):
    how = Apart(device="cpu", cases=[THD], checks=["forward", "launch_limits"])
    processes = apart._Processes(how, tmp_path)
    small, large = apart._parts("reference", 0, how, tmp_path)
    shelved = Future()
    assert not processes.may_begin(small, [shelved]), "what it is held against is not there"
    shelved.set_result(None)
    assert processes.may_begin(small, [shelved])
    processes._large = {tmp_path / str(n) for n in range(apart._AT_ONCE - 1)}
    assert processes.may_begin(large, [shelved])
    assert not processes.may_begin(replace(large, target=tmp_path / "last"), [shelved])
    assert processes.may_begin(small, [shelved])


def test_compiling_counts_where_the_end_would_have_come_earlier():
    clock = apart._Clock()
    clock.spent = {1: (10.0, 6.0), 2: (7.0, 0.0), 3: (9.0, 1.0)}
    assert clock.compiling() == pytest.approx(7 / 3), "a share of each row"
    clock.spent = {1: (10.0, 6.0), 2: (5.0, 0.0)}
    assert clock.compiling() == 5.0, "the longest row compiled"
    assert apart._Clock().compiling() == 0.0


def test_a_check_with_problems_of_its_own_is_asked_in_a_process_of_its_own(dying):
    checks = ["forward", "compile_equals_eager"]
    how = Apart(device="cpu", cases=[THD, DENSE], checks=checks, jobs=2, threads=1)
    *_, found = examine_apart([dying], how)
    assert [(row.case, row.check, row.verdict.value) for row in found.rows] == [
        (THD, "forward", "right"),
        (THD, "forward", "right"),
        (DENSE, PROCESS, "error"),
        (THD, "compile_equals_eager", "not reached"),
    ], "the death of one part ends no other"


LOSING = """
from gradtruth.backends import get
from gradtruth.verify import lost as module
from gradtruth.verify.doctor import worker


class Losing:
    '''Raises in the backward of its first problem, after which no call of its process succeeds.'''

    name = "losing"
    gone = False

    def __getattr__(self, name):
        return getattr(get("reference"), name)

    def forward(self, problem, inputs):
        if Losing.gone:
            raise RuntimeError("CUDA error: misaligned address")
        return get("reference").forward(problem, inputs)

    def backward(self, problem, *arguments):
        if problem.layout == "thd":
            Losing.gone = True
            worker.lost = lambda device: Losing.gone
            raise RuntimeError("CUDA error: misaligned address")
        return get("reference").backward(problem, *arguments)


losing = Losing()
"""


def test_a_lost_gpu_is_one_finding_and_another_process_goes_on(tmp_path, capsys):
    path = tmp_path / "own_losing.py"
    path.write_text(LOSING)
    how = Apart(
        device="cpu",
        cases=[THD, DENSE],
        checks=["backward", "determinism"],
        jobs=1,
        threads=1,
    )
    *_, found = examine_apart([f"{path}:losing"], how)
    verdicts = {(row.case, row.check): row.verdict for row in found.rows}
    assert verdicts == {
        (THD, "backward"): Verdict.ERROR,
        (THD, PROCESS): Verdict.NOT_REACHED,
        (DENSE, "backward"): Verdict.RIGHT,
        (DENSE, "determinism"): Verdict.RIGHT,
    }
    (ended,) = [row for row in found.rows if row.check == PROCESS]
    assert "an error on the GPU that no later call of a process survives" in ended.detail[0]


def test_what_is_known_is_told_when_it_is_stopped(slow, tmp_path):
    how = Apart(device="cpu", cases=[DENSE], checks=["forward"], jobs=1, threads=1)
    running = examine_apart(["reference", slow], how)
    assert next(running) == DENSE
    # The slow one began first; a ^C while it runs ends it, and the other never begins.
    # ``timeout`` sends two: to the process, and to its group.
    timers = [
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)) for after in (4.0, 4.01)
    ]
    for timer in timers:
        timer.start()
    before = time.monotonic()
    *_, found = running
    assert time.monotonic() - before < 12
    for timer in timers:
        timer.join()
    said = {row.backend: (row.verdict, row.detail[0]) for row in found.rows}
    assert said["slow"][0] is said["reference"][0] is Verdict.NOT_REACHED
    assert "it was stopped" in said["slow"][1]
    assert "1 of 1 parts of the programme did not begin" in said["reference"][1]
