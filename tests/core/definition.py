"""The contract in Python ints and loops: where sequences lie, what is visible, what every element is.

Written from the definition of the masks and lengths, not from the package, which these loops judge. The
one exception is ``pairs_of_tensors``: it reads a problem as a backend does, through ``resolve``.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from gradtruth.core.extents import resolve
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def int32(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


# ------------------------------------------------------------------ where a sequence is


def dense_place(cu: list[int], n: int, places: int) -> tuple[int, int]:
    """(start, length) of sequence n of a dense tensor with cu_seqlens."""
    return 0, clamp(cu[n + 1] - cu[n], 0, places)


def thd_place(cu: list[int], padded: list[int], n: int, tokens: int) -> tuple[int, int]:
    """(start, length) of sequence n of a thd tensor, whatever the content."""
    start = clamp(padded[n], 0, tokens)
    length = min(cu[n + 1] - cu[n], min(padded[n + 1], tokens) - start)
    return start, max(0, length)


def mask_place(hidden: list[bool]) -> tuple[int, int]:
    """(start, length) from first to last valid place; (0, 0) without a valid place."""
    valid = [place for place, masked in enumerate(hidden) if not masked]
    return (valid[0], valid[-1] - valid[0] + 1) if valid else (0, 0)


def band_shows(left: int | None, right: int | None, off: int, i: int, j: int) -> bool:
    """i + off - left <= j <= i + off + right, where None is unlimited."""
    return (left is None or i + off - left <= j) and (right is None or j <= i + off + right)


# ------------------------------------------------------------------ whole problems


@dataclass
class Case:
    """A problem in Python values, and its tensors. Every element of q, k, v, bias is a number of its own."""

    layout: str
    batch: int
    seqlen_q: int
    seqlen_kv: int
    heads: int
    groups: int
    lengths: str
    left: int | None
    right: int | None
    alignment: str
    rng: random.Random
    cu: dict[str, list[int]] = field(default_factory=dict)
    padded: dict[str, list[int] | None] = field(default_factory=dict)
    hidden: dict[str, list[list[bool]] | None] = field(default_factory=dict)
    bound: dict[str, int | None] = field(default_factory=dict)
    mask: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None

    def places(self, side: str) -> int:
        return self.seqlen_q if side == "q" else self.seqlen_kv

    def place(self, side: str, n: int) -> tuple[int, int]:
        if self.lengths == "full":
            start, length = 0, self.places(side)
        elif self.lengths == "padding_mask":
            hidden = self.hidden[side]
            start, length = (0, self.places(side)) if hidden is None else mask_place(hidden[n])
        elif self.layout == "thd":
            padded = self.padded[side]
            cu = self.cu[side]
            start, length = thd_place(cu, cu if padded is None else padded, n, self.places(side))
        else:
            start, length = dense_place(self.cu[side], n, self.places(side))
        bound = self.bound[side]
        return start, length if bound is None else min(length, bound)

    def diagonal(self, n: int) -> int:
        if self.alignment == "top_left":
            return 0
        return self.place("kv", n)[1] - self.place("q", n)[1]

    def is_hidden(self, side: str, n: int, place: int) -> bool:
        hidden = self.hidden.get(side)
        return hidden is not None and hidden[n][place]

    def visible(self, n: int, h: int, i: int, j: int) -> bool:
        start_q, start_kv = self.place("q", n)[0], self.place("kv", n)[0]
        if self.is_hidden("q", n, start_q + i) or self.is_hidden("kv", n, start_kv + j):
            return False
        if not band_shows(self.left, self.right, self.diagonal(n), i, j):
            return False
        return self.mask is None or not broadcast(self.mask, n, h, *self.indices(n, i, j))

    def indices(self, n: int, i: int, j: int) -> tuple[int, int]:
        """Row and column in bias and mask: by storage position, within the sequence for thd."""
        if self.layout == "thd":
            return i, j
        return self.place("q", n)[0] + i, self.place("kv", n)[0] + j

    def storage(self, side: str, n: int, i: int) -> tuple[int, int]:
        """(storage row, place) of element i of sequence n."""
        start = self.place(side, n)[0]
        return (0 if self.layout == "thd" else n), start + i

    def pairs(self) -> dict[tuple[int, int, int, int], tuple]:
        """What is visible: global (n, h, i, j) to everything that its score is made of."""
        found = {}
        for n in range(self.batch):
            length_q, length_kv = self.place("q", n)[1], self.place("kv", n)[1]
            for i in range(length_q):
                for j in range(length_kv):
                    for h in range(self.heads):
                        if self.visible(n, h, i, j):
                            found[n, h, i, j] = self.ingredients(n, h, i, j)
        return found

    def ingredients(self, n: int, h: int, i: int, j: int) -> tuple:
        g = h // (self.heads // self.groups)
        row, column = self.indices(n, i, j)
        return (
            element(self.inputs().q, self.layout, *self.storage("q", n, i), h),
            element(self.inputs().k, self.layout, *self.storage("kv", n, j), g),
            element(self.inputs().v, self.layout, *self.storage("kv", n, j), g),
            None if self.bias is None else broadcast(self.bias, n, h, row, column),
            None
            if self.slopes is None
            else slope(self.slopes, n, h) * abs(i + self.diagonal(n) - j),
        )

    def spec(self) -> Spec:
        return Spec(
            layout=self.layout,
            lengths=self.lengths,
            left=self.left,
            right=self.right,
            alignment=self.alignment,
            arbitrary=self.mask is not None,
            bias="none" if self.bias is None else "post_scale",
            alibi=self.slopes is not None,
        )

    def inputs(self) -> Inputs:
        if not hasattr(self, "_inputs"):
            self._inputs = self._make_inputs()
        return self._inputs

    def problem(self) -> Problem:
        return Problem.of(self.spec(), self.inputs(), self.bound["q"], self.bound["kv"])

    def _make_inputs(self) -> Inputs:
        first = 0
        tensors = {}
        for name, places, heads in (
            ("q", self.seqlen_q, self.heads),
            ("k", self.seqlen_kv, self.groups),
            ("v", self.seqlen_kv, self.groups),
        ):
            shape = {
                "bshd": (self.batch, places, heads, 1),
                "sbhd": (places, self.batch, heads, 1),
                "thd": (places, heads, 1),
            }[self.layout]
            count = torch.Size(shape).numel()
            tensors[name] = torch.arange(first, first + count, dtype=torch.float64).view(shape)
            first += count
        for side in ("q", "kv"):
            if self.lengths == "cu_seqlens":
                tensors[f"cu_seqlens_{side}"] = int32(self.cu[side])
                padded = self.padded[side]
                tensors[f"cu_seqlens_{side}_padded"] = None if padded is None else int32(padded)
            hidden = self.hidden.get(side)
            if hidden is not None:
                tensors[f"padding_mask_{side}"] = torch.tensor(hidden, dtype=torch.bool).view(
                    self.batch, self.places(side)
                )
        return Inputs(**tensors, attention_mask=self.mask, bias=self.bias, alibi_slopes=self.slopes)


def element(tensor: Tensor, layout: str, row: int, place: int, head: int) -> float:
    """The one number of (storage row, place, head)."""
    index = {"bshd": (row, place, head), "sbhd": (place, row, head), "thd": (place, head)}[layout]
    return tensor[index].item()


def broadcast(tensor: Tensor, *index: int) -> float | bool:
    """tensor[index], where a dim of size 1 holds for every index."""
    return tensor[
        tuple(0 if n == 1 else at for n, at in zip(tensor.shape, index, strict=True))
    ].item()


def slope(slopes: Tensor, n: int, h: int) -> float:
    return (slopes[n, h] if slopes.dim() == 2 else slopes[h]).item()


def pairs_of_tensors(problem: Problem, inputs: Inputs) -> dict[tuple[int, int, int, int], tuple]:
    """The same as ``Case.pairs`` for a problem and its tensors, a tile included, as a backend reads them."""
    extents = resolve(problem, inputs)
    at = {name: getattr(extents, name).tolist() for name in extents.__dataclass_fields__}
    layout, found = problem.layout, {}
    for n in range(problem.batch):
        row = 0 if layout == "thd" else n
        for i in range(at["length_q"][n]):
            place_q = at["start_q"][n] + i
            if inputs.padding_mask_q is not None and inputs.padding_mask_q[n, place_q]:
                continue
            for j in range(at["length_kv"][n]):
                place_kv = at["start_kv"][n] + j
                if inputs.padding_mask_kv is not None and inputs.padding_mask_kv[n, place_kv]:
                    continue
                diagonal = at["diagonal"][n]
                if not band_shows(problem.spec.left, problem.spec.right, diagonal, i, j):
                    continue
                where = (at["index_q"][n] + i, at["index_kv"][n] + j)
                for h in range(problem.num_heads):
                    mask, bias, slopes = inputs.attention_mask, inputs.bias, inputs.alibi_slopes
                    if mask is not None and broadcast(mask, n, h, *where):
                        continue
                    g = h // problem.group_size
                    name = (
                        at["sequence"][n],
                        at["head"][n] + h,
                        at["origin_q"][n] + i,
                        at["origin_kv"][n] + j,
                    )
                    found[name] = (
                        element(inputs.q, layout, row, place_q, h),
                        element(inputs.k, layout, row, place_kv, g),
                        element(inputs.v, layout, row, place_kv, g),
                        None if bias is None else broadcast(bias, n, h, *where),
                        None if slopes is None else slope(slopes, n, h) * abs(i + diagonal - j),
                    )
    return found


# ------------------------------------------------------------------ generated problems


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small problems of every layout, every way to give lengths, every broadcast of bias and mask."""
    layout = draw(st.sampled_from(["bshd", "sbhd", "thd"]))
    groups = draw(st.integers(1, 2))
    forms = ["cu_seqlens"] if layout == "thd" else ["full", "cu_seqlens", "padding_mask"]
    window = st.none() | st.integers(0, 3)
    bound = st.sampled_from([None, None, 0, 2, 100])
    case = Case(
        layout=layout,
        batch=draw(st.integers(0, 3)),
        seqlen_q=draw(st.integers(0, 5)),
        seqlen_kv=draw(st.integers(0, 5)),
        heads=groups * draw(st.integers(1, 2)),
        groups=groups,
        lengths=draw(st.sampled_from(forms)),
        left=draw(window),
        right=draw(window),
        alignment=draw(st.sampled_from(["top_left", "bottom_right"])),
        rng=random.Random(draw(st.integers(0, 2**32))),
        bound={"q": draw(bound), "kv": draw(bound)},
    )
    for side in ("q", "kv"):
        if case.lengths == "cu_seqlens":
            _give_lengths(draw, case, side)
        elif case.lengths == "padding_mask":
            rows = st.lists(st.booleans(), min_size=case.places(side), max_size=case.places(side))
            hidden = [draw(rows) for _ in range(case.batch)]
            case.hidden[side] = draw(st.sampled_from([hidden, hidden, None]))
    _give_bias_and_mask(draw, case)
    return case


