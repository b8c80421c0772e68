"""The suite: a generated list of recipes in which every pair of features of the contract meets."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import product

from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.verify.suite.cover import Cover, Row, Rule, cover
from gradtruth.verify.suite.recipe import Place, Recipe

__all__ = ["AXES", "BLOCK", "RULES", "Suite", "allowed", "build", "edges", "suite"]

BLOCK = 64  # rows and columns of a kernel's tile, as far as the suite's sizes are concerned
_LARGE = 3 * BLOCK + 1
_SEED = 20240229

_SHAPES = ["".join(letters) for letters in product("b1", "h1", "s1", "t1")]

AXES: dict[str, dict[str, float]] = {
    "layout": {"bshd": 3, "sbhd": 2, "thd": 3},
    "arrangement": {
        "contiguous": 5, "3hd": 1, "h3d": 1, "2hd": 1, "h2d": 1, "other_layout": 1, "expanded_heads": 1,
        "second_row": 1, "offset": 1, "wide": 1, "strided_last": 0.7,
    },
    "source": {"full": 3, "cu_seqlens": 4, "padding_mask": 2},
    "places": {
        "full": 4, "ragged": 4, "left": 1.5, "middle": 1, "holes": 1.5, "zeros": 1.5, "one": 0.7, "longer_q": 1,
        "longer_kv": 1, "gaps": 2, "tail": 1,
    },
    "hint": {"none": 5, "loose": 1, "clamp": 1},
    "size": {"small": 1, "blocks": 0.7},
    "batch": {"1": 1, "2": 2, "3": 1.5},
    "heads": {"1/1": 1, "3/3": 1, "2/1": 1.5, "4/2": 1.5, "6/2": 0.5, "8/1": 0.7},
    "dims": {
        "1": 0.3, "8": 1, "32": 1, "64": 1, "72": 0.7, "96": 0.7, "128": 1, "192": 0.5, "256": 0.7,
        "192/128": 0.5, "64/128": 0.5,
    },
    "dtype": {"bfloat16": 3.5, "float16": 2, "float32": 3.5, "float64": 1},
    "mask": {"full": 2, "causal": 3, "arbitrary": 1, "arbitrary_causal": 1},
    "mask_shape": {"-": 40, **dict.fromkeys(_SHAPES, 1)},
    "window": {"none": 4, "w,0": 1, "w,w": 1, "0,0": 0.3, "-1,w": 0.7, "w,-1": 0.7},
    "alignment": {"top_left": 1, "bottom_right": 1.5},
    "bias": {"none": 4, "pre_scale": 1.2, "post_scale": 2},
    "bias_shape": {"-": 24, **dict.fromkeys(_SHAPES, 1)},
    "bias_dtype": {"input": 1, "float32": 1},
    "bias_inf": {"no": 2, "yes": 1},
    "alibi": {"none": 4, "H": 1, "BH": 1},
    "softmax": {"vanilla": 3, "off-by-one": 1, "learnable": 1.5},
    "softcap": {"none": 4, "1.5": 1, "30": 1},
    "scale": {"default": 4, "0.3": 1, "-0.2": 0.5},
    "dropout": {"0": 6, "0.1": 1, "0.5": 1, "1": 0.1},
    "max_logit": {"no": 3, "yes": 1},
    "dlse": {"no": 2, "yes": 1},
    "dout": {
        "contiguous": 4, "other_layout": 1, "second_row": 0.7, "offset": 0.7, "wide": 0.5, "strided_last": 0.5,
        "expanded_heads": 0.7, "expanded_all": 0.5,
    },
    "wanted": {"all": 6, "dq": 0.4, "dk": 0.4, "dv": 0.4, "dk,dv": 0.4, "dq,dbias": 0.4, "dsoftmax_offset": 0.3},
    "family": {
        "heterogeneous": 4, "outlier": 1, "peaked": 1, "large_offset": 0.7, "repeated_keys": 0.7, "gaussian": 0.2,
    },
    "poison": {"nan": 4, "inf": 1, "large": 1},
}  # fmt: skip
"""Every axis of the suite: its values, and how often the random part of the cover takes them."""

_MASK_PLACES = ("left", "middle", "holes")
_SELF = ("3hd", "h3d")
_PACKED = (*_SELF, "2hd", "h2d")

RULES: tuple[Rule, ...] = (
    ("layout", "source", lambda a, b: a != "thd" or b == "cu_seqlens"),
    ("layout", "places", lambda a, b: b not in _MASK_PLACES if a == "thd" else b != "gaps"),
    ("source", "places", lambda a, b: a != "full" or b in ("full", "one", "longer_q", "longer_kv")),
    ("source", "places", lambda a, b: a != "cu_seqlens" or b not in _MASK_PLACES),
    ("source", "hint", lambda a, b: a != "full" or b == "none"),
    ("arrangement", "heads", lambda a, b: a not in _SELF or b in ("1/1", "3/3")),
    ("arrangement", "heads", lambda a, b: a != "expanded_heads" or b in ("3/3", "4/2", "6/2")),
    ("arrangement", "dims", lambda a, b: a not in _PACKED or "/" not in b),
    (
        "arrangement",
        "places",
        lambda a, b: a not in _SELF or b not in ("one", "longer_q", "longer_kv"),
    ),
    ("size", "heads", lambda a, b: a != "blocks" or b != "8/1"),
    ("size", "places", lambda a, b: a != "blocks" or b != "one"),
    ("mask", "mask_shape", lambda a, b: a.startswith("arbitrary") == (b != "-")),
    ("mask", "window", lambda a, b: not a.endswith("causal") or b not in ("w,w", "-1,w")),
    ("bias", "bias_shape", lambda a, b: (a != "none") == (b != "-")),
    ("bias", "bias_dtype", lambda a, b: a != "none" or b == "input"),
    ("bias", "bias_inf", lambda a, b: a != "none" or b == "no"),
    ("bias_inf", "scale", lambda a, b: a == "no" or not b.startswith("-")),  # -inf * -1 is +inf
    ("bias", "wanted", lambda a, b: a != "none" or "dbias" not in b),
    ("softmax", "wanted", lambda a, b: a == "learnable" or b != "dsoftmax_offset"),
)
"""What cannot be combined, or would say nothing new."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The recipes and what they cover."""

    recipes: tuple[Recipe, ...]
    cover: Cover


