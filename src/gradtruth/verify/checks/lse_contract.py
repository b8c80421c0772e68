"""lse_contract: lse counts keys in natural logarithms, in every head and row, and its gradient arrives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.core.layout import empty_lse
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.variants import variant
from gradtruth.verify.checks.verdicts import against_oracle
from gradtruth.verify.findings import Kind
from gradtruth.verify.suite.families import noise

__all__ = ["LSE_CONTRACT"]

_UNIFORM, _THROUGH = "lse_contract q = 0", "lse_contract dlse"


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """lse was too small by a factor of ln 2; lse was written for the first head of each KV group only.

    pytorch/pytorch#181645, NVIDIA/cudnn-frontend#1083. With q = 0 lse is the logarithm of a count (where nothing
    else enters the scores). The gradient of sum(lse), which rings and distillation need, is checked alone.
    """
    yield from _forward(subject, _uniform(subject.case))
    yield from _gradient(subject)


def _forward(subject: Subject, case: Case) -> Iterator[Judged]:
    trial = subject.run(case).forward
    own = Subject(case, subject.backend, subject.standard.derived(_UNIFORM, case))
    for answer in against_oracle(own, trial, own.standard.own):
        yield _said(answer, "with q = 0, where lse counts the visible keys")


def _gradient(subject: Subject) -> Iterator[Judged | NotReached]:
    """The gradient through lse alone: dout is 0."""
    case = subject.case
    lse = subject.first.forward.tensors.get("lse")
    if lse is None:
        yield NotReached("its forward gave no lse")
        return
    through = _through(case, lse)
    refusal = subject.supports(through)
    if refusal is not None:
        yield NotReached(f"gradient of lse: {refusal}")
        return
    run = subject.run(through)
    if run.backward is None:
        yield Judged(kind=Kind.RAISED, detail=(f"with lse_grad: {run.forward.error}",))
        return
    standard = subject.standard.derived(_THROUGH, through)
    own = Subject(through, subject.backend, standard)
    for answer in against_oracle(own, run.backward, own.standard.own):
        yield _said(answer, "the gradient through lse alone")


def _uniform(case: Case) -> Case:
    return variant(case, {"q": torch.zeros_like(case.inputs.q)})


def _through(case: Case, lse: Tensor) -> Case:
    """The case with a gradient of lse, like this one, and none of out."""
    shape = lse.t().shape if lse.dim() == 2 else lse.shape
    dlse = noise(31, *shape, device=case.device).to(lse.dtype)
    dlse = dlse.t() if lse.dim() == 2 else dlse
    changed = {"dlse": dlse.contiguous(), "dout": torch.zeros_like(case.dout)}
    return variant(case, changed, lse_grad=True)


def _said(answer: Judged, what: str) -> Judged:
    if answer.kind is None:
        return answer
    return replace(answer, detail=(f"{what}: {answer.detail[0]}", *answer.detail[1:]))


def _derived(case: Case) -> dict[str, Case]:
    lse = empty_lse(case.inputs.q.to("meta"), case.problem.layout)
    return {_UNIFORM: _uniform(case), _THROUGH: _through(case, lse)}


LSE_CONTRACT = Check("lse_contract", _run, derived=_derived)
