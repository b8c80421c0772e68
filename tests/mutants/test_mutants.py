"""Every mutant is found, by the check that it is there for, as the kind of finding that it is; health is not."""

from __future__ import annotations

import importlib
import re
from functools import cache

import pytest
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.kernel import Kernel

from gradtruth.verify.checks import CHECKS
from gradtruth.verify.doctor.programme import PROGRAMME, case_of
from gradtruth.verify.engine import find

ROOMS = ("memory", "sequences", "masks", "heads", "terms", "numbers")
for room in ROOMS:
    importlib.import_module(f"tests.mutants.{room}")
ITEMS = {item.name: item for item in PROGRAMME}
ASKED = {check.name: check for check in CHECKS}


@cache
def case(name):
    return case_of(ITEMS[name].recipe)


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_mutant_is_found_by_its_check(name):
    mutant = CATALOGUE[name]
    found = find(case(mutant.item), mutant.make(), ASKED[mutant.check])
    kinds = {(answer.tensor, answer.kind.value) for answer in found}
    assert (mutant.tensor, mutant.finding) in kinds, (mutant.fault, kinds)


@pytest.mark.parametrize(("item", "check"), sorted({(m.item, m.check) for m in CATALOGUE.values()}))
def test_the_healthy_kernel_is_not(item, check):
    assert find(case(item), Kernel(), ASKED[check]) == []


def test_the_catalogue_is_large_and_names_every_kind_of_fault_that_a_backend_can_have():
    assert len(CATALOGUE) >= 60
    # Not of a backend: compile (23), autocast (25), FP8 (28); of a GPU: 32-bit offsets (19), streams (26).
    backend = {f"K{n:02}" for n in range(1, 30)} - {"K19", "K23", "K25", "K26", "K28"}
    assert {mutant.kind for mutant in CATALOGUE.values()} >= backend


def test_every_mutant_says_what_its_fault_is():
    for mutant in CATALOGUE.values():
        assert re.match(r"\S.*\.$", mutant.fault), mutant.name
