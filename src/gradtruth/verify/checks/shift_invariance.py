"""shift_invariance: a constant added to every logit of a row changes lse by it, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.variants import variant
from gradtruth.verify.checks.verdicts import differences
from gradtruth.verify.findings import Kind

__all__ = ["SHIFT_INVARIANCE"]

_SHIFTS = (-200.0, 200.0)


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """A running maximum that started at 0 made rows of 0 out of rows whose logits were all near -200.

    Dao-AILab/flash-attention#2082; NVIDIA/TransformerEngine#716 overflowed where lse passed 709.

    The last channel of q is set to 1 and that of k to a constant, so every logit moves by exactly that constant
    times the scale. dq of that channel, where the constant multiplies a sum that is 0, is not looked at.
    """
    case = subject.case
    reason = _not_reached(case)
    if reason is not None:
        yield NotReached(reason)
        return
    base = subject.run(_moved(case, 0.0))
    if base.error is not None:
        yield Judged(kind=Kind.RAISED, detail=(f"with one channel constant: {base.error}",))
        return
    for shift in _SHIFTS:
        moved = _shifted(case, shift)
        constant = float(moved.inputs.k[..., -1].flatten()[0]) * case.problem.scale
        found = subject.run(moved)
        expected = dict(base.tensors)
        for name in ("lse", "max_logit"):
            if name in expected:
                expected[name] = expected[name] + constant
        if "dq" in found.tensors and "dq" in expected:
            expected["dq"] = _with_last(expected["dq"], found.tensors["dq"][..., -1])
        standard = subject.standard.derived(_key(shift), moved)
        own = Subject(moved, subject.backend, standard)
        what = f"the same logits before {constant:+.4g} was added to all"
        yield from differences(own, found.tensors, expected, what)


def _not_reached(case: Case) -> str | None:
    spec = case.problem.spec
    if spec.softcap is not None:
        return "a softcap bends what is added"
    if spec.sink:
        return "a sink stays where it is"
    if case.problem.head_dim_qk < 2:
        return "head_dim is 1, and one channel is needed for the shift"
    return None if case.inputs.k.numel() else "there are no keys"


def _moved(case: Case, constant: float) -> Case:
    q, k = case.inputs.q, case.inputs.k
    ones = q.new_ones(q.shape[:-1])
    moved = {"q": _with_last(q, ones), "k": _with_last(k, k.new_full(k.shape[:-1], constant))}
    return variant(case, dict(moved))


def _with_last(tensor: Tensor, channel: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[..., -1] = channel
    return changed


def _shifted(case: Case, shift: float) -> Case:
    return _moved(case, shift / case.problem.scale)


def _key(shift: float) -> str:
    return f"shift_invariance {shift}"


def _derived(case: Case) -> dict[str, Case]:
    shifts = _SHIFTS if _not_reached(case) is None else ()
    return {_key(shift): _shifted(case, shift) for shift in shifts}


SHIFT_INVARIANCE = Check("shift_invariance", _run, derived=_derived)
