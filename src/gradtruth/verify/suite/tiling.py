"""Tiling: a problem computed tile by tile with one backend and put together again, for any cuts.

What split-KV, context parallelism and the minimiser rest on: forwards of tiles merge to the whole, and the
backwards of tiles, from the whole's (out, lse), add up to the whole's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from gradtruth.backends import Backend
from gradtruth.core.extents import resolve
from gradtruth.core.layout import canonical, canonical_lse, stored
from gradtruth.core.merge import apply_sink, merge, sink_gradient
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Forward, Inputs
from gradtruth.core.tile import Range, tile
from gradtruth.verify.suite.inputs import Sample
from gradtruth.verify.suite.poison import valid_places

__all__ = ["Tile", "run_tiled", "tile_cover"]


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a problem.

    Attributes:
        problem, inputs: the part, as a problem of its own.
        sequences, heads, groups: which of the whole's sequences, query heads and KV heads it has.
    """

    problem: Problem
    inputs: Inputs
    sequences: slice
    heads: slice
    groups: slice

    @property
    def rows(self) -> slice:
        """Its storage rows in the canonical form of the whole."""
        return slice(None) if self.problem.layout == "thd" else self.sequences


def tile_cover(problem: Problem, inputs: Inputs, seed: int) -> Iterator[Tile]:
    """Tiles that cover every (sequence, head, query, key) once, cut at random places.

    Sequences and groups are cut at most once, queries and keys once or twice, at another place in every
    sequence; a part may be empty.
    """
    rng = random.Random(seed)
    where = resolve(problem, inputs)
    for first, last in _ranges(problem.batch, rng):
        queries = _cuts(where.length_q[first:last], rng)
        keys = _cuts(where.length_kv[first:last], rng)
        for groups in _ranges(problem.num_gqa_groups, rng):
            for query_range in queries:
                for key_range in keys:
                    part, given = tile(
                        problem,
                        inputs,
                        sequences=(first, last),
                        groups=groups,
                        queries=query_range,
                        keys=key_range,
                    )
                    heads = slice(groups[0] * problem.group_size, groups[1] * problem.group_size)
                    yield Tile(part, given, slice(first, last), heads, slice(*groups))


def _ranges(count: int, rng: random.Random) -> list[tuple[int, int]]:
    if count < 2 or rng.random() < 0.6:
        return [(0, count)]
    cut = rng.randint(1, count - 1)
    return [(0, cut), (cut, count)]


def _cuts(lengths: Tensor, rng: random.Random) -> list[Range]:
    """One or two cuts of every sequence at random places."""
    shares = sorted(rng.random() for _ in range(rng.choice((1, 1, 1, 2))))
    ends = [
        torch.tensor([round(share * n) + rng.randint(-2, 2) for n in lengths.tolist()]).clamp(min=0)
        for share in shares
    ]
    ends = [torch.minimum(end.to(lengths), lengths) for end in ends]
    for at in range(1, len(ends)):
        ends[at] = torch.maximum(ends[at], ends[at - 1])
    marks = [torch.zeros_like(lengths), *ends, lengths]
    return list(pairwise(marks))


def run_tiled(sample: Sample, backend: Backend, seed: int) -> dict[str, Tensor]:
    """Forward and backward of every tile of a cover, put together: all results by name.

    Args:
        sample: of any problem whose tiles the backend supports.
        backend: one that takes foreign (out, lse).
        seed: decides the cuts.
    """
    tiles = list(tile_cover(sample.problem, sample.inputs, seed))
    with torch.no_grad():
        results, bare_lse = _forward(sample, backend, tiles)
        return results | _backward(sample, backend, tiles, results, bare_lse)


