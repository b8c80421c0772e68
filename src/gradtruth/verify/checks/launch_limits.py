"""launch_limits: more sequences and heads than a grid dimension holds."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.findings import Kind
from gradtruth.verify.suite.families import noise

__all__ = ["LAUNCH_LIMITS"]

_MANY = 65_537


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """A batch of 65,536 was an invalid configuration, and the failed launch could leave garbage.

    pytorch/pytorch#146704. With one query and one key out is v and dv is dout, whatever the rest. Many sequences are
    tried on a GPU only: there a launch counts them.
    """
    reached, refusals = False, []
    shapes = {"heads": (1, _MANY)}
    if subject.case.device.type == "cuda":
        shapes["sequences"] = (_MANY, 1)
    for what, (batch, heads) in shapes.items():
        case = _case(subject.case, batch, heads)
        refusal = subject.supports(case)
        if refusal is not None:
            refusals.append(f"{what}: {refusal}")
            continue
        reached = True
        run = subject.run(case)
        if run.error is not None:
            yield Judged(kind=Kind.RAISED, detail=(f"{_MANY} {what}: {run.error}",))
            continue
        for name, expected in (("out", case.inputs.v), ("dv", case.dout)):
            wrong = int((run.tensors[name] != expected).any(-1).sum())
            if wrong:
                text = f"{wrong} of {_MANY} {what} are wrong"
                yield Judged(tensor=name, kind=Kind.VALUE, detail=(text,))
    if not reached:
        yield NotReached("; ".join(refusals))


def _case(case: Case, batch: int, heads: int) -> Case:
    shape = (batch, 1, heads, 16)
    dtype = case.problem.torch_dtype
    q, k, v, dout = (noise(at, *shape, device=case.device).to(dtype) for at in range(1, 5))
    return Case.of(Spec(), Inputs(q=q, k=k, v=v), torch.as_tensor(dout))


LAUNCH_LIMITS = Check("launch_limits", _run, quick=False, once=True)
