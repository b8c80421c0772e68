"""Small random problems, and what SEMANTICS calls their result: fp64, pair by pair, gradients by autograd.

Where sequences lie is drawn first and the tensors are made from it, so nothing here resolves lengths, slices
a mask or masks a tile as the package does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradtruth.core.dropout import keep_mask
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

NAN = float("nan")


@dataclass
class Place:
    """One side of one sequence: storage row, start, length, indices hidden inside."""

    row: int
    start: int
    length: int
    hidden: set[int] = field(default_factory=set)

    @property
    def seen(self) -> list[int]:
        return [i for i in range(self.length) if i not in self.hidden]


@dataclass
class Drawn:
    """A problem with tensors, NaN wherever nothing may matter, and where its sequences lie."""

    problem: Problem
    inputs: Inputs
    dout: Tensor
    dlse: Tensor | None
    places: list[tuple[Place, Place]]

    def backward(self, backend: Any, forward: Forward, wanted: Wanted | None = None) -> Grads:
        wanted = wanted or Wanted()
        return backend.backward(self.problem, self.inputs, forward, self.dout, self.dlse, wanted)


def draw(seed: int, **fixed: Any) -> Drawn:
    """A random problem. ``fixed`` sets what would be drawn: layout, lengths, dtype, sizes, features."""
    rng = random.Random(seed)

    def pick(name: str, *choices: Any) -> Any:
        chosen = rng.choice(choices)
        return fixed.get(name, chosen)

    layout = pick("layout", "bshd", "sbhd", "thd")
    lengths = (
        "cu_seqlens" if layout == "thd" else pick("lengths", "full", "cu_seqlens", "padding_mask")
    )
    sizes = _Sizes(
        B=pick("B", 1, 2, 3), S=pick("S", 1, 5, 9, 13), T=pick("T", 1, 4, 9, 17), H=pick("H", 2, 4, 6),
        G=pick("G", 1, 2), D=pick("D", 1, 4, 8), Dv=pick("Dv", 1, 3, 8),
    )  # fmt: skip
    dtype = fixed.get("dtype", torch.float64)
    softcap = pick("softcap", None, None, 1.5)
    spec = Spec(
        layout=layout,
        lengths=lengths,
        left=pick("left", None, None, 0, 2, 5),
        right=pick("right", None, 0, 0, 3),
        alignment=pick("alignment", "top_left", "bottom_right"),
        arbitrary=pick("arbitrary", False, False, True),
        scale=pick("scale", None, None, 0.4, -0.3),
        softcap=softcap,
        bias=pick("bias", "none", "none", "pre_scale", "post_scale"),
        alibi=pick("alibi", False, False, True),
        softmax=pick("softmax", "vanilla", "off-by-one", "learnable"),
        dropout_p=pick("dropout_p", 0.0, 0.0, 0.3, 1.0),
        max_logit=pick("max_logit", False, True),
        lse_grad=pick("lse_grad", False, True),
    )
    queries, storage_q = _draw_side(rng, spec, sizes.B, sizes.S)
    keys, storage_kv = _draw_side(rng, spec, sizes.B, sizes.T)
    places = list(zip(queries, keys, strict=True))
    noise = torch.Generator().manual_seed(seed)
    inputs = Inputs(
        **_attended(noise, spec, sizes, (queries, keys), (storage_q, storage_kv), dtype),
        **_given_lengths(rng, spec, queries, "q", storage_q),
        **_given_lengths(rng, spec, keys, "kv", storage_kv),
        **_terms(rng, noise, spec, sizes, places, dtype),
    )
    exact, loose = (sizes.S, sizes.T), (sizes.S + 2, sizes.T + 2)
    bounds = rng.choice([exact, loose, (None, None)]) if layout == "thd" else (None, None)
    problem = Problem.of(spec, inputs, *bounds)
    shape = _shape(layout, sizes.B, storage_q, sizes.H, sizes.Dv)
    dout = torch.randn(shape, generator=noise).double()
    _poison(_canonical(dout, layout), queries)
    dlse = None
    if spec.lse_grad:
        dlse = torch.full(_lse_shape(problem), NAN, dtype=problem.accumulate_dtype)
        for place in queries:
            for i in place.seen:
                lse_row(problem, dlse, place, i).copy_(torch.randn(sizes.H, generator=noise))
    return Drawn(problem, inputs, dout.to(dtype), dlse, places)


@dataclass
class _Sizes:
    B: int
    S: int
    T: int
    H: int
    G: int
    D: int
    Dv: int


def _draw_side(rng: random.Random, spec: Spec, B: int, longest: int) -> tuple[list[Place], int]:
    """Places of B sequences of at most ``longest``, and the storage places per row."""
    if spec.layout == "thd":
        found, at = [], rng.choice([0, 0, 2])
        for _ in range(B):
            length = rng.choice([0, 1, longest, rng.randint(0, longest)])
            found.append(Place(0, at, length))
            at += length + rng.choice([0, 0, 3])
        return found, at + rng.choice([0, 4])
    if spec.lengths == "full":
        return [Place(n, 0, longest) for n in range(B)], longest
    if spec.lengths == "cu_seqlens":
        return [
            Place(n, 0, rng.choice([0, longest, rng.randint(0, longest)])) for n in range(B)
        ], longest
    found = []
    for n in range(B):
        length = rng.randint(0, longest)
        inner = range(1, length - 1)
        hidden = {i for i in inner if rng.random() < 0.3} if rng.random() < 0.5 else set()
        found.append(Place(n, rng.randint(0, longest - length) if length else 0, length, hidden))
    return found, longest


def _shape(layout: str, B: int, places: int, heads: int, dim: int) -> tuple[int, ...]:
    if layout == "thd":
        return places, heads, dim
    return (B, places, heads, dim) if layout == "bshd" else (places, B, heads, dim)


def _canonical(tensor: Tensor, layout: str) -> Tensor:
    if layout == "thd":
        return tensor[None]
    return tensor if layout == "bshd" else tensor.transpose(0, 1)


def _poison(canonical: Tensor, side: list[Place]) -> None:
    """NaN at every place of [B', S, ...] that no sequence holds."""
    held = torch.zeros(canonical.shape[:2], dtype=torch.bool)
    for place in side:
        for i in place.seen:
            held[place.row, place.start + i] = True
    canonical[~held] = NAN


def _attended(
    noise: torch.Generator,
    spec: Spec,
    sizes: _Sizes,
    sides: tuple[list[Place], list[Place]],
    storage: tuple[int, int],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    found = {}
    for name, at, heads, dim in (
        ("q", 0, sizes.H, sizes.D),
        ("k", 1, sizes.G, sizes.D),
        ("v", 1, sizes.G, sizes.Dv),
    ):
        tensor = torch.randn(
            _shape(spec.layout, sizes.B, storage[at], heads, dim), generator=noise
        ).double()
        _poison(_canonical(tensor, spec.layout), sides[at])
        found[name] = tensor.to(dtype)
    return found


def _given_lengths(
    rng: random.Random, spec: Spec, side: list[Place], name: str, storage: int
) -> dict[str, Tensor]:
    if spec.lengths == "full":
        return {}
    if spec.lengths == "padding_mask":
        mask = torch.ones(len(side), storage, dtype=torch.bool)
        for place in side:
            mask[place.row, [place.start + i for i in place.seen]] = False
        return {f"padding_mask_{name}": mask}
    cu = torch.tensor([0, *(p.length for p in side)]).cumsum(0).int()
    given = {f"cu_seqlens_{name}": cu}
    if spec.layout == "thd":
        ends = [p.start for p in side[1:]] + [storage - rng.choice([0, 0, 1])]
        ends[-1] = max(ends[-1], side[-1].start + side[-1].length)
        given[f"cu_seqlens_{name}_padded"] = torch.tensor([side[0].start, *ends], dtype=torch.int32)
    return given


def _terms(
    rng: random.Random,
    noise: torch.Generator,
    spec: Spec,
    sizes: _Sizes,
    places: list[tuple[Place, Place]],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def shape() -> list[int]:
        return [rng.choice([1, size]) for size in (sizes.B, sizes.H, sizes.S, sizes.T)]

    if spec.bias != "none":
        bias = torch.randn(shape(), generator=noise).double()
        infinite = torch.rand(bias.shape, generator=noise) < 0.15
        if spec.bias == "post_scale" or (spec.softcap is not None and (spec.scale or 1) > 0):
            bias[infinite] = -torch.inf
        used = torch.zeros(bias.shape, dtype=torch.bool)
        for n, (queries, keys) in enumerate(places):
            for i in queries.seen:
                for j in keys.seen:
                    used[_at(spec, used, n, slice(None), queries, i, keys, j)] = True
        bias[~used] = NAN
        found["bias"] = bias.to(rng.choice([dtype, torch.float32]))
    if spec.arbitrary:
        found["attention_mask"] = torch.rand(shape(), generator=noise) < 0.3
    if spec.alibi:
        batched = rng.random() < 0.5
        found["alibi_slopes"] = torch.rand(
            (sizes.B, sizes.H) if batched else (sizes.H,), generator=noise
        )
    if spec.softmax == "learnable":
        found["softmax_offset"] = torch.randn(sizes.H, generator=noise)
    if spec.dropout_p:
        found["dropout_seed"] = torch.tensor(rng.getrandbits(62))
    return found


def _at(
    spec: Spec, tensor: Tensor, n: int, h: Any, queries: Place, i: int, keys: Place, j: int
) -> tuple[Any, ...]:
    """Where (n, h, i, j) is in bias or attention_mask: by storage place, for thd within the sequence."""
    offset_q, offset_kv = (0, 0) if spec.layout == "thd" else (queries.start, keys.start)
    wanted = (n, h, offset_q + i, offset_kv + j)
    return tuple(0 if size == 1 else at for at, size in zip(wanted, tensor.shape, strict=True))


def _lse_shape(problem: Problem) -> tuple[int, ...]:
    if problem.layout == "thd":
        return problem.seqlen_q, problem.num_heads
    return problem.batch, problem.num_heads, problem.seqlen_q


def lse_row(problem: Problem, lse: Tensor, place: Place, i: int) -> Tensor:
    """The [H] of query i."""
    return lse[place.start + i] if problem.layout == "thd" else lse[place.row, :, place.start + i]


# ---------------------------------------------------------------- the definition


def define(drawn: Drawn) -> dict[str, Tensor]:
    """out, lse, max_logit and all gradients in fp64, in the shapes that a backend returns."""
    problem, inputs, layout = drawn.problem, drawn.inputs, drawn.problem.layout
    leaves = {
        name: getattr(inputs, name).detach().double().requires_grad_()
        for name in ("q", "k", "v", "bias", "softmax_offset")
        if getattr(inputs, name) is not None
    }
    out = torch.zeros(*inputs.q.shape[:-1], problem.head_dim_v, dtype=torch.float64)
    lse = torch.full(_lse_shape(problem), -torch.inf, dtype=torch.float64)
    top = torch.full((problem.num_heads,), -torch.inf, dtype=torch.float64)
    objective = torch.zeros((), dtype=torch.float64)
    for n, (queries, keys) in enumerate(drawn.places):
        for h in range(problem.num_heads):
            for i in queries.seen:
                row = _row(drawn, leaves, n, h, queries, keys, i)
                if row is None:
                    continue
                value, logsum, largest = row
                place = queries.start + i
                _canonical(out, layout)[queries.row, place, h] = value.detach()
                lse_row(problem, lse, queries, i)[h] = logsum.detach()
                if largest is None:
                    continue
                top[h] = torch.maximum(top[h], largest)
                objective = (
                    objective
                    + value @ _canonical(drawn.dout, layout)[queries.row, place, h].double()
                )
                if drawn.dlse is not None:
                    objective = (
                        objective + logsum * lse_row(problem, drawn.dlse, queries, i)[h].double()
                    )
    grads = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    if objective.requires_grad:
        found = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
        for (name, leaf), grad in zip(leaves.items(), found, strict=True):
            grads[name] = torch.zeros_like(leaf) if grad is None else grad
    result = {"out": out, "lse": lse, **{f"d{name}": grad for name, grad in grads.items()}}
    if problem.spec.max_logit:
        result["max_logit"] = top
    return result


def _row(
    drawn: Drawn, leaves: dict[str, Tensor], n: int, h: int, queries: Place, keys: Place, i: int
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """out, lse and the largest score of one query of one head; None for lse where no key is visible."""
    problem, spec, layout = drawn.problem, drawn.problem.spec, drawn.problem.layout
    sink = None
    if spec.softmax == "off-by-one":
        sink = torch.zeros((), dtype=torch.float64)
    elif spec.softmax == "learnable":
        sink = leaves["softmax_offset"][h]
    visible = [j for j in keys.seen if _visible(drawn, n, h, queries, keys, i, j)]
    nothing = torch.zeros(problem.head_dim_v, dtype=torch.float64)
    if not visible:
        return None if sink is None else (nothing, sink, None)
    g = h // (problem.num_heads // problem.num_gqa_groups)
    at = [keys.start + j for j in visible]
    q = _canonical(leaves["q"], layout)[queries.row, queries.start + i, h]
    k = _canonical(leaves["k"], layout)[keys.row, at, g]
    v = _canonical(leaves["v"], layout)[keys.row, at, g]
    x = _score(drawn, leaves, k @ q, (n, h, queries, keys, i), visible)
    top = x.detach().max()
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    total = (x - top).exp().sum() + (0 if sink is None else (sink - top).exp())
    logsum = top + total.log()
    p = (x - logsum).exp()
    if spec.dropout_p:
        index = torch.tensor(visible)
        keep = keep_mask(
            spec.dropout_p, drawn.inputs.dropout_seed, *(torch.tensor(a) for a in (n, h, i)), index
        )
        p = p * keep / (1 - spec.dropout_p) if spec.dropout_p < 1 else p * 0
    return p @ v, logsum, x.detach().max()


def _score(
    drawn: Drawn,
    leaves: dict[str, Tensor],
    x: Tensor,
    at: tuple[int, int, Place, Place, int],
    visible: list[int],
) -> Tensor:
    """From q . k of one row to its final scores."""
    (n, h, queries, keys, i), spec = at, drawn.problem.spec
    bias = None
    if spec.bias != "none":
        index = [_at(spec, leaves["bias"], n, h, queries, i, keys, j) for j in visible]
        bias = torch.stack([leaves["bias"][where] for where in index])
    if spec.bias == "pre_scale":
        x = x + bias
    x = x * drawn.problem.scale
    if spec.softcap is not None:
        x = spec.softcap * torch.tanh(x / spec.softcap)
    if spec.bias == "post_scale":
        x = x + bias
    if spec.alibi:
        slopes = drawn.inputs.alibi_slopes
        slope = (slopes[n] if slopes.dim() == 2 else slopes)[h].double()
        off = _diagonal(spec, queries, keys)
        x = x - slope * torch.tensor([abs(i + off - j) for j in visible], dtype=torch.float64)
    return x


def _diagonal(spec: Spec, queries: Place, keys: Place) -> int:
    return keys.length - queries.length if spec.alignment == "bottom_right" else 0


def _visible(drawn: Drawn, n: int, h: int, queries: Place, keys: Place, i: int, j: int) -> bool:
    spec, inputs = drawn.problem.spec, drawn.inputs
    centre = i + _diagonal(spec, queries, keys)
    if spec.left is not None and j < centre - spec.left:
        return False
    if spec.right is not None and j > centre + spec.right:
        return False
    where = (n, h, queries, i, keys, j)
    if (
        inputs.attention_mask is not None
        and inputs.attention_mask[_at(spec, inputs.attention_mask, *where)]
    ):
        return False
    hides = spec.bias == "post_scale"
    return not (hides and inputs.bias[_at(spec, inputs.bias, *where)] == -torch.inf)
