"""What backends claim about bits, over a part of the suite: the same twice, and the same whatever padding holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradtruth.backends import get
from gradtruth.testing import unpoisoned
from gradtruth.verify.suite.conformance import run
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.suite import suite
from gradtruth.verify.truth import oracle

CPU = torch.device("cpu")
CHUNKS = 4
RECIPES = suite().recipes[3::19]
SHARES = {"flex": 6}
KINDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def different(one, two):
    """Names of the tensors whose bits differ."""
    assert set(one) == set(two)
    kinds = {name: KINDS[tensor.element_size()] for name, tensor in one.items()}
    return [
        name
        for name in one
        if not torch.equal(
            one[name].contiguous().view(kinds[name]), two[name].contiguous().view(kinds[name])
        )
    ]


def cases(chunk, names):
    for place, recipe in enumerate(RECIPES[chunk::CHUNKS]):
        sample = make(recipe)
        for backend in map(get, names):
            if (
                place % SHARES.get(backend.name, 1) == 0
                and backend.supports(sample.problem, CPU).ok
            ):
                yield recipe, sample, backend, backend.claims(sample.problem, CPU)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_bits_are_what_is_claimed(chunk, backend_names):
    wrong = []
    for recipe, sample, backend, claims in cases(chunk, backend_names):
        plain = unpoisoned(recipe)
        used = sample if claims.shielded else plain
        once = run(used, backend, claims)
        checks = {}
        if claims.deterministic:
            checks["a second run"] = different(once, run(used, backend, claims))
        if claims.shielded:
            checks["other padding"] = different(once, run(plain, backend, claims))
        if claims.deterministic and len(recipe.wanted) > 1:
            fewer = replace(used, wanted=replace(used.wanted, dk=False, dbias=False))
            found = run(fewer, backend, claims)
            checks["fewer wanted gradients"] = different(
                {name: once[name] for name in found}, found
            )
            checks["a gradient that is not wanted"] = [
                name for name in found if name in ("dk", "dbias")
            ]
        wrong += [
            f"{backend.name}: {name} changes {', '.join(changed)} of {recipe.label()}"
            for name, changed in checks.items()
            if changed
        ]
    assert not wrong, "\n".join(wrong)


def test_the_oracle_reads_nothing_outside_the_sequences():
    for recipe in RECIPES[::3]:
        both = []
        for sample in (make(recipe), unpoisoned(recipe)):
            forward, backward = oracle.evaluate(
                sample.problem, sample.inputs, sample.dout, sample.dlse, sample.wanted
            )
            both.append({**dict(forward.items()), **dict(backward.items())})
        assert not different(*both), recipe.encode()
