"""The measured budget: is a tensor as near to the oracle as its dtype allows, per (tensor, sequence, head)?

Four tests, each ``error <= 2 * (error of the yardstick on the same input) + c * eps * magnitude``; the
derivation and the calibration of every c are in ``verify/truth/README.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Inputs
from gradtruth.errors import InvalidProblem
from gradtruth.verify.truth.rounding import Magnitude, rounding_of
from gradtruth.verify.truth.scoring import Place, places

__all__ = [
    "MINUS_INF",
    "Norms",
    "Row",
    "Share",
    "Summary",
    "compare",
    "eps_of",
    "judge",
    "summarise",
]

_FACTOR = 2.0  # of the yardstick's error
_C_ELEMENT = 1.0  # of bound
_C_LINE = 0.8  # of spread, as are the next five
_C_NARROW = 1.2  # over the root of the number of elements in a row, added to _C_LINE
_C_RMS = 0.35
_C_FEW = 0.5  # over the root of the number of rows, added to _C_RMS
_C_APART = 0.7
_C_ALIGNED = 0.5
_C_SCATTER = 3.0  # of the yardstick's projections row by row, in quadrature
_C_COMMON = 0.5  # of eps: rows with equal values round alike
_C_SUMS = 8.0  # of the sums' eps: and so do their sums, which tensor cores truncate
_C_CUT = 16.0  # the same where sums are all that rounds, and are made of three products
_LIMIT = 4.0  # of eps * spread: for more than this no yardstick counts
_HUGE = 2.0**250  # of what is over this no squares are taken: each such element is judged alone
_WELL_ABOVE = 8.0  # cosine and norm ratio mean something over this many eps * spread

_QUERY_SIDE = ("out", "dq")
_KEY_SIDE = ("dk", "dv")
MINUS_INF = ("lse", "max_logit")  # where -inf is a value like 0 in the others, and fp32 at least


def eps_of(problem: Problem, name: str) -> float:
    """The eps in which the magnitudes of a tensor are counted; twice that for fp64, as the oracle rounds too."""
    rounding = rounding_of(problem)
    eps = rounding.unit * (rounding.ratio if name in MINUS_INF else 1.0)
    return 2.0 * eps if problem.dtype == "float64" else eps


class Share(NamedTuple):
    """What one test measured and what it allows."""

    measured: float
    allowed: float

    @property
    def used(self) -> float:
        """measured / allowed: at most 1 passes."""
        if self.measured == 0.0:
            return 0.0
        return self.measured / self.allowed if self.allowed > 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms over a part of a tensor.

    Attributes:
        oracle, got, error: of the oracle, of what was measured, of the difference.
        dot: <got, oracle>.
        floor: of eps * spread, the rounding that was to be expected.
        allowed: of the error that was allowed.
    """

    oracle: float
    got: float
    error: float
    dot: float
    floor: float
    allowed: float

    @staticmethod
    def of(parts: Iterable[Norms]) -> Norms:
        """Over all parts together."""
        parts = tuple(parts)
        roots = {
            name: math.hypot(*(getattr(part, name) for part in parts))
            for name in ("oracle", "got", "error", "floor", "allowed")
        }
        return Norms(dot=sum(part.dot for part in parts), **roots)

    @property
    def relative_l2(self) -> float:
        """|error| / |oracle|; inf where only the oracle is 0, 0 where both are."""
        return _ratio(self.error, self.oracle)

    @property
    def budget(self) -> float:
        """The relative L2 that was allowed."""
        return _ratio(self.allowed, self.oracle)

    @property
    def cosine(self) -> float | None:
        """Of the angle between result and oracle; None where the oracle is not well above rounding."""
        if not self._meaningful or self.got == 0.0:
            return None
        return self.dot / (self.got * self.oracle)

    @property
    def norm_ratio(self) -> float | None:
        """|got| / |oracle|; None where the oracle is not well above rounding."""
        return self.got / self.oracle if self._meaningful else None

    @property
    def _meaningful(self) -> bool:
        return self.oracle > _WELL_ABOVE * self.floor and math.isfinite(self.got)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tensor in one (sequence, head).

    Attributes:
        tensor: its name.
        sequence, head: None where the tensor is not split by them; both None for all places of a tensor
            that lie outside every sequence.
        element: the element with the largest share of its allowance.
        line: the norm of a row (a query or a key) in units of eps * spread of that row, the worst one.
        rms: root mean square over all elements.
        projection: <error, oracle> / <oracle, oracle>, the common factor that is wrong.
        norms: over all elements.
        broken: what no budget covers: NaN or Inf, or something where 0 (or -inf) is exact.
    """

    tensor: str
    sequence: int | None
    head: int | None
    element: Share
    line: Share
    rms: Share
    projection: Share
    norms: Norms
    broken: str = ""

    @property
    def used(self) -> float:
        """The largest share of a budget that was used up; inf for what no budget covers."""
        if self.broken:
            return math.inf
        return max(share.used for share in self._tests().values())

    @property
    def passed(self) -> bool:
        """Within every budget."""
        return self.used <= 1.0

    @property
    def finding(self) -> str:
        """What is wrong, in words; empty when nothing is."""
        if self.broken:
            return self.broken
        over = ((name, share) for name, share in self._tests().items() if share.used > 1.0)
        return ", ".join(f"{name} {s.measured:.3g} > {s.allowed:.3g}" for name, s in over)

    @property
    def resolution(self) -> float:
        """A result wrong by a common factor 1 + x is found for sure when |x| is over this."""
        if self.broken or self.norms.oracle == 0.0:
            return math.inf
        by_rms = (self.norms.allowed + self.norms.error) / self.norms.oracle
        return min(by_rms, self.projection.allowed + self.projection.measured)

    def _tests(self) -> dict[str, Share]:
        return {
            "element": self.element,
            "row": self.line,
            "rms": self.rms,
            "projection": self.projection,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """One tensor.

    Attributes:
        tensor: its name.
        norms: over the whole tensor.
        worst: the row that used most of its budget.
        rows: all of them.
    """

    tensor: str
    norms: Norms
    worst: Row
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Every row passed."""
        return self.worst.passed


