"""What the programme reaches: whatever a backend supports that a check needs is in one of its problems."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from gradtruth.backends import ORDER, get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.verify.checks import CHECKS
from gradtruth.verify.doctor.programme import PROGRAMME

_ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")
_BANDS = (
    Spec(),
    Spec(right=0),
    Spec(right=0, alignment="bottom_right"),
    Spec(left=32, right=0),
    Spec(left=30, right=17),
)
_STORAGES = (
    {},
    {"lengths": "cu_seqlens"},
    {"lengths": "padding_mask"},
    {"layout": "thd", "lengths": "cu_seqlens"},
)
_SIZES = ((128, 128), (64, 128), (128, 64))


def _emptied(problem):
    """Whether some element gets nothing from any weight."""
    spec, longer = problem.spec, problem.seqlen_q - problem.seqlen_kv
    if spec.lengths != "full" or spec.arbitrary:
        return True
    if spec.alignment == "bottom_right":
        return spec.right == 0 and longer > 0
    return spec.right == 0 and longer < 0


NEEDS = {
    "batch_slice": lambda problem: problem.batch > 1,
    "batch_permutation": lambda problem: problem.batch > 1,
    "head_slice": lambda problem: problem.num_gqa_groups > 1,
    "gqa_expand": lambda problem: problem.group_size > 1,
    "dropout_consistency": lambda problem: 0 < problem.spec.dropout_p < 1,
    "exact_zeros": _emptied,
    "shielded": lambda problem: problem.batch > 1 or problem.spec.lengths != "full",
}
"""What a check asks of a problem; the others take any."""


def _problems():
    """Plain problems of every kind that a check needs."""
    choices = product(_BANDS, _STORAGES, _SIZES, (2, 4), ("bfloat16", "float32"), (0.0, 0.2))
    for band, storage, (rows, columns), groups, dtype, dropout in choices:
        yield Problem(
            spec=replace(band, **storage, dropout_p=dropout),
            batch=2,
            seqlen_q=rows,
            seqlen_kv=columns,
            num_heads=4,
            num_gqa_groups=groups,
            head_dim_qk=64,
            head_dim_v=64,
            dtype=dtype,
        )


def reached(backend, device, problems):
    """By check the first problem that the backend supports and the check can say something about."""
    taken = [(name, x) for name, x in problems if get(backend).supports(x, device).ok]
    asked = [check.name for check in CHECKS if check.device in (None, device.type)]
    found = {
        check: next((name for name, x in taken if NEEDS.get(check, lambda _: True)(x)), None)
        for check in asked
    }
    return {check: name for check, name in found.items() if name is not None}


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _ON_GPU])])
@pytest.mark.parametrize("backend", ORDER)
def test_every_check_that_applies_to_a_backend_is_reached(backend, kind):
    device = torch.device(kind)
    could = reached(backend, device, [("", problem) for problem in _problems()])
    does = reached(backend, device, [(item.name, item.recipe.problem) for item in PROGRAMME])
    print("\n".join(f"{backend} {check}: {name}" for check, name in does.items()))
    assert set(could) <= set(does)


@pytest.mark.parametrize("name", list(NEEDS))
def test_what_is_said_of_a_check_is_about_one_that_there_is(name):
    assert name in [check.name for check in CHECKS]
    assert any(NEEDS[name](item.recipe.problem) for item in PROGRAMME)
    assert not all(NEEDS[name](item.recipe.problem) for item in PROGRAMME)
