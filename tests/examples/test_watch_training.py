"""The example's fault is found at the first watched step that has it, in its layer; without it nothing is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.nn import functional as F

from examples import watch_training
from gradtruth.verify.cases.case import Case

SMALL = ["--steps", "8", "--every", "2", "--batch", "2", "--length", "24"]


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """The program quiets the library's log, as programs may; the next test wants to hear it."""
    logger = logging.getLogger("gradtruth")
    before = logger.level
    yield
    logger.setLevel(before)


def test_the_fault_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = F.scaled_dot_product_attention
    found = watch_training.main([*SMALL, "--fault-at", "3", "--save", str(tmp_path)])
    assert F.scaled_dot_product_attention is before
    assert {(one.step, one.layer, one.tensor, one.sequence) for one in found} == {
        (step, "layers.2", tensor, 1) for step in (4, 6) for tensor in ("dk", "dv")
    }
    shown = capsys.readouterr().out
    assert "step    2  loss" in shown
    assert "WRONG dk in layers.2, sequence 1, from step 4" in shown
    (path,) = tmp_path.glob("*.safetensors")
    assert Case.load(path).provenance["layer"] == "layers.2"


def test_nothing_is_found_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert watch_training.main([*SMALL, "--fault-at", "-1"]) == []
    assert (
        "16 attention calls of 4 layers looked at in 4 of 8 steps, 0 findings"
        in capsys.readouterr().out
    )