def summarise(rows: Iterable[Row]) -> Summary:
    """The summary of one tensor's rows, at least one.

    Raises:
        InvalidProblem: there is no row.
    """
    rows = tuple(rows)
    if not rows:
        raise InvalidProblem("rows is empty, expected at least one")
    worst = max(rows, key=lambda row: row.used)
    return Summary(worst.tensor, Norms.of(row.norms for row in rows), worst, rows)


@dataclass(slots=True)
class _Part:
    """[heads, rows, dims] of a tensor in one sequence, clean: finite, and 0 where nothing contributes.

    Attributes:
        sequence: which.
        error, drift: of what was measured and of the yardstick; Inf for NaN in ``error``.
        oracle: its values.
        bound, floor: eps * bound, and eps * spread with what sums are cut off by.
        broken: per head, what no budget covers.
    """

    sequence: int | None
    error: Tensor
    drift: Tensor
    oracle: Tensor
    bound: Tensor
    floor: Tensor
    broken: list[str]


def compare(
    problem: Problem,
    inputs: Inputs,
    name: str,
    measured: Tensor,
    oracle: Tensor,
    magnitude: Magnitude,
    yardstick: Tensor,
    *,
    foreign: bool = False,
) -> list[Row]:
    """Judge one tensor.

    Args:
        problem: what was computed.
        inputs: its tensors; only what says where sequences lie is read.
        name: "out", "lse", "max_logit" or a field of ``Grads``.
        measured: the result, in the problem's layout.
        oracle, magnitude: from ``truth.oracle``, for the same (out, lse) if they were given.
        yardstick: the result of the ``unfused`` backend in the same dtype on the same input.
        foreign: (out, lse) were given: scores that are cut off have no lse beside them that is so too.

    Returns:
        One row per (sequence, head) that has places, and one for the places outside every sequence.

    Raises:
        InvalidProblem: shapes differ.
    """
    device = oracle.device
    tensors = [measured.detach(), oracle, yardstick.detach(), magnitude.bound, magnitude.spread]
    if any(t.shape != oracle.shape for t in tensors):
        shapes = ", ".join(str(list(t.shape)) for t in tensors)
        raise InvalidProblem(
            f"shapes of {name} (measured, oracle, yardstick, bound, spread) are {shapes}, expected equal"
        )
    tensors = [t.to(device, torch.float64) for t in tensors]
    where = places(problem, inputs)
    rows = []
    for sequence, parts in _split(problem, name, tensors, where):
        if parts[0].numel():
            independent = _independent(problem, name, where, sequence, parts[0].shape[1])
            rows += judge(problem, name, parts, sequence, independent, foreign=foreign)
    return rows + _outside(problem, name, tensors[0], where, _exact(name))


