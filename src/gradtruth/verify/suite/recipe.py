"""Recipe: how the tensors of a problem are made, as one string that reproduces them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Wanted
from gradtruth.errors import InvalidProblem
from gradtruth.verify.suite.arrangement import ARRANGEMENTS, DOUT_ARRANGEMENTS
from gradtruth.verify.suite.families import FAMILIES, noise

__all__ = ["POISONS", "Place", "Recipe", "default_places"]

Place = tuple[int, int, int, int]

POISONS: dict[str, float | None] = {
    "none": None,
    "nan": float("nan"),
    "inf": float("inf"),
    "large": 1e30,
}
_WANTED = tuple(f.name for f in fields(Wanted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A problem and everything that decides its tensors. Frozen, hashable, without tensors.

    Attributes:
        problem: what is computed. Its ``strides`` are found when the tensors are made.
        places: per sequence (start_q, length_q, start_kv, length_kv) in storage. () is ``default_places``.
        holes: a padding mask has hidden places inside the sequences.
        arrangement: how q, k, v, bias and attention_mask lie in memory.
        family: of the values.
        seed: of the values.
        poison: what stands in every place that must not matter.
        bias_inf: a tenth of the bias is -inf.
        dout: how dout lies in memory.
        dlse: lse has a gradient.
        wanted: names of the gradients that the backward is asked for.
    """

    problem: Problem
    places: tuple[Place, ...] = ()
    holes: bool = False
    arrangement: str = "contiguous"
    family: str = "heterogeneous"
    seed: int = 0
    poison: str = "none"
    bias_inf: bool = False
    dout: str = "contiguous"
    dlse: bool = False
    wanted: tuple[str, ...] = _WANTED

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                known = ", ".join(map(repr, allowed))
                raise InvalidProblem(f"{name} is {getattr(self, name)!r}, expected one of {known}")
        if self.problem.spec.lengths == "extents":
            raise InvalidProblem("problem is a tile, expected the whole that it is cut from")
        if self.places and len(self.places) != self.problem.batch:
            raise InvalidProblem(
                f"places has {len(self.places)} entries, expected one per sequence, {self.problem.batch}"
            )
        if set(self.wanted) - set(_WANTED):
            raise InvalidProblem(f"wanted is {self.wanted}, expected some of {_WANTED}")
        if self.dlse and not self.problem.spec.lse_grad:
            raise InvalidProblem("dlse is True, expected a Spec with lse_grad")

    @property
    def resolved_places(self) -> tuple[Place, ...]:
        """The places, the default ones when none are given."""
        return self.places or default_places(self.problem, self.seed)

    @property
    def outputs(self) -> Wanted:
        """The gradients asked for, as a backend takes them."""
        return Wanted(**{name: name in self.wanted for name in _WANTED})

    def encode(self) -> str:
        """The canonical string: JSON with sorted keys, defaults left out."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        kept: dict[str, Any] = {
            k: v for k, v in given.items() if k not in _DEFAULTS or v != _DEFAULTS[k]
        }
        kept["problem"] = json.loads(self.problem.encode())
        return json.dumps(kept, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def decode(text: str) -> Recipe:
        """The Recipe of a canonical string.

        Raises:
            InvalidProblem: not a JSON object of the known fields with legal values.
        """
        try:
            found: Any = json.loads(text)
            found["problem"] = Problem.decode(json.dumps(found["problem"]))
            for name in ("places", "wanted"):
                if name in found:
                    found[name] = tuple(tuple(x) if isinstance(x, list) else x for x in found[name])
            return Recipe(**found)
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise InvalidProblem(
                f"recipe is {text!r}, expected a JSON object with a problem: {error}"
            ) from error

    def label(self) -> str:
        """A short name: the problem's and what differs from the defaults."""
        parts = [self.problem.label(), self.family, f"seed{self.seed}"]
        parts += [f"{self.arrangement}"] * (self.arrangement != "contiguous")
        parts += [f"dout:{self.dout}"] * (self.dout != "contiguous")
        return " ".join(parts + ["dlse"] * self.dlse)


_DEFAULTS = {f.name: f.default for f in fields(Recipe) if f.name != "problem"}
_CHOICES = {
    "arrangement": ARRANGEMENTS,
    "family": tuple(FAMILIES),
    "poison": tuple(POISONS),
    "dout": DOUT_ARRANGEMENTS,
}


def default_places(problem: Problem, seed: int = 0) -> tuple[Place, ...]:
    """Where sequences lie when nothing says so: full, or ragged where the problem allows it.

    The first sequence is as long as its storage (thd: its share), the others are shorter.
    """
    B, S, T = problem.batch, problem.seqlen_q, problem.seqlen_kv
    thd = problem.layout == "thd"
    if problem.spec.lengths == "full" and not thd:
        return ((0, S, 0, T),) * B
    drawn = ((noise(seed + 77, 2, max(B, 1)) + 1.8) / 3.6).tolist()
    both = []
    for side, places in enumerate((S, T)):
        share = places // B if thd and B else places
        lengths = [share if n == 0 else int(drawn[side][n] * (share + 1)) for n in range(B)]
        lengths = [min(share, max(0, length)) for length in lengths]
        starts = [sum(lengths[:n]) if thd else 0 for n in range(B)]
        both.append((starts, lengths))
    (start_q, length_q), (start_kv, length_kv) = both
    return tuple(zip(start_q, length_q, start_kv, length_kv, strict=True))
