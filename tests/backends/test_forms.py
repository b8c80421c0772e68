"""Left-padded, right-padded and thd forms of the same batch give the same result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradtruth.backends import get
from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.verify.suite.conformance import judge, run, truth_of
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.recipe import Recipe
from gradtruth.verify.suite.suite import suite

CPU = torch.device("cpu")
CHUNKS = 4
SAME_BITS = ("reference", "unfused")
SLOW = ("flex",)  # traced anew for every problem: on the first two batches of a chunk
DENSE = [
    recipe
    for recipe in suite().recipes
    if recipe.problem.layout != "thd" and recipe.problem.spec.ragged and recipe.problem.batch > 1
][::12]


def forms(recipe: Recipe) -> dict[str, Recipe]:
    """The same batch left-padded, right-padded (mask and cu_seqlens) and as thd, with and without gaps."""
    lengths = [(place[1], place[3]) for place in recipe.resolved_places]
    longest = [max(pair[side] for pair in lengths) for side in (0, 1)]
    storage = [n + 3 for n in longest]
    plain = replace(recipe, arrangement="contiguous", holes=False)
    tokens = [sum(pair[side] for pair in lengths) for side in (0, 1)]

    def form(lengths_from, places, sizes, bounds, layout=None):
        problem = plain.problem
        spec = replace(
            problem.spec, lengths=lengths_from, layout=layout or problem.layout, packing="separate"
        )
        shapes = {
            name: None if shape is None else _own(shape, problem, bounds)
            for name, shape in (
                ("bias_shape", problem.bias_shape),
                ("mask_shape", problem.mask_shape),
            )
        }
        problem = replace(
            problem,
            spec=spec,
            seqlen_q=sizes[0],
            seqlen_kv=sizes[1],
            max_seqlen_q=None,
            max_seqlen_kv=None,
            **shapes,
        )
        return replace(plain, problem=problem, places=tuple(places))

    right = [(0, q, 0, kv) for q, kv in lengths]
    left = [(storage[0] - q if q else 0, q, storage[1] - kv if kv else 0, kv) for q, kv in lengths]
    packed = [(*_start(lengths, n, 0, 0), *_start(lengths, n, 1, 0)) for n in range(len(lengths))]
    gaps = [(*_start(lengths, n, 0, 5), *_start(lengths, n, 1, 5)) for n in range(len(lengths))]
    room = [n + 5 * len(lengths) for n in tokens]
    return {
        "right": form("padding_mask", right, storage, storage),
        "cu_seqlens": form("cu_seqlens", right, storage, storage),
        "left": form("padding_mask", left, storage, storage),
        "thd": form("cu_seqlens", packed, tokens, longest, "thd"),
        "thd gaps": form("cu_seqlens", gaps, room, longest, "thd"),
    }


def _start(lengths, n, side, gap):
    return sum(pair[side] + gap for pair in lengths[:n]) + gap // 2, lengths[n][side]


def _own(shape, problem, bounds):
    """A bias per sequence: one that is shared lies at storage places, which differ between the forms."""
    return (
        problem.batch,
        shape[1],
        *(1 if n == 1 else m for n, m in zip(shape[2:], bounds, strict=True)),
    )


def parts(recipe: Recipe, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the sequences hold, without what lies around them."""
    layout = recipe.problem.layout
    found = {}
    for n, (start_q, q, start_kv, kv) in enumerate(recipe.resolved_places):
        row = 0 if layout == "thd" else n
        rows, columns = slice(start_q, start_q + q), slice(start_kv, start_kv + kv)
        for name, tensor in results.items():
            if name == "lse":
                found[f"lse {n}"] = canonical_lse(tensor, layout)[row, :, rows]
            elif name in ("out", "dq", "dk", "dv"):
                found[f"{name} {n}"] = canonical(tensor, layout)[
                    row, columns if name in ("dk", "dv") else rows
                ]
            elif name == "dbias":
                at = [
                    slice(None) if size == 1 else where
                    for size, where in zip(
                        tensor.shape[2:],
                        (slice(q), slice(kv)) if layout == "thd" else (rows, columns),
                        strict=True,
                    )
                ]
                found[f"dbias {n}"] = tensor[n][:, at[0], at[1]]
            else:
                found[name] = tensor
    return found


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_form_of_a_batch_gives_the_same(chunk, backend_names):
    wrong = []
    for place, recipe in enumerate(DENSE[chunk::CHUNKS]):
        given = {name: (form, make(form)) for name, form in forms(recipe).items()}
        truth = {name: truth_of(sample) for name, (_, sample) in given.items()}
        for backend in map(get, backend_names):
            if backend.name in SLOW and place > 1:
                continue
            able = {
                name: pair
                for name, pair in given.items()
                if backend.supports(pair[1].problem, CPU).ok
            }
            found = {}
            for name, (form, sample) in able.items():
                claims = backend.claims(sample.problem, CPU)
                used = sample if claims.shielded else make(replace(form, poison="none"))
                results = run(used, backend, claims)
                found[name] = parts(form, results)
                rows = [
                    row
                    for key in results
                    for row in judge(used, truth[name], key, results[key], claims)
                ]
                wrong += [
                    f"{backend.name} {name} {form.label()}: {r.tensor} {r.finding}"
                    for r in rows
                    if not r.passed
                ]
            if backend.name in SAME_BITS:
                wrong += [
                    f"{backend.name} {name} {recipe.label()}: {key} has other bits than right-padded"
                    for name, tensors in found.items()
                    for key, tensor in tensors.items()
                    if not torch.equal(tensor, found["right"][key])
                ]
    assert not wrong, "\n".join([f"{len(wrong)} differ", *wrong[:12]])