def judge(
    problem: Problem,
    name: str,
    parts: list[Tensor],
    sequence: int | None,
    independent: int,
    *,
    foreign: bool = False,
) -> list[Row]:
    """Judge some rows of one tensor in one sequence.

    Args:
        problem: what was computed.
        name: as for ``compare``.
        parts: fp64 [heads, rows, dims] each: measured, oracle, yardstick, bound, spread.
        sequence: for the answer.
        independent: how many of the rows at most have errors of their own.
        foreign: as for ``compare``.

    Returns:
        One row per head.
    """
    rounding, eps = rounding_of(problem), eps_of(problem, name)
    sums = (_C_CUT if rounding.cut else _C_SUMS) * rounding.unit * rounding.ratio
    known = _exact(name), _limit(problem, name)
    part = _clean(sequence, parts, (eps, rounding.cut), known)
    return _judge(name, part, (eps, sums, rounding.cut if foreign else 0.0), independent)


def _exact(name: str) -> float:
    """What a place holds to which nothing contributes."""
    return -math.inf if name in MINUS_INF else 0.0


def _split(
    problem: Problem, name: str, tensors: list[Tensor], where: list[Place]
) -> Iterator[tuple[int | None, list[Tensor]]]:
    """Per sequence, every tensor as [heads, rows, dims]."""
    layout = problem.layout
    if name == "dbias":
        for n in range(tensors[0].shape[0]):
            yield (n if tensors[0].shape[0] > 1 else None), [t[n] for t in tensors]
    elif name in ("lse", *_QUERY_SIDE, *_KEY_SIDE):
        for n, place in enumerate(where):
            row = 0 if layout == "thd" else n
            at = place.keys if name in _KEY_SIDE else place.queries
            if name == "lse":
                yield n, [canonical_lse(t, layout)[row, :, at].unsqueeze(-1) for t in tensors]
            else:
                yield n, [canonical(t, layout)[row, at].transpose(0, 1) for t in tensors]
    else:
        yield None, [t.view(-1, 1, 1) for t in tensors]


def _independent(
    problem: Problem, name: str, where: list[Place], sequence: int | None, rows: int
) -> int:
    """How many rows at most have errors of their own."""
    if name == "lse":
        return 1  # rows of equal scores round alike
    if name in _KEY_SIDE and sequence is not None:
        # delta and lse of one query err alike for all keys.
        return max(1, min(rows, where[sequence].length_q * problem.group_size))
    return rows


def _limit(problem: Problem, name: str) -> float:
    """The largest number of a result's dtype: for more, infinity is right. No limit where that is a fault."""
    if name not in MINUS_INF:
        return math.inf
    dtype = problem.accumulate_dtype if name == "lse" else torch.float32
    return torch.finfo(dtype).max


def _clean(
    sequence: int | None,
    parts: list[Tensor],
    scales: tuple[float, float],
    known: tuple[float, float],
) -> _Part:
    """Take what no budget covers out of the numbers.

    Args:
        sequence: which.
        parts: got, oracle, yardstick, bound, spread.
        scales: eps of the last two, and ``Rounding.cut``.
        known: what is exact where nothing contributes, and see ``_limit``.
    """
    (eps, cut), (exact, limit) = scales, known
    got, oracle, yardstick, bound, spread = (x.contiguous() for x in parts)
    nothing = bound == 0 if exact == 0.0 else oracle == exact
    error, drift = got - oracle, yardstick - oracle
    broken = [""] * got.shape[0]
    over = (oracle.abs() > limit) & ~nothing
    if bool(over.any()):
        infinite = got == torch.copysign(torch.full_like(oracle, math.inf), oracle)
        error = torch.where(over & infinite, 0.0, error)
    if bool(nothing.any()):
        oracle = oracle.masked_fill(nothing, 0.0)
        error = torch.where(nothing & (got == exact), 0.0, error)
        drift = drift.masked_fill(nothing, 0.0)
    if not bool(drift.isfinite().all()):
        # A yardstick that is no number allows nothing.
        drift = drift.nan_to_num(0.0, 0.0, 0.0)
    lost, stray = ~error.isfinite(), nothing & (got != exact)
    if bool((lost | stray).any()):
        broken = _reasons(lost & ~stray, stray, exact)
        error = error.nan_to_num(math.inf, math.inf, math.inf)
    floor = torch.hypot(spread, cut * bound) if cut else spread
    return _Part(sequence, error, drift, oracle, eps * bound, eps * floor, broken)