def _give_lengths(draw: st.DrawFn, case: Case, side: str) -> None:
    places = case.places(side)
    if case.layout != "thd":
        lengths = draw(st.lists(st.integers(0, places), min_size=case.batch, max_size=case.batch))
        case.cu[side], case.padded[side] = cumulated(lengths), None
        return
    # Cut the storage into slots, the last of which may end before the tensor does (a tail).
    cuts = sorted(draw(st.lists(st.integers(0, places), min_size=case.batch, max_size=case.batch)))
    padded = [0, *cuts]
    if draw(st.booleans()):
        case.cu[side], case.padded[side] = padded, None
        return
    lengths = [draw(st.integers(0, b - a)) for a, b in itertools.pairwise(padded)]
    case.cu[side], case.padded[side] = cumulated(lengths), padded


def _give_bias_and_mask(draw: st.DrawFn, case: Case) -> None:
    if case.layout == "thd":
        longest = [
            max((case.place(s, n)[1] for n in range(case.batch)), default=0) for s in ("q", "kv")
        ]
    else:
        longest = [case.seqlen_q, case.seqlen_kv]
    full = (case.batch, case.heads, *longest)
    shape = st.tuples(*(st.sampled_from([1, n]) for n in full))
    if draw(st.booleans()):
        mask = draw(shape)
        hidden = [case.rng.random() < 0.3 for _ in range(torch.Size(mask).numel())]
        case.mask = torch.tensor(hidden, dtype=torch.bool).view(mask)
    if draw(st.booleans()):
        bias = draw(shape)
        case.bias = torch.arange(torch.Size(bias).numel(), dtype=torch.float64).view(bias) + 0.5
    kind = draw(st.sampled_from(["none", "heads", "batch"]))
    if kind != "none":
        slopes = torch.arange(1, case.batch * case.heads + case.heads + 1, dtype=torch.float32)
        case.slopes = slopes[: case.heads]
        if kind == "batch":
            case.slopes = slopes[: case.batch * case.heads].view(case.batch, case.heads)


def cumulated(lengths: list[int]) -> list[int]:
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found
