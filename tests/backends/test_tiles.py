"""A tile cover of any problem gives the whole, for every backend that takes foreign (out, lse)."""

from __future__ import annotations

import pytest
import torch

from gradtruth.backends import get
from gradtruth.core.extents import resolve
from gradtruth.testing import repeat, unpoisoned
from gradtruth.verify.suite.conformance import findings, truth_of
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.suite import suite
from gradtruth.verify.suite.tiling import run_tiled, tile_cover

CPU = torch.device("cpu")
CHUNKS = 8
SLACK = 4.0  # every part is rounded once more, and so is every merge
RECIPES = suite().recipes[::13]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_tiles_make_the_whole(chunk, backend_names, poisoned_memory):
    wrong, ran = [], 0
    for recipe in RECIPES[chunk::CHUNKS]:
        sample = make(recipe)
        truth = None
        for backend in map(get, backend_names):
            claims = backend.claims(sample.problem, CPU)
            tiles = tile_cover(sample.problem, sample.inputs, recipe.seed)
            if not (claims.foreign_lse and all(backend.supports(t.problem, CPU).ok for t in tiles)):
                continue
            ran += 1
            truth = truth or truth_of(sample)
            given = sample if claims.shielded else unpoisoned(recipe)
            tiled = run_tiled(given, backend, recipe.seed)
            found = list(findings(given, truth, tiled, claims, slack=SLACK))
            if found:
                wrong.append(
                    "\n  ".join(
                        [f"{backend.name}: {recipe.label()}", *found, repeat(recipe, backend.name)]
                    )
                )
    assert not wrong, "\n".join([f"{len(wrong)} of {ran} are wrong", *wrong[:8]])


def test_the_covers_cut_every_axis_and_count_every_pair_once():
    cut = {"sequences": 0, "groups": 0, "queries": 0, "keys": 0}
    for recipe in RECIPES[::2]:
        sample = make(recipe)
        whole = resolve(sample.problem, sample.inputs)
        pairs = int((whole.length_q.long() * whole.length_kv).sum()) * sample.problem.num_heads
        covered = 0
        tiles = list(tile_cover(sample.problem, sample.inputs, recipe.seed))
        for part in tiles:
            where = resolve(part.problem, part.inputs)
            covered += int((where.length_q.long() * where.length_kv).sum()) * part.problem.num_heads
            cut["queries"] += bool((where.origin_q > 0).any())
            cut["keys"] += bool((where.origin_kv > 0).any())
            cut["groups"] += part.groups.start > 0
            cut["sequences"] += part.sequences.start > 0
        assert covered == pairs
    assert min(cut.values()) > 20, cut