def _reasons(lost: Tensor, stray: Tensor, exact: float) -> list[str]:
    """Per head, in words."""
    reasons = []
    for losses, strays in zip(*(x.sum((1, 2)).tolist() for x in (lost, stray)), strict=True):
        found = [f"{losses} NaN or Inf"] if losses else []
        found += [f"{strays} not {exact:g} where nothing contributes"] if strays else []
        reasons.append(", ".join(found))
    return reasons


def _judge(
    name: str, part: _Part, scales: tuple[float, float, float], independent: int
) -> list[Row]:
    """The rows of one sequence, one per head; ``scales``: eps, of sums, and the share of bound by which all may err."""
    eps, sums, cut = scales
    error, drift, oracle, floor = _squarable(part)
    products = {
        "ee": (error, error),
        "yy": (drift, drift),
        "ff": (floor, floor),
        "oo": (oracle, oracle),
        "eo": (error, oracle),
        "yo": (drift, oracle),
    }
    by_line = {key: (x * y).sum(2) for key, (x, y) in products.items()}
    by_line["apart"] = (floor * oracle).square_().sum(2)
    aside = cut * part.bound if cut else torch.zeros_like(oracle[:, :, :1])
    by_line["cut"] = aside.square().sum(2)
    whole = {key: x.sum(1) for key, x in by_line.items()}
    rms = torch.minimum(_FACTOR * whole["yy"].sqrt(), _LIMIT * whole["ff"].sqrt())
    rms += (_C_RMS + _C_FEW / math.sqrt(independent)) * whole["ff"].sqrt()
    rms += sums * whole["oo"].sqrt()
    common = (_C_COMMON * eps + sums) * whole["oo"]
    common += (aside * oracle.abs()).sum((1, 2))
    # The result is the oracle plus the error.
    power = whole["oo"] + 2 * whole["eo"] + whole["ee"]
    columns = {
        "element": _element(part),
        "line": _line(by_line, error.shape[2]),
        "projection": _projection(by_line, whole, independent, common),
        "oracle": whole["oo"].sqrt(),
        "got": power.clamp(min=0).sqrt().nan_to_num(math.inf, math.inf),
        "error": whole["ee"].sqrt(),
        "dot": whole["oo"] + whole["eo"],
        "floor": whole["ff"].sqrt(),
        "allowed": rms,
    }
    columns = {key: x.tolist() for key, x in columns.items()}
    root = math.sqrt(error[0].numel())
    rows = []
    for h, reason in enumerate(part.broken):
        at = {key: column[h] for key, column in columns.items()}
        tests = {key: Share(*at.pop(key)) for key in ("element", "line", "projection")}
        tests["rms"] = Share(at["error"] / root, at["allowed"] / root)
        head = None if name == "dbias" and len(part.broken) == 1 else h
        norms, sequence = Norms(**at), part.sequence
        row = Row(tensor=name, sequence=sequence, head=head, norms=norms, broken=reason, **tests)
        rows.append(row)
    return rows


def _squarable(part: _Part) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """error, drift, oracle and floor, 0 where one of them is huge and a number."""
    found = (part.error, part.drift, part.oracle, part.floor)
    if all(float(x.nan_to_num(0.0, 0.0, 0.0).abs().max()) <= _HUGE for x in found):
        return found
    huge = torch.zeros_like(part.error, dtype=torch.bool)
    for x in found:
        huge |= (x.abs() > _HUGE) & x.isfinite()
    error, drift, oracle, floor = (x.masked_fill(huge, 0.0) for x in found)
    return error, drift, oracle, floor


