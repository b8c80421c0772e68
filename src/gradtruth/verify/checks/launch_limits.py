"""launch_limits: more sequences and heads than a grid dimension holds."""

from __future__ import annotations

from collections.abc import Iterator

from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Run, Subject
from gradtruth.verify.findings import Kind
from gradtruth.verify.suite.families import noise

__all__ = ["LAUNCH_LIMITS"]

_LIMIT = 65_535
_ON_CPU = ((1, _LIMIT + 2),)
_COUNTS = (_LIMIT, _LIMIT + 1, _LIMIT + 2, 2 * _LIMIT + 3)
_ON_GPU = (*((1, count) for count in _COUNTS), *((count, 1) for count in _COUNTS), (257, 256))
"""Sequences and heads: each around the limit, and a product above it."""
_STRAY = 0.05  # dq and dk are 0 but for the rounding of dP - delta, far below this


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """A batch of 65,536 was an invalid configuration, and the failed launch could leave garbage.

    pytorch/pytorch#146704. With one query and one key out is v, dv is dout, dq and dk are 0, whatever the rest. Many
    sequences are tried on a GPU only: there a launch counts them.
    """
    refusals: list[str] = []
    shapes = _ON_GPU if subject.case.device.type == "cuda" else _ON_CPU
    for batch, heads in shapes:
        case, what = _case(subject.case, batch, heads), f"{batch:,} sequences of {heads:,} heads"
        refusal = subject.supports(case)
        if refusal is not None:
            refusals.append(f"{what}: {refusal}")
            continue
        run = subject.run(case)
        if run.error is not None:
            # An error is a right answer here; garbage is not.
            refusals.append(f"{what}: {run.error}")
            continue
        yield from _judged(case, run, what) or (Judged(detail=(what,)),)
    if refusals:
        yield NotReached("; ".join(refusals))


def _judged(case: Case, run: Run, what: str) -> list[Judged]:
    """What is wrong."""
    found: list[Judged] = []
    for name, expected in (("out", case.inputs.v), ("dv", case.dout), ("dq", None), ("dk", None)):
        tensor = run.tensors.get(name)
        if tensor is None:
            found.append(Judged(tensor=name, kind=Kind.FORM, detail=(f"{what}: it is missing",)))
            continue
        good = tensor == expected if expected is not None else tensor.abs() < _STRAY
        wrong = int((~good).any(-1).sum())
        if wrong:
            text = f"{what}: {wrong} (sequence, head) are wrong"
            found.append(Judged(tensor=name, kind=Kind.VALUE, detail=(text,)))
    return found


def _case(case: Case, batch: int, heads: int) -> Case:
    shape = (batch, 1, heads, 16)
    dtype = case.problem.torch_dtype
    q, k, v, dout = (noise(at, *shape, device=case.device).to(dtype) for at in range(1, 5))
    return Case.of(Spec(), Inputs(q=q, k=k, v=v), dout)


LAUNCH_LIMITS = Check("launch_limits", _run, quick=False, once=True)
