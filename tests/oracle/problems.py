"""Small random problems over every feature, each in two forms: gradtruth's and the scalar definition's."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch
from tests.oracle.scalar import Meaning, Side
from torch import Tensor

from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs

NAN = float("nan")


@dataclass
class Generated:
    problem: Problem
    inputs: Inputs
    meaning: Meaning
    dout: Tensor
    dlse: Tensor | None


def _draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _thd_side(rng, batch, longest):
    """Lengths (zero included), gaps between the slots, a tail."""
    lengths = [rng.choice([0, 1, rng.randint(0, longest)]) for _ in range(batch)]
    gapped = rng.random() < 0.5
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += length + (rng.randint(0, 2) if gapped else 0)
    sides = [Side(0, s, n) for s, n in zip(starts, lengths, strict=True)]
    cu = _cumulated(lengths)
    padded = torch.tensor([*starts, at], dtype=torch.int32) if gapped else None
    return sides, cu, padded, at + rng.randint(0, 3)


def _mask_side(rng, batch, places):
    """A padding mask with anything on the left, on the right and between."""
    mask = torch.tensor(
        [[rng.random() < 0.35 for _ in range(places)] for _ in range(batch)]
    ).reshape(batch, places)
    sides = []
    for n in range(batch):
        valid = [s for s in range(places) if not mask[n, s]]
        if not valid:
            sides.append(Side(n, 0, 0))
            continue
        start, length = valid[0], valid[-1] - valid[0] + 1
        hidden = frozenset(s for s in range(length) if bool(mask[n, start + s]))
        sides.append(Side(n, start, length, hidden))
    return sides, mask


def _poisoned(tensor: Tensor, sides: list[Side]) -> Tensor:
    """NaN at every place that belongs to no sequence or is hidden."""
    used = torch.zeros(tensor.shape[:2], dtype=torch.bool)
    for side in sides:
        for s in range(side.length):
            if s not in side.hidden:
                used[side.row, side.start + s] = True
    return torch.where(used.view(*used.shape, *[1] * (tensor.dim() - 2)), tensor, NAN)


def _stored(tensor: Tensor, layout: str) -> Tensor:
    if layout == "thd":
        return tensor[0]
    return tensor.transpose(0, 1).contiguous() if layout == "sbhd" else tensor


def _places(rng, layout, lengths, batch, longest):
    """Where sequences lie: sides, the tensors that say so, storage rows and places."""
    if layout == "thd":
        extra, sides, places = {}, [], []
        for side, most in zip(("q", "kv"), longest, strict=True):
            found, cu, padded, tokens = _thd_side(rng, batch, most)
            extra |= {f"cu_seqlens_{side}": cu, f"cu_seqlens_{side}_padded": padded}
            sides.append(found)
            places.append(tokens)
        return sides, extra, 1, places
    extra, sides = {}, [[Side(n, 0, p) for n in range(batch)] for p in longest]
    for at, (side, p) in enumerate(zip(("q", "kv"), longest, strict=True)):
        if lengths == "padding_mask":
            sides[at], extra[f"padding_mask_{side}"] = _mask_side(rng, batch, p)
        elif lengths == "cu_seqlens":
            used = [rng.randint(0, p) for _ in range(batch)]
            sides[at] = [Side(n, 0, u) for n, u in enumerate(used)]
            extra[f"cu_seqlens_{side}"] = _cumulated(used)
    return sides, extra, batch, longest


def _cumulated(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def _spec(rng, layout, lengths):
    left, right = rng.choice(
        [(None, None), (None, 0), (rng.randint(0, 3), 0), (rng.randint(0, 3), rng.randint(0, 3))]
    )
    return Spec(
        layout=layout,
        lengths=lengths,
        left=left,
        right=right,
        alignment=rng.choice(["top_left", "bottom_right"]),
        arbitrary=rng.random() < 0.3,
        scale=rng.choice([None, 0.7, -0.4]),
        softcap=rng.choice([None, None, 1.5]),
        bias=rng.choice(["none", "none", "pre_scale", "post_scale"]),
        alibi=rng.random() < 0.3,
        softmax=rng.choice(["vanilla", "off-by-one", "learnable"]),
        dropout_p=rng.choice([0.0, 0.0, 0.4, 1.0]),
        max_logit=rng.random() < 0.5,
        lse_grad=rng.random() < 0.5,
    )


def _terms(rng, generator, spec, sizes):
    """Bias, mask, slopes and sink that the Spec asks for; ``sizes`` is [B, H, S, T]."""
    shape = _table_shape(rng, sizes)
    batch, heads = sizes[:2]
    terms = {}
    if spec.arbitrary:
        terms["attention_mask"] = torch.rand(_table_shape(rng, sizes), generator=generator) < 0.3
    if spec.bias != "none":
        terms["bias"] = _draw(generator, *shape)
        # Under a softcap a pre-scale bias of -inf hides nothing.
        share = 0.2 if spec.bias == "post_scale" else 0.1 * (spec.softcap is not None)
        terms["bias"][torch.rand(shape, generator=generator) < share] = -torch.inf
    if spec.alibi:
        terms["alibi_slopes"] = _draw(generator, *rng.choice([(batch, heads), (heads,)])).abs()
    if spec.softmax == "learnable":
        terms["softmax_offset"] = _draw(generator, heads)
    return terms


def generate(seed: int) -> Generated:
    """The problem of a seed."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    layout = rng.choice(["bshd", "sbhd", "thd"])
    dense = ["full", "cu_seqlens", "padding_mask"]
    lengths = "cu_seqlens" if layout == "thd" else rng.choice(dense)
    batch, (heads, groups) = rng.randint(1, 3), rng.choice([(1, 1), (2, 1), (4, 2), (3, 3)])
    longest = [rng.randint(1, 6), rng.randint(1, 7)]
    dim, dim_v = rng.randint(1, 5), rng.randint(1, 5)
    sides, extra, rows, places = _places(rng, layout, lengths, batch, longest)
    size = 1.5 * torch.exp(_draw(generator, rows, 1, 1, 1))
    q = _poisoned(size * _draw(generator, rows, places[0], heads, dim), sides[0])
    k = _poisoned(_draw(generator, rows, places[1], groups, dim) + 0.3, sides[1])
    v = _poisoned(_draw(generator, rows, places[1], groups, dim_v) + 0.5, sides[1])
    spec = _spec(rng, layout, lengths)
    terms = _terms(rng, generator, spec, (batch, heads, *longest))
    dropout_seed = rng.randint(-(2**63), 2**63 - 1)
    zero = torch.zeros(heads, dtype=torch.float64)
    sink = {"vanilla": None, "off-by-one": zero}.get(spec.softmax, terms.get("softmax_offset"))
    meaning = Meaning(
        q=q,
        k=k,
        v=v,
        sides_q=sides[0],
        sides_kv=sides[1],
        scale=spec.scale if spec.scale is not None else dim**-0.5,
        left=spec.left,
        right=spec.right,
        bottom_right=spec.alignment == "bottom_right",
        softcap=spec.softcap,
        mask=terms.get("attention_mask"),
        bias=terms.get("bias"),
        bias_kind=spec.bias,
        slopes=terms.get("alibi_slopes"),
        sink=sink,
        dropout_p=spec.dropout_p,
        seed=dropout_seed % 2**64,
        by_storage=layout != "thd",
    )
    inputs = Inputs(
        q=_stored(q, layout),
        k=_stored(k, layout),
        v=_stored(v, layout),
        dropout_seed=torch.tensor(dropout_seed),
        **extra,
        **terms,
    )
    dout = _poisoned(_draw(generator, rows, places[0], heads, dim_v), sides[0])
    dlse = None
    if spec.lse_grad:
        dlse = _poisoned(_draw(generator, rows, places[0], heads), sides[0]).transpose(1, 2)
        dlse = dlse[0].t() if layout == "thd" else dlse
    return Generated(Problem.of(spec, inputs), inputs, meaning, _stored(dout, layout), dlse)


def _table_shape(rng, sizes):
    return tuple(rng.choice([1, size]) for size in sizes)