def _element(part: _Part) -> Tensor:
    """[heads, 2]: error and allowance of the element with the largest share."""
    measured, size = part.error.abs().flatten(1), part.bound.flatten(1)
    usual = part.drift.abs().flatten(1).amax(1)
    most = torch.minimum(_FACTOR * usual, _LIMIT * size.amax(1))
    allowed = most.unsqueeze(1) + _C_ELEMENT * size
    worst = (measured / allowed).nan_to_num_(0.0).argmax(1, keepdim=True)
    return torch.cat((measured.gather(1, worst), allowed.gather(1, worst)), 1)


def _line(by_line: dict[str, Tensor], dims: int) -> Tensor:
    """[heads, 2]: the largest error norm of a row over its own floor, and its allowance."""
    size = by_line["ff"]
    measured, usual, cut = (
        torch.where(size > 0, by_line[key] / size, 0.0).amax(1).sqrt()
        for key in ("ee", "yy", "cut")
    )
    allowed = (_FACTOR * usual).clamp(max=_LIMIT) + _C_LINE + _C_NARROW / math.sqrt(dims) + cut
    return torch.stack((measured, allowed), 1)


def _projection(
    by_line: dict[str, Tensor], whole: dict[str, Tensor], independent: int, common: Tensor
) -> Tensor:
    """[heads, 2]: |<error, oracle>| / <oracle, oracle> and its allowance.

    Rounding errors of different rows are independent, so their projections add up in quadrature and the sum
    is small beside a common factor. Allowed are: the yardstick's own projection; its scatter from row to row;
    the scatter that the spread predicts for errors that are independent within a row too; in case few rows
    carry all the weight, errors that point along the oracle in a whole row; and, as equal rows have equal
    errors, a common share.

    Args:
        by_line: [heads, rows] of products.
        whole: the same summed over rows.
        independent: how many rows at most have errors of their own.
        common: [heads]: what all rows may err by together, times the oracle.
    """
    aligned = by_line["ff"] * by_line["oo"]
    total = aligned.sum(1)
    # The quadratic mean, over the root of the effective number of rows.
    few = (aligned.square().sum(1) / total).nan_to_num(0.0)
    few = torch.maximum(few, total / independent)
    counted = _FACTOR * whole["yo"].abs() + _C_SCATTER * by_line["yo"].norm(dim=1)
    counted = torch.minimum(counted, _LIMIT * total.sqrt())
    power = whole["oo"]
    allowed = counted + _C_APART * whole["apart"].sqrt() + _C_ALIGNED * few.sqrt()
    pair = torch.stack((whole["eo"].abs(), allowed + common), 1)
    pair = (pair / power.unsqueeze(1)).nan_to_num(math.inf, math.inf)
    # An oracle that is nothing but rounding has no direction.
    pair[power <= whole["ff"]] = torch.tensor([0.0, math.inf], dtype=pair.dtype, device=pair.device)
    return pair


def _outside(
    problem: Problem, name: str, measured: Tensor, where: list[Place], exact: float
) -> list[Row]:
    """One row for the places outside every sequence, if there are any."""
    if name not in (*_QUERY_SIDE, *_KEY_SIDE, "lse"):
        return []
    if name == "lse":
        rows = canonical_lse(measured, problem.layout).transpose(1, 2)
    else:
        rows = canonical(measured, problem.layout)
    outside = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
    for n, place in enumerate(where):
        row = 0 if problem.layout == "thd" else n
        outside[row, place.keys if name in _KEY_SIDE else place.queries] = False
    strays = int((rows[outside] != exact).sum())
    if not bool(outside.any()):
        return []
    none = Share(0.0, 0.0)
    error = math.inf if strays else 0.0
    return [
        Row(
            tensor=name,
            sequence=None,
            head=None,
            element=none,
            line=none,
            rms=none,
            projection=none,
            norms=Norms(oracle=0.0, got=error, error=error, dot=0.0, floor=0.0, allowed=0.0),
            broken=f"{strays} not {exact:g} outside every sequence" if strays else "",
        )
    ]


def _ratio(part: float, whole: float) -> float:
    if part == 0.0:
        return 0.0
    return part / whole if whole > 0.0 else math.inf