@cache
def suite(count: int = 1600) -> Suite:
    """The conformance suite: a pairwise cover of ``AXES``, then random rows, then the edges.

    Args:
        count: least number of covering rows.
    """
    found = cover(AXES, RULES, count, _SEED)
    recipes = tuple(build(row, at) for at, row in enumerate(found.rows))
    return Suite((*recipes, *edges()), found)


def allowed(row: Row, axis: str) -> list[str]:
    """The values of an axis that no rule forbids beside the values that a row already has."""
    return [
        value
        for value in AXES[axis]
        if all(
            rule(value, row[b]) if a == axis else rule(row[a], value)
            for a, b, rule in RULES
            if (a == axis and b in row) or (b == axis and a in row)
        )
    ]


def build(row: Row, seed: int) -> Recipe:
    """The recipe of one row of the cover.

    Args:
        row: a value of every axis.
        seed: decides sizes, lengths, windows and values.
    """
    rng = random.Random(_SEED + seed)
    S, T, places = _places(row, rng)
    B = len(places)
    num_heads, num_gqa_groups = map(int, row["heads"].split("/"))
    head_dim_qk, _, head_dim_v = row["dims"].partition("/")
    longest = [max(place[side] for place in places) for side in (1, 3)]
    hints = [_hint(row, length, rng) for length in longest]
    bounds = [S, T]
    if row["layout"] == "thd":
        bounds = [
            length if hint is None else hint for length, hint in zip(longest, hints, strict=True)
        ]
    full = {"b": B, "h": num_heads, "s": bounds[0], "t": bounds[1], "1": 1}
    bias, mask = row["bias_shape"], row["mask_shape"]
    problem = Problem(
        spec=_spec(row, rng, min(longest)),
        batch=B,
        seqlen_q=S,
        seqlen_kv=T,
        num_heads=num_heads,
        num_gqa_groups=num_gqa_groups,
        head_dim_qk=int(head_dim_qk),
        head_dim_v=int(head_dim_v or head_dim_qk),
        dtype=row["dtype"],
        max_seqlen_q=hints[0],
        max_seqlen_kv=hints[1],
        bias_shape=None if bias == "-" else tuple(full[x] for x in bias),  # type: ignore[arg-type]
        bias_dtype=None
        if bias == "-"
        else (row["dtype"] if row["bias_dtype"] == "input" else "float32"),
        mask_shape=None if mask == "-" else tuple(full[x] for x in mask),  # type: ignore[arg-type]
        slopes_batched=row["alibi"] == "BH",
    )
    # All weights of a row can be 0 here without a key being hidden: what its dlse adds to dsink is not defined.
    weightless = (row["bias_inf"], row["bias"], row["softcap"]) == ("yes", "pre_scale", "none")
    dlse = row["dlse"] == "yes" and not (weightless and row["softmax"] == "learnable")
    wanted = ("dq", "dk", "dv", "dbias", "dsoftmax_offset")
    return Recipe(
        problem=problem,
        places=places,
        holes=row["places"] == "holes",
        arrangement=row["arrangement"],
        family=row["family"],
        seed=seed,
        poison=row["poison"],
        bias_inf=row["bias_inf"] == "yes",
        dout=row["dout"],
        dlse=dlse,
        wanted=wanted if row["wanted"] == "all" else tuple(row["wanted"].split(",")),
    )


