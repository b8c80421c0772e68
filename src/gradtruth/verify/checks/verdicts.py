"""Verdicts: tensors against the oracle, and results of one thing against each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from gradtruth.verify.checks.check import Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.error_map import error_map
from gradtruth.verify.findings import ErrorMap, Kind
from gradtruth.verify.same_bits import all_same_bits, as_integers, on_host
from gradtruth.verify.standard import Scale, measured
from gradtruth.verify.trial import Trial
from gradtruth.verify.truth import budget

__all__ = ["against_oracle", "bits", "differences", "unanswered"]

_BY_PLACE = ("out", "lse", "dq", "dk", "dv")  # outside every sequence: see exact_zeros
_APART = 2.0  # two results that may each use their budget


def against_oracle(subject: Subject, trial: Trial, scale: Scale) -> Iterator[Judged]:
    """Everything that a run returned: form, inputs untouched, and each tensor within its budget."""
    if trial.error is not None:
        yield Judged(kind=Kind.RAISED, detail=(trial.error,))
        return
    for name, text in trial.wrong.items():
        kind = Kind.WRITTEN if "wrote" in text else Kind.FORM
        yield Judged(tensor=name, kind=kind, detail=(text,))
    for name, tensor in trial.tensors.items():
        yield _judged(subject, name, tensor, scale)


def differences(
    subject: Subject,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    what: str,
    names: Iterable[str] | None = None,
    slack: float = 0.0,
    skip: int | None = None,
) -> Iterator[Judged]:
    """Tensors that should be equal but for rounding: a finding for each that differs by more than that.

    What lies outside every sequence is not looked at. Equal bits that are no finding in themselves are passed over.

    Args:
        subject: its standard says what rounding is.
        found, expected: by name, each of the form of the case's own result; names in only one are passed over.
        what: "the call on its own", "a second run", for the detail.
        names: which to look at; all by default.
        slack: budgets more than the two, where a result is put together from rounded parts.
        skip: a sequence that is not looked at.
    """
    asked = [
        name
        for name in (names if names is not None else expected)
        if name in found and name in expected
    ]
    alike = all_same_bits((found[name], expected[name]) for name in asked)
    equal = [name for name, same in zip(asked, alike, strict=True) if same]
    plain = on_host([subject.standard.is_plain(name, found[name]) for name in equal])
    nothing = {name for name, is_plain in zip(equal, plain, strict=True) if is_plain}
    for name in asked:
        if name in nothing:
            continue
        rows = [
            row
            for row in subject.standard.apart(name, found[name], expected[name])
            if (row.sequence is not None or name not in _BY_PLACE)
            and (skip is None or row.sequence != skip)
        ]
        over = [row for row in rows if not row.used <= _APART + slack]
        if over:
            worst = max(over, key=lambda row: row.used if row.used == row.used else float("inf"))
            lost = not bool(found[name].isfinite().all()) and name not in ("lse", "max_logit")
            whole, part, heads = measured(rows)
            yield Judged(
                tensor=name,
                kind=Kind.NONFINITE if lost else Kind.VALUE,
                detail=(f"differs from {what}: {worst.finding}", _count(len(over), len(rows))),
                whole=whole,
                worst=part,
                heads=heads,
                errors=_errors(subject, name, found[name], expected[name]),
            )


def bits(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str, breaks: str
) -> Iterator[Judged]:
    """Tensors that should be equal bit for bit."""
    asked = [name for name in found if name in expected]
    alike = all_same_bits((found[name], expected[name]) for name in asked)
    for name, equal in zip(asked, alike, strict=True):
        if not equal:
            tensor = found[name]
            apart = _unequal(tensor, expected[name])
            yield Judged(
                tensor=name,
                kind=Kind.BITS,
                breaks=breaks,
                detail=(f"{apart} of {tensor.numel()} elements differ from {what}",),
            )


def unanswered(subject: Subject) -> NotReached | None:
    """Why nothing can be compared with the first run; None where it can."""
    error = subject.first.error
    return None if error is None else NotReached(f"the call itself raised {error}")


def _unequal(a: Tensor, b: Tensor) -> int:
    return int((as_integers(a) != as_integers(b)).sum())


def _judged(subject: Subject, name: str, tensor: Tensor, scale: Scale) -> Judged:
    rows = [
        row
        for row in subject.standard.measure(name, tensor, scale)
        if row.sequence is not None or name not in _BY_PLACE
    ]
    if not rows:
        return Judged(tensor=name, detail=("it has no elements",))
    wrong = [row for row in rows if not row.passed]
    whole, worst, heads = measured(rows)
    if not wrong:
        return Judged(tensor=name, whole=whole, worst=worst, heads=heads)
    gravest = budget.summarise(rows).worst
    return Judged(
        tensor=name,
        kind=_kind(gravest.finding),
        detail=(gravest.finding, _count(len(wrong), len(rows)))
        if len(rows) > 1
        else (gravest.finding,),
        whole=whole,
        worst=worst,
        heads=heads,
        errors=_errors(subject, name, tensor, scale.values[name]),
    )


def _errors(subject: Subject, name: str, found: Tensor, expected: Tensor) -> ErrorMap | None:
    case = subject.standard.there
    found, expected = (tensor.to(case.device) for tensor in (found, expected))
    return error_map(case.problem, case.inputs, name, found, expected)


def _kind(finding: str) -> Kind:
    if "NaN or Inf" in finding:
        return Kind.NONFINITE
    return Kind.NOT_ZERO if "where nothing contributes" in finding else Kind.VALUE


def _count(wrong: int, total: int) -> str:
    return f"{wrong} of {total} (sequence, head) are wrong"
