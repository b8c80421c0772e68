"""The standard of a case: what is right, and what a plain low-precision implementation makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gradtruth.backends import get
from gradtruth.core.tensors import Forward
from gradtruth.verify.cases.case import Case
from gradtruth.verify.findings import Measured
from gradtruth.verify.shelf import Shelf
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
        foreign: of a backward from an out and lse that were given.
    """

    values: Mapping[str, Tensor]
    magnitudes: Mapping[str, Magnitude]
    yardstick: Mapping[str, Tensor]
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class _Truth:
    """What the oracle says, by name: fp64 values and the size of their rounding errors."""

    values: Mapping[str, Tensor]
    magnitudes: Mapping[str, Magnitude]

    def flat(self) -> dict[str, Tensor]:
        """Every tensor under a name of its own."""
        found = {f"value {name}": tensor for name, tensor in self.values.items()}
        for name, magnitude in self.magnitudes.items():
            found |= {f"bound {name}": magnitude.bound, f"spread {name}": magnitude.spread}
        return found

    @staticmethod
    def of_flat(found: Mapping[str, Tensor]) -> _Truth:
        """The inverse."""
        kinds: dict[str, dict[str, Tensor]] = {"value": {}, "bound": {}, "spread": {}}
        for key, tensor in found.items():
            kind, _, name = key.partition(" ")
            kinds[kind][name] = tensor
        magnitudes = {
            name: Magnitude(bound, kinds["spread"][name]) for name, bound in kinds["bound"].items()
        }
        return _Truth(kinds["value"], magnitudes)


class Standard:
    """The oracle and the yardstick of one case, each run once and when first asked for.

    Args:
        case: on the device of the backends. The yardstick runs there too.
        where: the device of the oracle and of every comparison; the case's by default.
        shelf: where results may lie that another process computed, on the CPU.
        name: of the case on the shelf; the same name always means the same tensors.
    """

    def __init__(
        self,
        case: Case,
        *,
        where: torch.device | None = None,
        shelf: Shelf | None = None,
        name: str = "",
    ) -> None:
        self.case = case
        self.where = case.device if where is None else where
        self._shelf, self._name = shelf, name
        self._derived: dict[str, Standard] = {}
        self._nothing: dict[str, Tensor] = {}

    def derived(self, key: str, case: Case) -> Standard:
        """The standard of a case that a check made of this one, kept for the other backends.

        Args:
            key: says how it was made; the same key always means the same tensors.
            case: the case.
        """
        if key not in self._derived:
            name = f"{self._name}, {key}"
            self._derived[key] = Standard(case, where=self.where, shelf=self._shelf, name=name)
        return self._derived[key]

    @cached_property
    def there(self) -> Case:
        """The case on the device of the oracle."""
        return self.case if self.where == self.case.device else self.case.to(self.where)

    @cached_property
    def own(self) -> Scale:
        """For a forward, and a backward from that forward: out, lse, dq, dk, dv ..."""
        truth = self._truth
        return self._scale(truth, self._kept("yardstick", self._run_yardstick, on_device=True))

    @cached_property
    def given(self) -> Forward:
        """The oracle's out and lse rounded to the dtypes of a forward, on the device of the case."""
        problem, values, device = self.case.problem, self._truth.values, self.case.device
        return Forward(
            out=values["out"].to(problem.torch_dtype).to(device),
            lse=values["lse"].to(problem.accumulate_dtype).to(device),
        )

    @cached_property
    def foreign(self) -> Scale:
        """For a backward from ``given``: dq, dk, dv ..."""
        truth = self._foreign_truth

        def run() -> dict[str, Tensor]:
            return run_backward(self.case, get(_YARDSTICK), self.given).tensors

        found = self._kept("foreign yardstick", run, on_device=True)
        return replace(self._scale(truth, found), foreign=True)

    def prepare(self, *, yardstick: bool, foreign: bool) -> None:
        """Run what the scales need, for the shelf.

        Args:
            yardstick: run it too; it is no use where the backends run on another device than this case.
            foreign: run what ``foreign`` needs too.
        """
        _ = self.own if yardstick else self._truth
        if foreign:
            _ = self.foreign if yardstick else self._foreign_truth

    def measure(self, name: str, tensor: Tensor, scale: Scale | None = None) -> list[budget.Row]:
        """A tensor against its budget, one row per (sequence, head) and one for what lies outside them."""
        scale = scale or self.own
        return budget.compare(
            self.case.problem,
            self.there.inputs,
            name,
            tensor.to(self.where),
            scale.values[name],
            scale.magnitudes[name],
            scale.yardstick[name],
            foreign=scale.foreign,
        )

    def apart(self, name: str, tensor: Tensor, other: Tensor) -> list[budget.Row]:
        """Two results of one thing against the budget of one; both may use theirs, so up to 2 is no difference."""
        scale, problem = self.own, self.case.problem
        drift = scale.yardstick[name].double() - scale.values[name]
        other = other.to(self.where).double()
        return budget.compare(
            problem,
            self.there.inputs,
            name,
            tensor.to(self.where),
            other,
            scale.magnitudes[name],
            torch.where(other.isfinite(), other + drift, other),
        )

    def is_plain(self, name: str, tensor: Tensor) -> Tensor:
        """Whether a tensor holds numbers only, and 0 where nothing contributes: then nothing sets it apart from itself.

        Args:
            name: of the tensor.
            tensor: a result, on the case's device.

        Returns:
            A bool on that device, so that the host can wait for several at once.
        """
        if name in budget.MINUS_INF:
            return (tensor < torch.inf).all()
        if name not in self._nothing:
            self._nothing[name] = (self.own.magnitudes[name].bound == 0).to(tensor.device)
        return (tensor.isfinite() & ~(self._nothing[name] & (tensor != 0))).all()

    @cached_property
    def _truth(self) -> _Truth:
        def evaluate() -> dict[str, Tensor]:
            forward, backward = oracle.evaluate(*self._arguments, device=self.where)
            values = {**dict(forward.items()), **dict(backward.items())}
            return _Truth(values, {**forward.magnitudes, **backward.magnitudes}).flat()

        return _Truth.of_flat(self._kept("truth", evaluate))

    @cached_property
    def _foreign_truth(self) -> _Truth:
        def evaluate() -> dict[str, Tensor]:
            given = self.given.out.to(self.where), self.given.lse.to(self.where)
            found = oracle.backward(*self._arguments, forward=given, device=self.where)
            return _Truth(dict(found.items()), found.magnitudes).flat()

        return _Truth.of_flat(self._kept("foreign truth", evaluate))

    def _run_yardstick(self) -> dict[str, Tensor]:
        forward = run_forward(self.case, get(_YARDSTICK))
        found = dict(forward.tensors)
        if isinstance(forward.returned, Forward):
            found |= run_backward(self.case, get(_YARDSTICK), forward.returned).tensors
        return found

    def _kept(
        self, what: str, make: Callable[[], dict[str, Tensor]], *, on_device: bool = False
    ) -> dict[str, Tensor]:
        """Results from the shelf, else made here; of a run on another device than the shelf's, only made."""
        if self._shelf is None or (on_device and self.where != self.case.device):
            return make()
        return self._shelf.kept(f"{self._name}: {what}", make)

    def _scale(self, truth: _Truth, found: Mapping[str, Tensor]) -> Scale:
        yardstick = {
            name: found[name].to(self.where) if name in found else torch.full_like(value, torch.nan)
            for name, value in truth.values.items()
        }
        return Scale(truth.values, truth.magnitudes, yardstick)

    @property
    def _arguments(self) -> tuple:
        case = self.there
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