def _forward(
    sample: Sample, backend: Backend, tiles: list[Tile]
) -> tuple[dict[str, Tensor], Tensor]:
    """out, lse and max_logit in their public forms, and [B', H, S] lse without the sink."""
    problem, inputs = sample.problem, sample.inputs
    layout, dtype = problem.spec.layout, problem.accumulate_dtype
    q = canonical(inputs.q, layout)
    B, S, H = q.shape[:3]
    out = torch.zeros((B, S, H, problem.head_dim_v), dtype=dtype, device=q.device)
    lse = torch.full((B, H, S), -torch.inf, dtype=dtype, device=q.device)
    top = torch.full((H,), -torch.inf, device=q.device)
    for part in tiles:
        found = backend.forward(part.problem, part.inputs)
        mine = out[part.rows, :, part.heads], lse[part.rows, part.heads]
        merged = merge(
            *mine, canonical(found.out, layout).to(dtype), canonical_lse(found.lse, layout)
        )
        for whole, new in zip(mine, merged, strict=True):
            whole.copy_(new)
        if found.max_logit is not None:
            top[part.heads] = torch.maximum(top[part.heads], found.max_logit)
    bare = lse
    if problem.spec.sink:
        out, lse = apply_sink(out, lse, _sink(problem, inputs), valid_places(problem, inputs)[0])
    results = {
        "out": stored(out, layout).to(problem.torch_dtype).contiguous(),
        "lse": lse[0].t() if layout == "thd" else lse,
    }
    return (results | {"max_logit": top} if problem.spec.max_logit else results), bare


def _sink(problem: Problem, inputs: Inputs) -> Tensor:
    given = inputs.softmax_offset
    return torch.zeros(problem.num_heads, device=inputs.q.device) if given is None else given


def _backward(
    sample: Sample,
    backend: Backend,
    tiles: list[Tile],
    results: dict[str, Tensor],
    bare_lse: Tensor,
) -> dict[str, Tensor]:
    inputs = sample.inputs
    wanted = replace(sample.wanted, dsoftmax_offset=False)
    total: dict[str, Tensor] = {}
    for part in tiles:
        forward, dout, dlse = _rows_of(sample, part, results)
        grads = backend.backward(part.problem, part.inputs, forward, dout, dlse, wanted)
        for name, grad in grads.items():
            like = getattr(inputs, name[1:])
            whole = total.setdefault(
                name, torch.zeros(like.shape, dtype=torch.float64, device=like.device)
            )
            _add(part, name, whole, grad)
    found = {name: grad.to(getattr(inputs, name[1:]).dtype) for name, grad in total.items()}
    if sample.wanted.dsoftmax_offset and inputs.softmax_offset is not None:
        found["dsoftmax_offset"] = _sink_gradient(sample, results, bare_lse)
    return found


def _rows_of(
    sample: Sample, part: Tile, results: dict[str, Tensor]
) -> tuple[Forward, Tensor, Tensor | None]:
    """out, lse, dout and dlse of the whole, cut down to a tile's sequences and heads."""
    layout = sample.problem.spec.layout

    def rows(tensor: Tensor) -> Tensor:
        return stored(canonical(tensor, layout)[part.rows, :, part.heads], layout)

    def line(lse: Tensor) -> Tensor:
        return lse[:, part.heads] if layout == "thd" else lse[part.rows, part.heads]

    forward = Forward(out=rows(results["out"]), lse=line(results["lse"]))
    return forward, rows(sample.dout), None if sample.dlse is None else line(sample.dlse)


def _add(part: Tile, name: str, whole: Tensor, grad: Tensor) -> None:
    if name == "dbias":
        sequences = part.sequences if whole.shape[0] > 1 else slice(None)
        whole[sequences, part.heads if whole.shape[1] > 1 else slice(None)] += grad.double()
        return
    layout = part.problem.spec.layout
    heads = part.heads if name == "dq" else part.groups
    canonical(whole, layout)[part.rows, :, heads] += canonical(grad, layout).double()


def _sink_gradient(sample: Sample, results: dict[str, Tensor], bare_lse: Tensor) -> Tensor:
    layout = sample.problem.spec.layout
    wide = sample.problem.accumulate_dtype
    product = canonical(sample.dout, layout).to(wide) * canonical(results["out"], layout).to(wide)
    delta = product.sum(-1).transpose(1, 2)
    if sample.dlse is not None:
        delta = delta - canonical_lse(sample.dlse, layout)
    lse = canonical_lse(results["lse"], layout)
    return sink_gradient(lse, delta, _sink(sample.problem, sample.inputs), bare_lse > -torch.inf)