def _spec(row: Row, rng: random.Random, shorter: int) -> Spec:
    def bound(code: str) -> int | None:
        if code == "w":
            return rng.randint(1, max(1, shorter // 2))
        return None if code == "-1" else int(code)

    left, right = (None, None) if row["window"] == "none" else map(bound, row["window"].split(","))
    return Spec(
        layout=row["layout"],  # type: ignore[arg-type]
        packing=row["arrangement"] if row["arrangement"] in _PACKED else "separate",  # type: ignore[arg-type]
        lengths=row["source"],  # type: ignore[arg-type]
        left=left,
        right=0 if row["mask"].endswith("causal") else right,
        alignment=row["alignment"],  # type: ignore[arg-type]
        arbitrary=row["mask"].startswith("arbitrary"),
        scale=None if row["scale"] == "default" else float(row["scale"]),
        softcap=None if row["softcap"] == "none" else float(row["softcap"]),
        bias=row["bias"],  # type: ignore[arg-type]
        alibi=row["alibi"] != "none",
        softmax=row["softmax"],  # type: ignore[arg-type]
        dropout_p=float(row["dropout"]),
        max_logit=row["max_logit"] == "yes",
        lse_grad=row["dlse"] == "yes",
    )


def _hint(row: Row, longest: int, rng: random.Random) -> int | None:
    if row["hint"] == "none":
        return None
    if row["hint"] == "loose":
        return longest + rng.randint(1, 70)
    least = _LARGE if row["size"] == "blocks" and longest >= _LARGE else 1
    return max(least, longest - rng.randint(1, 5))


def _places(row: Row, rng: random.Random) -> tuple[int, int, tuple[Place, ...]]:
    """Storage places S and T, and per sequence where it lies."""
    B = int(row["batch"])
    one_tensor = row["arrangement"] in _SELF
    lengths = _sequence_lengths(row, B, rng)
    if row["layout"] == "thd":
        sides = [_packed_starts(row, [pair[side] for pair in lengths], rng) for side in (0, 1)]
        if one_tensor:
            lengths = [(q, q) for q, _ in lengths]
            sides[1] = sides[0]
    else:
        storage = [max(pair[side] for pair in lengths) for side in (0, 1)]
        if one_tensor:
            storage = [max(storage)] * 2
            if row["source"] == "full":
                lengths = [(storage[0], storage[0])] * B
        if row["source"] != "full" and row["places"] not in ("full", "one"):
            extra = rng.randint(BLOCK, BLOCK + 9) if row["places"] == "tail" else rng.randint(1, 12)
            storage = [n + extra for n in storage]
        sides = [
            ([_dense_start(row, storage[side], pair[side], rng) for pair in lengths], storage[side])
            for side in (0, 1)
        ]
    (start_q, S), (start_kv, T) = sides
    return (
        S,
        T,
        tuple(
            (at_q, q, at_kv, kv)
            for at_q, at_kv, (q, kv) in zip(start_q, start_kv, lengths, strict=True)
        ),
    )


def _sequence_lengths(row: Row, B: int, rng: random.Random) -> list[tuple[int, int]]:
    kind = row["places"]

    def long() -> int:
        return rng.randint(_LARGE, _LARGE + 16) if row["size"] == "blocks" else rng.randint(2, 96)

    q = long()
    first = (q, q if rng.random() < 0.5 else long())
    if kind == "full":
        return [first] * B
    if kind in ("longer_q", "longer_kv"):
        short = long() if row["size"] == "blocks" else rng.randint(1, 60)
        pairs = [
            (short + rng.randint(1, 70), max(1, short - n * rng.randint(0, short)))
            for n in range(B)
        ]
        pairs = [pairs[0]] * B if row["source"] == "full" else pairs
        return pairs if kind == "longer_q" else [(kv, q) for q, kv in pairs]
    if kind == "one":
        choices = [(1, 1), (1, first[1]), (first[0], 1)]
        if row["source"] == "full":
            return [rng.choice(choices)] * B
        return [choices[(n + B) % 3] for n in range(B)]
    rest = [(rng.randint(1, first[0]), rng.randint(1, first[1])) for _ in range(B - 1)]
    pairs = [first, *rest]
    if kind == "zeros":
        for n in range(min(1, B - 1), B):
            q, kv = pairs[n]
            pairs[n] = rng.choice(
                [(0, kv), (q, 0), (0, 0)] if n > 1 or B == 1 else [(0, kv), (q, 0)]
            )
    rng.shuffle(pairs)
    return pairs


def _packed_starts(row: Row, lengths: list[int], rng: random.Random) -> tuple[list[int], int]:
    """Starts of thd sequences, and all tokens."""
    starts, at = [], 0
    for length in lengths:
        if row["places"] == "gaps":
            at += rng.randint(0, 20)
        starts.append(at)
        at += length
    if row["places"] == "gaps":
        at += rng.randint(1, 20)
    return starts, at + (rng.randint(BLOCK, BLOCK + 9) if row["places"] == "tail" else 0)


def _dense_start(row: Row, storage: int, length: int, rng: random.Random) -> int:
    if length == 0:
        return 0
    if row["places"] == "left":
        return storage - length
    if row["places"] in ("middle", "holes"):
        return rng.randint(0, storage - length)
    return 0


def edges() -> tuple[Recipe, ...]:
    """Problems with nothing in them: no sequence, no query, no key, no token."""
    found = []
    sizes = [(0, 8, 8), (2, 0, 8), (2, 8, 0), (2, 0, 0), (1, 1, 1)]
    for at, (layout, (batch, S, T)) in enumerate(product(("bshd", "sbhd", "thd"), sizes)):
        thd = layout == "thd"
        spec = Spec(
            layout=layout,  # type: ignore[arg-type]
            lengths="cu_seqlens" if thd else "full",
            right=0 if at % 2 else None,
            softmax="learnable" if at % 3 == 0 else "vanilla",
        )
        problem = Problem(
            spec=spec,
            batch=batch,
            seqlen_q=S * (batch if thd else 1),
            seqlen_kv=T * (batch if thd else 1),
            num_heads=2,
            num_gqa_groups=1,
            head_dim_qk=32,
            head_dim_v=32,
            dtype="float32",
        )
        places = tuple((n * S * thd, S, n * T * thd, T) for n in range(batch))
        found.append(Recipe(problem=problem, places=places, seed=at, poison="nan"))
    return tuple(found)
