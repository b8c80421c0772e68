"""conservation: the laws between inputs, outputs and gradients hold, without any oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import unanswered
from gradtruth.verify.findings import Kind
from gradtruth.verify.laws import Residual, residuals
from gradtruth.verify.truth.budget import eps_of

__all__ = ["CONSERVATION"]

_NAMES = ("out", "lse", "dq", "dk", "dv")
_DEVIATIONS = 2.0  # of what is an upper estimate: healthy backends stay below one
_YARDSTICK = 3.0
_SUMS = 2e-7  # of the product of norms: what fp32 sums may lose
_LAWS = {
    "A": "<q, dq> = <k, dk>",
    "B": "<v, dv> = <out, dout>",
    "C": "sum of dk = what sink and lse take",
}


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """dK and dV of a GQA backward held values of another call: they no longer fitted the dQ beside them.

    NVIDIA/TransformerEngine#2448. Needs no reference, so it can be watched during training.
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    case, scale = subject.case, subject.standard.own
    spec = case.problem.spec
    if spec.dropout_p == 1.0:
        yield NotReached("everything is dropped, so all sums are 0")
        return
    if case.problem.dtype == "float64":
        yield NotReached("dtype is float64: the sums of the laws round as its own do")
        return
    errors = {
        name: scale.magnitudes[name].spread.double() * eps_of(case.problem, name)
        for name in _NAMES
        if name in scale.magnitudes
    }
    plain = _by_place(subject, scale.yardstick, errors)
    for key, found in _by_place(subject, subject.first.tensors, errors).items():
        before = plain.get(key)
        allowed = _DEVIATIONS * found.rounding + _SUMS * found.size
        if before is not None and math.isfinite(before.value):
            allowed += _YARDSTICK * before.value
        if not found.value <= allowed and found.size > 0:
            law, n, head = key
            text = (
                f"{_LAWS[law]} is off by {found.value:.3g} > {allowed:.3g} "
                f"in sequence {n}, KV head {head}"
            )
            yield Judged(kind=Kind.LAW, detail=(text,))


def _by_place(
    subject: Subject, tensors: Mapping[str, Tensor], errors: Mapping[str, Tensor]
) -> dict[tuple[str, int, int], Residual]:
    case = subject.standard.there
    given = {name: tensors[name].to(case.device) for name in _NAMES if name in tensors}
    found = residuals(case.problem, case.inputs, given, case.dout, case.dlse, errors)
    return {(each.law, each.sequence, each.head): each for each in found}


CONSERVATION = Check("conservation", _run)
