"""What a usual test finds of the same faults: elementwise ``allclose`` on small Gaussian inputs, one call."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.mutants.catalogue import Mutant
from tests.mutants.kernel import Kernel

from benchmarks.instrument.planted import ITEMS
from gradtruth.core.tensors import Forward
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.variants import variant
from gradtruth.verify.doctor.programme import case_of
from gradtruth.verify.standard import Standard
from gradtruth.verify.trial import run_backward, run_forward

__all__ = ["SCALE", "TOLERANCE", "caught"]

TOLERANCE = 1.5e-2  # atol and rtol
SCALE = 0.1
_MINUS_INF = ("lse", "max_logit")


def caught(item: str, mutants: list[Mutant]) -> dict[str, bool]:
    """Which faults a test with these inputs and tolerances fails.

    Raises:
        RuntimeError: the healthy kernel fails it too.
    """
    torch.manual_seed(0)
    case = _small(item)
    expected = {n: x for n, x in Standard(case).own.values.items() if n not in _MINUS_INF}
    if not _close(case, Kernel(), expected):
        raise RuntimeError(f"{item}: the healthy kernel fails the usual test, so it shows nothing")
    return {mutant.name: not _close(case, mutant.make(), expected) for mutant in mutants}


def _small(item: str) -> Case:
    case = case_of(replace(ITEMS[item].recipe, family="gaussian"))
    given = {"q": case.inputs.q, "k": case.inputs.k, "v": case.inputs.v, "dout": case.dout}
    return variant(case, {name: x * SCALE for name, x in given.items()})


def _close(case: Case, kernel: object, expected: dict[str, torch.Tensor]) -> bool:
    forward = run_forward(case, kernel)
    if not isinstance(forward.returned, Forward):
        return False
    backward = run_backward(case, kernel, forward.returned)
    found = {**forward.tensors, **backward.tensors}
    return all(
        name in found
        and torch.allclose(found[name].double(), right, atol=TOLERANCE, rtol=TOLERANCE)
        for name, right in expected.items()
    )
