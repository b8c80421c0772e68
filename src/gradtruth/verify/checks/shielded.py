"""shielded: what lies in padding, gaps, tails and other sequences reaches no valid place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.core.layout import canonical, stored
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.parts import few
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.variants import variant
from gradtruth.verify.checks.verdicts import differences, unanswered
from gradtruth.verify.findings import Kind
from gradtruth.verify.suite.poison import poison, poison_lse, poison_rows, valid_places
from gradtruth.verify.truth.scoring import places

__all__ = ["SHIELDED"]

_VALUES = (math.nan, math.inf, 1e30)


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """Keys behind the end of a sequence had weight 0, and 0 times NaN is NaN: padding reached dQ.

    ROCm/aiter#3551, pytorch/pytorch#101967. Padding, gaps and tails hold NaN, Inf and 1e30 in turn; then one whole
    sequence is NaN and the others must not know.
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    case, reached = subject.case, False
    if any(not bool(valid.all()) for valid in valid_places(case.problem, case.inputs)):
        reached = True
        for value in _VALUES:
            poisoned = _outside(case, value)
            yield from _compared(subject, poisoned, f"finite padding, with {value:g} there", None)
    if case.problem.batch > 1:
        reached = True
        for n in few(case.problem.batch, 2):
            what = f"a finite sequence {n}, with NaN there"
            yield from _compared(subject, _foreign(case, n), what, n)
    if not reached:
        yield NotReached("every place belongs to the one sequence")


def _compared(subject: Subject, case: Case, what: str, skip: int | None) -> Iterator[Judged]:
    run = subject.run(case)
    if run.error is not None:
        yield Judged(kind=Kind.RAISED, breaks="shielded", detail=(f"{what}: {run.error}",))
        return
    names = [name for name in ("out", "lse", "dq", "dk", "dv") if name in run.tensors]
    for answer in differences(subject, run.tensors, subject.first.tensors, what, names, skip=skip):
        yield replace(answer, breaks="shielded", errors=None)


def _outside(case: Case, value: float) -> Case:
    """The case with a value at every place that must not matter."""
    problem, inputs = case.problem, case.inputs
    changed: dict[str, Tensor | None] = dict(poison(problem, inputs, value).items())
    changed["dout"] = poison_rows(problem, inputs, case.dout, value)
    if case.dlse is not None:
        changed["dlse"] = poison_lse(problem, inputs, case.dlse, value)
    return variant(case, changed)


def _foreign(case: Case, n: int) -> Case:
    """The case with NaN in all of one sequence."""
    layout, place = case.problem.spec.layout, places(case.problem, case.inputs)[n]
    row = 0 if layout == "thd" else n

    def filled(tensor: Tensor, side: slice) -> Tensor:
        inner = canonical(tensor, layout).clone()
        inner[row, side] = torch.nan
        return stored(inner, layout)

    inputs = case.inputs
    return variant(
        case,
        {
            "q": filled(inputs.q, place.queries),
            "k": filled(inputs.k, place.keys),
            "v": filled(inputs.v, place.keys),
            "dout": filled(case.dout, place.queries),
        },
    )


SHIELDED = Check("shielded", _run)
