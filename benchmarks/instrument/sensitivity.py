"""Sensitivity: the smallest factor on one (sequence, head) of a gradient that the ``backward`` check still finds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from benchmarks.instrument.planted import ITEMS
from gradtruth.backends import get
from gradtruth.core.layout import canonical
from gradtruth.core.tensors import Forward, Grads
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import Check, Judged, Subject, named
from gradtruth.verify.doctor.programme import case_of
from gradtruth.verify.standard import Standard
from gradtruth.verify.trial import wanted_of
from gradtruth.verify.truth.scoring import places

__all__ = ["DTYPES", "GRADIENTS", "INPUTS", "LIMITS", "Bench", "line", "lines"]

INPUTS = (
    "causal-gqa-d64",
    "causal-two-sequences-d256",
    "thd-documents-d64",
    "window-d64",
    "padded-d64",
    "sink-window-gqa-d64",
    "softcap-window-d128",
)
DTYPES = ("bfloat16", "float16", "float32")
GRADIENTS = ("dq", "dk", "dv")
LIMITS = {"bfloat16": 0.02, "float16": 0.003, "float32": 0.0001}  # a factor of 1.02 ...
_LEAST, _STEPS = (
    1e-8,
    12,
)  # eight decades halved twelve times: factor - 1 is known to half a percent
_CHECK: Check = named(("backward",))[0]


@dataclass
class Damaged:
    """Right results, prepared; one (sequence, head) of one gradient times a factor."""

    case: Case
    forward_result: Forward
    grads: dict[str, Tensor]
    name: str = "damaged"

    def supports(self, problem, device):
        return get("reference").supports(problem, device)

    def claims(self, problem, device):
        return get("reference").claims(problem, device)

    def forward(self, problem, inputs):
        return self.forward_result

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        return Grads(**{name: x for name, x in self.grads.items() if getattr(wanted, name)})


class Bench:
    """One problem in one dtype: its oracle and right results, made once."""

    def __init__(self, item: str, dtype: str) -> None:
        recipe = ITEMS[item].recipe
        problem = replace(recipe.problem, dtype=dtype)
        self.case = case_of(replace(recipe, problem=problem, family="heterogeneous"))
        self.standard = Standard(self.case)
        case, reference = self.case, get("reference")
        with torch.no_grad():
            self.forward = reference.forward(case.problem, case.inputs)
            grads = reference.backward(
                case.problem, case.inputs, self.forward, case.dout, case.dlse, wanted_of(case)
            )
        self.grads = dict(grads.items())

    def found(self, tensor: str, sequence: int, head: int, factor: float) -> bool:
        """Whether the check calls this gradient wrong."""
        changed = self.grads[tensor].clone()
        part = self.part(tensor, changed, sequence, head)
        part.copy_((part.double() * factor).to(part.dtype))
        damaged = Damaged(self.case, self.forward, self.grads | {tensor: changed})
        answers = _CHECK.run(Subject(self.case, damaged, self.standard))
        return any(isinstance(x, Judged) and x.kind and x.tensor == tensor for x in answers)

    def part(self, tensor: str, values: Tensor, sequence: int, head: int) -> Tensor:
        """[L, D] of one (sequence, head), as a view."""
        problem = self.case.problem
        place = places(problem, self.case.inputs)[sequence]
        start, length = (
            (place.start_q, place.length_q) if tensor == "dq" else (place.start_kv, place.length_kv)
        )
        row = 0 if problem.layout == "thd" else sequence
        return canonical(values, problem.spec.layout)[row, start : start + length, head]

    def places(self, tensor: str) -> Iterator[tuple[int, int]]:
        """Every (sequence, head) of a gradient."""
        problem = self.case.problem
        heads = problem.num_heads if tensor == "dq" else problem.num_gqa_groups
        yield from ((n, h) for n in range(problem.batch) for h in range(heads))

    def smallest(self, tensor: str, sequence: int, head: int) -> float:
        """Least e of which both 1 + e and 1 - e are found; inf where not even 0 and 2 are."""
        low, high = math.log(_LEAST), 0.0
        if not self.both(tensor, sequence, head, 1.0):
            return math.inf
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if self.both(tensor, sequence, head, math.exp(middle)):
                high = middle
            else:
                low = middle
        return math.exp(high)

    def both(self, tensor: str, sequence: int, head: int, e: float) -> bool:
        """Whether 1 + e and 1 - e are found."""
        return all(self.found(tensor, sequence, head, factor) for factor in (1 + e, 1 - e))


def lines() -> Iterator[str]:
    """What is measured: input, dtype and gradient of every line."""
    yield from map(" ".join, product(INPUTS, DTYPES, GRADIENTS))


def line(item: str, dtype: str, tensor: str) -> dict[str, object]:
    """The least sensitive (sequence, head) of a gradient: a place is searched only where it is worse than the worst."""
    bench = Bench(item, dtype)
    worst, at = 0.0, (0, 0)
    for place in bench.places(tensor):
        if worst == 0.0 or not bench.both(tensor, *place, worst):
            worst, at = bench.smallest(tensor, *place), place
        if math.isinf(worst):
            break
    return {"worst": worst, "at": list(at)}
