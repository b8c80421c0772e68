"""A new refusal, or a new support, shows up in review: both files are generated from the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradtruth.verify.suite.matrix import golden, markdown

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("place", "generate"),
    [("tests/support_matrix.txt", golden), ("docs/support-matrix.md", markdown)],
    ids=["golden", "page"],
)
def test_support_matrix_is_as_reviewed(place, generate, request):
    path, text = ROOT / place, generate()
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, (
        "review the change, then run with --update-golden"
    )
