"""call_order: a call's result does not depend on the calls before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.core.tensors import Forward
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.again import again, same
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Run, Subject
from gradtruth.verify.checks.variants import variant
from gradtruth.verify.checks.verdicts import against_oracle, unanswered
from gradtruth.verify.edits.heads import kv_heads
from gradtruth.verify.edits.sequences import sequences
from gradtruth.verify.findings import Kind
from gradtruth.verify.trial import Trial, run_backward, run_forward

__all__ = ["CALL_ORDER", "related"]

_OTHER_DTYPE = {"bfloat16": torch.float16, "float16": torch.bfloat16, "float32": torch.float64}
_REFILLED = "other values and lengths"
_ORDERS = ("case, other; case, other", "other, case; other, case", "case, other; other, case",
           "other, case; case, other")  # fmt: skip
"""Two forwards, then the two backwards."""


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """dk and dv of a thd + GQA backward were those of the call before, in an order of calls that training has.

    NVIDIA/TransformerEngine#2448. flashinfer-ai/flashinfer#4014 kept plans by shape, without the scale in the key.
    The case is repeated after calls with other values and lengths, another scale, dtype and shape (ABA); these calls
    are judged too (AB, BA); it is called twice in a row with another call after it (AAB); and the halves of two calls
    are interleaved in every order.
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    yield from again(subject, subject.run(), "the first call, after two calls of its own")
    for what, other in related(subject.case).items():
        if subject.supports(other) is not None:
            continue
        yield from _judged(subject, what, other, subject.run(other))
        yield from again(subject, subject.run(), f"the first call, after a call with {what}")
    yield from _interleaved(subject)


def related(case: Case) -> dict[str, Case]:
    """Related calls: what a cache that is keyed too loosely takes for the same."""
    problem = case.problem
    found = {
        _REFILLED: _refilled(case),
        "another scale": variant(case, scale=0.5 * problem.scale),
    }
    dtype = _OTHER_DTYPE.get(problem.dtype)
    if dtype is not None and case.inputs.bias is None:
        cast = {name: getattr(case.inputs, name).to(dtype) for name in ("q", "k", "v")}
        found["another dtype"] = variant(case, {**cast, "dout": case.dout.to(dtype)} | _dlse(case))
    if not 0.0 < problem.spec.dropout_p < 1.0:
        if problem.batch > 1:
            found["one sequence less"] = sequences(case, list(range(problem.batch - 1)))
        elif problem.num_gqa_groups > 1:
            found["one KV head"] = kv_heads(case, [0])
    return found


def _dlse(case: Case) -> dict[str, Tensor | None]:
    """dlse is fp64 beside fp64."""
    if case.dlse is None or case.problem.dtype != "float32":
        return {}
    return {"dlse": case.dlse.double()}


def _refilled(case: Case) -> Case:
    """The same shapes, negated values in another order of heads, and every slot of the batch full."""
    inputs = case.inputs
    changed: dict[str, Tensor | None] = {
        name: -getattr(inputs, name).flip(-2) for name in ("q", "k", "v")
    }
    changed["dout"] = -case.dout.flip(-2)
    for side in ("q", "kv"):
        cu, padded = (getattr(inputs, f"cu_seqlens_{side}{x}") for x in ("", "_padded"))
        if padded is not None:
            changed[f"cu_seqlens_{side}"] = padded.clone()
        elif cu is not None and case.problem.batch > 1:
            changed[f"cu_seqlens_{side}"] = _reversed(cu)
    return variant(case, changed)


def _reversed(cu: Tensor) -> Tensor:
    """The same lengths in reversed order."""
    lengths = (cu[1:] - cu[:-1]).flip(0)
    return torch.cat([cu[:1], lengths.cumsum(0).to(cu.dtype)])


def _judged(subject: Subject, what: str, other: Case, run: Run) -> Iterator[Judged]:
    """The other call against its own oracle."""
    own = Subject(other, subject.backend, subject.standard.derived(_key(what), other))
    for trial in (run.forward, run.backward):
        for answer in () if trial is None else against_oracle(own, trial, own.standard.own):
            if answer.kind is not None:
                text = f"a call with {what}, after the case: {answer.detail[0]}"
                yield replace(answer, detail=(text, *answer.detail[1:]), errors=None)


def _interleaved(subject: Subject) -> Iterator[Judged]:
    """Two forwards, then the two backwards, in every order."""
    other = _refilled(subject.case)
    if subject.supports(other) is not None:
        return
    standard = subject.standard.derived(_key(_REFILLED), other)
    subjects = {"case": subject, "other": Subject(other, subject.backend, standard)}
    for order in _ORDERS:
        forwards, backwards = (half.split(", ") for half in order.split("; "))
        trials = {name: run_forward(subjects[name].case, subject.backend) for name in forwards}
        for name in backwards:
            yield from _half(subjects[name], trials[name], f"the first call, in the order {order}")


def _half(subject: Subject, forward: Trial, what: str) -> Iterator[Judged]:
    """A backward, from a forward that was made earlier, against that of the first run."""
    given, error = forward.returned, forward.error
    trial = None
    if isinstance(given, Forward) and error is None:
        trial = run_backward(subject.case, subject.backend, given)
        error = trial.error
    if trial is None or error is not None:
        yield Judged(kind=Kind.RAISED, detail=(f"differs from {what}: {error}",))
        return
    first = subject.first.backward
    if first is not None:
        yield from same(subject, trial.tensors, first.tensors, what)


def _key(what: str) -> str:
    return f"call_order {what}"


def _derived(case: Case) -> dict[str, Case]:
    return {_key(what): other for what, other in related(case).items()}


CALL_ORDER = Check("call_order", _run, derived=_derived)
