"""The standard of a case: what is right, and what a plain low-precision implementation makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradtruth.backends import get
from gradtruth.core.tensors import Forward
from gradtruth.verify.cases.case import Case
from gradtruth.verify.findings import Measured
from gradtruth.verify.trial import run_backward, run_forward, wanted_of
from gradtruth.verify.truth import budget, oracle
from gradtruth.verify.truth.rounding import Magnitude

__all__ = ["Scale", "Standard", "measured"]

_YARDSTICK = "unfused"


@dataclass(frozen=True, slots=True)
class Scale:
    """What tensors of one run are held against, by name.

    Attributes:
        values: of the oracle, fp64.
        magnitudes: size of their rounding errors.
        yardstick: what the yardstick returned; NaN, which allows nothing, where it failed.
    """

    values: Mapping[str, Tensor]
    magnitudes: Mapping[str, Magnitude]
    yardstick: Mapping[str, Tensor]


class Standard:
    """The oracle and the yardstick of one case, each run once and when first asked for."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._derived: dict[str, Standard] = {}

    def derived(self, key: str, case: Case) -> Standard:
        """The standard of a case that a check made of this one, kept for the other backends.

        Args:
            key: says how it was made; the same key always means the same tensors.
            case: the case.
        """
        return self._derived.setdefault(key, Standard(case))

    @cached_property
    def own(self) -> Scale:
        """For a forward, and a backward from that forward: out, lse, dq, dk, dv ..."""
        forward, backward = self._evaluated
        yardstick = run_forward(self.case, get(_YARDSTICK))
        found = dict(yardstick.tensors)
        if isinstance(yardstick.returned, Forward):
            found |= run_backward(self.case, get(_YARDSTICK), yardstick.returned).tensors
        return _scale(
            {**dict(forward.items()), **dict(backward.items())},
            {**forward.magnitudes, **backward.magnitudes},
            found,
        )

    @cached_property
    def given(self) -> Forward:
        """The oracle's out and lse rounded to the dtypes of a forward."""
        problem, forward = self.case.problem, self._evaluated[0]
        return Forward(
            out=forward.out.to(problem.torch_dtype), lse=forward.lse.to(problem.accumulate_dtype)
        )

    @cached_property
    def foreign(self) -> Scale:
        """For a backward from ``given``: dq, dk, dv ..."""
        case, given = self.case, self.given
        found = oracle.backward(
            *self._arguments, forward=(given.out, given.lse), device=case.device
        )
        yardstick = run_backward(case, get(_YARDSTICK), given)
        return _scale(dict(found.items()), found.magnitudes, yardstick.tensors)

    def measure(self, name: str, tensor: Tensor, scale: Scale | None = None) -> list[budget.Row]:
        """A tensor against its budget, one row per (sequence, head) and one for what lies outside them."""
        scale = scale or self.own
        return budget.compare(
            self.case.problem,
            self.case.inputs,
            name,
            tensor,
            scale.values[name],
            scale.magnitudes[name],
            scale.yardstick[name],
        )

    def apart(self, name: str, tensor: Tensor, other: Tensor) -> list[budget.Row]:
        """Two results of one thing against the budget of one; both may use theirs, so up to 2 is no difference."""
        scale, problem = self.own, self.case.problem
        drift = scale.yardstick[name].double() - scale.values[name]
        return budget.compare(
            problem,
            self.case.inputs,
            name,
            tensor,
            other.double(),
            scale.magnitudes[name],
            torch.where(other.isfinite(), other.double() + drift, other.double()),
        )

    @cached_property
    def _evaluated(self) -> tuple[oracle.OracleForward, oracle.OracleGrads]:
        return oracle.evaluate(*self._arguments, device=self.case.device)

    @property
    def _arguments(self) -> tuple:
        case = self.case
        return case.problem, case.inputs, case.dout, case.dlse, wanted_of(case)


def measured(rows: list[budget.Row]) -> tuple[Measured, Measured, tuple[Measured, ...]]:
    """Rows of one tensor as data: the whole, the worst (sequence, head), and every one."""
    found = budget.summarise(rows)
    parts = tuple(_measured(row.norms, row.used, row.sequence, row.head) for row in rows)
    worst = found.worst
    return (
        _measured(found.norms, worst.used),
        _measured(worst.norms, worst.used, worst.sequence, worst.head),
        parts,
    )


def _measured(
    norms: budget.Norms, used: float, sequence: int | None = None, head: int | None = None
) -> Measured:
    return Measured(
        relative_l2=norms.relative_l2,
        cosine=norms.cosine,
        norm_ratio=norms.norm_ratio,
        used=used,
        budget=norms.budget,
        sequence=sequence,
        head=head,
    )


def _scale(
    values: dict[str, Tensor], magnitudes: Mapping[str, Magnitude], found: Mapping[str, Tensor]
) -> Scale:
    yardstick = {
        name: found.get(name, torch.full_like(value, torch.nan)) for name, value in values.items()
    }
    return Scale(values, magnitudes, yardstick)
