"""examine: one attention call, looked at by laws in every head and by probes in some."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from gradtruth.core.layout import canonical
from gradtruth.errors import InvalidProblem
from gradtruth.verify.interception.call import Meaning
from gradtruth.verify.laws import Residual, residuals
from gradtruth.verify.probes import Found, Spot, probe_spot, spots, whole
from gradtruth.verify.truth.budget import Row
from gradtruth.verify.truth.scoring import Place, places

__all__ = ["Effort", "Wrong", "examine"]

_LAW_TENSORS = {"A": "dq, dk", "B": "out, dv", "C": "dk"}
_LAW_TEXTS = {
    "A": "<q, dq> = <k, dk>",
    "B": "<v, dv> = <out, dout>",
    "C": "sum of dk = what sink and lse take",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much of each call is looked at.

    Attributes:
        rows, columns: queries and keys that are probed per (sequence, KV head).
        heads: (sequence, KV head) that are probed per call.
        sequences: in whose every head the laws are looked at, per call.
        suspects: (sequence, KV head) per call that are computed whole where a law does not hold.

    Raises:
        InvalidProblem: a number that is no int, or negative.
    """

    rows: int = 8
    columns: int = 8
    heads: int = 1
    sequences: int = 8
    suspects: int = 2

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise InvalidProblem(f"{name} is {value!r}, expected an int, 0 or more")


@dataclass(frozen=True, slots=True)
class Wrong:
    """What is wrong with one tensor of a call; fields as in ``Finding``."""

    tensor: str
    sequence: int
    head: int
    places: int
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What an examination says.

    Attributes:
        wrong: per tensor.
        unconfirmed: laws that do not hold where every tensor is within its budget.
        not_reached: reasons why some of it was not looked at.
    """

    wrong: tuple[Wrong, ...] = ()
    unconfirmed: tuple[str, ...] = ()
    not_reached: tuple[str, ...] = ()


def examine(
    meaning: Meaning,
    tensors: Mapping[str, Tensor],
    upstream: tuple[Tensor, Tensor | None],
    effort: Effort,
    seed: str,
    *,
    coarse: bool = False,
) -> Answer:
    """Look at one call.

    A law costs next to nothing, so it is looked at in every head; where one does not hold, the head is computed as
    a whole, and that says which tensor is wrong. Where it was not known which weights dropout left out, nothing can
    be computed, and the law is all there is.

    Args:
        meaning: what was computed.
        tensors: out, lse, dq, dk, dv as far as they are known.
        upstream: dout and dlse.
        effort: how much is looked at.
        seed: of what is drawn; the global generators are left alone.
        coarse: see ``probes.Found``.
    """
    problem, inputs = meaning.problem, meaning.inputs
    where, drawing = places(problem, inputs), random.Random(seed)
    found, given = Found.of(tensors, coarse=coarse), dict(tensors)
    some = [n for n, place in enumerate(where) if place.length_q and place.length_kv]
    if effort.sequences < len(some):
        some = sorted(drawing.sample(some, effort.sequences))
    drawn: list[Spot] = []
    if meaning.known_dropout:
        drawn = spots(
            problem, where, rows=effort.rows, columns=effort.columns, heads=effort.heads, seed=seed
        )
    probed = [(s.sequence, probe_spot(problem, inputs, found, upstream, s)) for s in drawn]
    laws = list(residuals(problem, inputs, given, *upstream, sequences=some, coarse=coarse))
    # A NaN or Inf that comes in breaks the laws and whatever is probed: only then, or without laws, it is looked for.
    odd = {n for n, judged in probed if not all(row.passed for row in judged)}
    odd |= {each.sequence for each in laws if not each.holds}
    odd |= {n for n in some if n not in {each.sequence for each in laws}}
    why = {n: _unreadable(meaning, upstream, n, where[n]) for n in odd}
    rows = [row for n, judged in probed for row in judged if not why.get(n)]
    broken = [each for each in laws if not each.holds and not why[each.sequence]]
    reasons = tuple(sorted(set(filter(None, why.values()))))
    if not meaning.known_dropout:
        return Answer(tuple(_by_law(broken)), not_reached=reasons)
    unconfirmed = []
    for (n, g), off in _suspects(broken, effort.suspects):
        judged = probe_spot(problem, inputs, found, upstream, whole(where, n, g))
        rows += judged
        if all(row.passed for row in judged):
            unconfirmed += [_of_law(each) for each in off]
    return Answer(tuple(_by_tensor(rows)), tuple(unconfirmed), reasons)


def _unreadable(
    meaning: Meaning, upstream: tuple[Tensor, Tensor | None], n: int, place: Place
) -> str:
    """Which of its operands in a sequence is no number, so that nothing can be said of what comes of it."""
    layout, inputs = meaning.problem.layout, meaning.inputs
    row = 0 if layout == "thd" else n
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": upstream[0]}
    for name, tensor in given.items():
        side, at = ("kv", place.keys) if name in "kv" else ("q", place.queries)
        part = canonical(tensor, layout)[row, at]
        mask = None if layout == "thd" else getattr(inputs, f"padding_mask_{side}")
        if mask is not None:
            part = part[~mask[n, at]]
        if not bool(part.isfinite().all()):
            return f"{name} holds NaN or Inf: what follows from it is not judged"
    if inputs.bias is not None and bool(
        (inputs.bias.isnan() | (inputs.bias == float("inf"))).any()
    ):
        return "bias holds NaN or Inf: what follows from it is not judged"
    return ""


def _suspects(broken: list[Residual], most: int) -> list[tuple[tuple[int, int], list[Residual]]]:
    """The (sequence, KV head) whose laws are furthest off, with these laws."""
    found: dict[tuple[int, int], list[Residual]] = {}
    for each in broken:
        found.setdefault((each.sequence, each.head), []).append(each)
    return sorted(found.items(), key=lambda pair: -max(map(_excess, pair[1])))[:most]


def _excess(found: Residual) -> float:
    """How often the bound; inf for NaN."""
    share = found.value / found.bound if found.bound > 0 else float("inf")
    return share if share == share else float("inf")


def _by_law(broken: list[Residual]) -> Iterator[Wrong]:
    for law, tensor in _LAW_TENSORS.items():
        mine = [each for each in broken if each.law == law]
        if mine:
            worst = max(mine, key=_excess)
            yield Wrong(tensor, worst.sequence, worst.head, len(mine), _of_law(worst))


def _of_law(found: Residual) -> str:
    return (
        f"law {found.law}, {_LAW_TEXTS[found.law]}, is off by {found.value:.3g} > {found.bound:.3g}"
    )


def _by_tensor(rows: Iterable[Row]) -> Iterator[Wrong]:
    """One entry per tensor, about its worst place; the order is that of a forward and a backward."""
    rows = tuple(rows)
    for tensor in ("out", "lse", "dq", "dk", "dv"):
        bad = [row for row in rows if row.tensor == tensor and not row.passed]
        if bad:
            worst = max(bad, key=lambda row: row.used)
            many = len({(row.sequence, row.head) for row in bad})
            yield Wrong(tensor, worst.sequence or 0, worst.head or 0, many, worst.finding)
