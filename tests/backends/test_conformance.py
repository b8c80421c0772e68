"""One body, every backend: the generated suite against the oracle.

A problem is skipped only when the backend's ``supports`` says so; what is supported is a golden file
(test_support_matrix.py). The seeds are the recipes' own, so neither pytest-randomly nor xdist changes an input.
"""

from __future__ import annotations

import pytest
import torch

from gradtruth.backends import get
from gradtruth.testing import repeat, unpoisoned
from gradtruth.verify.suite.conformance import examine, truth_of
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.suite import BLOCK, edges, suite

CPU = torch.device("cpu")
CHUNKS = 64
SHOWN = 12


def test_the_suite_covers_all_pairs_and_says_so(record_property):
    found = suite().cover
    record_property("cover", str(found))  # conftest prints it at the end, under xdist too
    assert found.covered == found.pairs > 10_000
    # Neither thd nor a dense layout can have them, or they need a bias that is not there.
    assert set(found.impossible) <= {
        ("source=padding_mask", "places=gaps"),
        ("bias_shape=-", "bias_dtype=float32"),
        ("bias_shape=-", "bias_inf=yes"),
        ("bias_shape=-", "wanted=dq,dbias"),
    }


def test_the_suite_is_large_and_three_in_ten_problems_span_three_blocks():
    recipes = suite().recipes
    assert len(recipes) >= 1500
    assert len({recipe.encode() for recipe in recipes}) == len(recipes)
    large = sum(
        any(min(place[1], place[3]) > 3 * BLOCK for place in recipe.resolved_places)
        for recipe in recipes
    )
    assert large >= 0.3 * len(recipes)
    assert all(recipe.poison != "none" for recipe in recipes)
    assert suite().recipes[-len(edges()) :] == edges()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_conformance(chunk, backend_names, poisoned_memory):
    wrong = []
    for recipe in suite().recipes[chunk::CHUNKS]:
        sample = make(recipe)
        able = [
            backend
            for backend in map(get, backend_names)
            if backend.supports(sample.problem, CPU).ok
        ]
        truth = truth_of(sample) if able else None
        for backend in able:
            shielded = backend.claims(sample.problem, CPU).shielded
            found = examine(sample if shielded else unpoisoned(recipe), backend, truth)
            if found:
                lines = [f"{backend.name}: {recipe.label()}", *found, repeat(recipe, backend.name)]
                wrong.append("\n  ".join(lines))
    assert not wrong, "\n".join([f"{len(wrong)} problems are wrong", *wrong[:SHOWN]])
