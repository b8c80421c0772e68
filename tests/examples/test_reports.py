"""The two reports' scenarios pass as scripts, and fail when the fault that they retell is planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples import report_d256_batch, report_thd_gqa_backward
from gradtruth.backends.reference import Reference
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Grads, Inputs
from gradtruth.verify.cases.case import Case

# ---------------------------------------------------------------- head_dim 256, a batch


def test_batch_at_head_dim_256(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_d256_batch.main(["--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "q [384, 2, 16, 256], k [384, 2, 2, 256]" in shown
    for label in (
        "auto batch of 2",
        "auto 0 in the batch",
        "auto 0 alone",
        "auto 1 in the batch",
        "auto 1 alone",
    ):
        lines = [line for line in shown.splitlines() if line.startswith(label)]
        assert [line[22:].split()[0] for line in lines] == ["out", "dq", "dk", "dv"], label
    assert "WRONG" not in shown


def mixed_up(self: Reference, *arguments: Any) -> Grads:
    """dq of each sequence goes to its neighbour: nothing happens in a batch of one."""
    found = Reference_backward(self, *arguments)
    return Grads(dq=found.dq.roll(1, 1), dk=found.dk, dv=found.dv)


Reference_backward = Reference.backward


def test_fault_in_a_batch_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Reference, "backward", mixed_up)
    assert (
        report_d256_batch.main(["--device", "cpu", "--backend", "reference", "--length", "48"]) == 1
    )
    wrong = [
        line[:27].split() for line in capsys.readouterr().out.splitlines() if "<- WRONG" in line
    ]
    assert [" ".join(words) for words in wrong] == [
        "reference batch of 2 dq",
        "reference 0 in the batch dq",
        "reference 1 in the batch dq",
    ]


def write_case(path: Path, spec: Spec) -> str:
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(24, 2, heads, 16, generator=gen).bfloat16() for heads in (4, 2, 2, 4)
    )
    Case.of(spec, Inputs(q, k, v), dout).save(path)
    return str(path)


def test_captured_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_case(tmp_path / "real.safetensors", Spec(layout="sbhd", right=0))
    assert (
        report_d256_batch.main(
            ["--device", "cpu", "--case", path, "--backend", "reference", "--backend", "unfused"]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "q [24, 2, 4, 16]" in shown
    assert "reference batch of 2" in shown
    assert "unfused batch of 2" in shown


@pytest.mark.parametrize("spec", [Spec(layout="bshd", right=0), Spec(layout="sbhd")])
def test_other_cases_are_refused(
    spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_case(tmp_path / "other.safetensors", spec)
    assert report_d256_batch.main(["--device", "cpu", "--case", path]) == 2
    assert "expected an sbhd causal case" in capsys.readouterr().err


def test_backend_that_refuses_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    named = ["--backend", "sdpa_cudnn", "--backend", "unfused"]
    assert report_d256_batch.main(["--device", "cpu", "--length", "8", *named]) == 3
    shown = capsys.readouterr().out
    assert "sdpa_cudnn: " in shown
    assert "unfused batch of 2" in shown
    assert shown.endswith("all that ran is right\n")


# ---------------------------------------------------------------- thd + GQA, calls in any order


@pytest.mark.parametrize("backend", ["auto", "reference", "unfused"])
def test_calls_in_any_order_and_after_any_allocation(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_thd_gqa_backward.main(["--device", "cpu", "--backend", backend]) == 0
    shown = capsys.readouterr().out
    of_b = [line for line in shown.splitlines() if " B: norms" in line]
    assert len(of_b) == 7  # of the orders AB, BA, AAB, BBA and ABBA
    assert all(
        line.endswith("tokens 0-3 max |dq| 0.0000, |dk| 0.0000, |dv| 0.0000") for line in of_b
    )
    assert shown.count("same bits as the first time: True; where nothing attends max 0.0") == 14
    assert shown.count("finite: True; same bits: True") == 4


class Stale:
    """dk and dv of tokens that get no gradient are what the call before left: the fault of the report."""

    def __init__(self) -> None:
        self.before: tuple[Tensor, Tensor] | None = None

    def __call__(self, *arguments: Any, **options: Any) -> list[Tensor]:
        dq, dk, dv, *rest = report_bwd(*arguments, **options)
        if self.before is not None:
            dk, dv = (
                torch.where(t == 0, old, t) for t, old in zip((dk, dv), self.before, strict=True)
            )
        self.before = dk, dv
        return [dq, dk, dv, *rest]


report_bwd = report_thd_gqa_backward.fused_attn_bwd


def test_stale_workspace_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report_thd_gqa_backward, "fused_attn_bwd", Stale())
    assert report_thd_gqa_backward.main(["--device", "cpu"]) == 1
    assert "where nothing attends max 40.59" in capsys.readouterr().out


def test_result_after_an_allocation_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = torch.autograd.grad, []

    def spoiled(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        calls.append(1)
        found = real(*arguments, **options)
        return found if len(calls) < 3 else (found[0], found[1].fill_(torch.nan), found[2])

    monkeypatch.setattr(torch.autograd, "grad", spoiled)
    assert report_thd_gqa_backward.main(["--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "baseline                                 max" in shown
    assert shown.count("finite: False; same bits: False") == 3
