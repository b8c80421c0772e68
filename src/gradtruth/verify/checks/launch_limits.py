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
_FORMS = ((Spec(), 1), (Spec(right=0), 1), (Spec(), 2))
"""What a backend takes first: not all take no mask, or one key. Two keys are the same one."""
_STRAY = 0.05  # dq and dk are 0 but for the rounding of dP - delta, far below this


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """A batch of 65,536 was an invalid configuration, and the failed launch could leave garbage.

    pytorch/pytorch#146704. With one query and one key out is v, dv is dout, dq and dk are 0, whatever the rest; with
    the key twice each has half of dout. Many sequences are tried on a GPU only: there a launch counts them.
    """
    refusals: list[str] = []
    shapes = _ON_GPU if subject.case.device.type == "cuda" else _ON_CPU
    for batch, heads in shapes:
        what = f"{batch:,} sequences of {heads:,} heads"
        case, refusal = _taken(subject, batch, heads)
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


def _taken(subject: Subject, batch: int, heads: int) -> tuple[Case, str | None]:
    """The first form that the backend takes; where it takes none, the plainest and why not."""
    forms = [_case(subject.case, batch, heads, spec, keys) for spec, keys in _FORMS]
    reasons = [subject.supports(form) for form in forms]
    if None not in reasons:
        return forms[0], reasons[0]
    return forms[reasons.index(None)], None


def _judged(case: Case, run: Run, what: str) -> list[Judged]:
    """What is wrong."""
    found: list[Judged] = []
    v, keys = case.inputs.v, case.problem.seqlen_kv
    dv = (case.dout / keys).expand_as(v)
    for name, expected in (("out", v[:, :1]), ("dv", dv), ("dq", None), ("dk", None)):
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


def _case(case: Case, batch: int, heads: int, spec: Spec, keys: int) -> Case:
    """One query; its key as often as ``keys``."""
    shape = (batch, 1, heads, 16)
    dtype = case.problem.torch_dtype
    q, k, v, dout = (noise(at, *shape, device=case.device).to(dtype) for at in range(1, 5))
    k, v = (x.expand(-1, keys, -1, -1).contiguous() for x in (k, v))
    return Case.of(spec, Inputs(q=q, k=k, v=v), dout)


LAUNCH_LIMITS = Check("launch_limits", _run, quick=False, once=True)
