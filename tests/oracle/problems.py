"""Small random problems over every feature, each in two forms: gradtruth's and the scalar definition's."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from tests.oracle.scalar import Meaning, Side

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
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    padded = torch.tensor([*starts, at], dtype=torch.int32) if gapped else None
    return sides, cu, padded, at + rng.randint(0, 3)


def _mask_side(rng, batch, places):
    """A padding mask with anything on the left, on the right and between."""
    mask = torch.tensor([[rng.random() < 0.35 for _ in range(places)] for _ in range(batch)]).reshape(batch, places)
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


def generate(seed: int) -> Generated:
    """The problem of a seed."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    layout = rng.choice(["bshd", "sbhd", "thd"])
    lengths = "cu_seqlens" if layout == "thd" else rng.choice(["full", "cu_seqlens", "padding_mask"])
    batch, (heads, groups) = rng.randint(1, 3), rng.choice([(1, 1), (2, 1), (4, 2), (3, 3)])
    longest_q, longest_kv = rng.randint(1, 6), rng.randint(1, 7)
    dim, dim_v = rng.randint(1, 5), rng.randint(1, 5)
    extra: dict[str, Tensor] = {}
    if layout == "thd":
        sides, places = [], []
        for side, longest in (("q", longest_q), ("kv", longest_kv)):
            found, cu, padded, tokens = _thd_side(rng, batch, longest)
            extra[f"cu_seqlens_{side}"] = cu
            if padded is not None:
                extra[f"cu_seqlens_{side}_padded"] = padded
            sides.append(found)
            places.append(tokens)
        rows = 1
    else:
        rows, places = batch, [longest_q, longest_kv]
        sides = [[Side(n, 0, p) for n in range(batch)] for p in places]
        for at, (side, p) in enumerate(zip(("q", "kv"), places, strict=True)):
            if lengths == "padding_mask":
                sides[at], extra[f"padding_mask_{side}"] = _mask_side(rng, batch, p)
            elif lengths == "cu_seqlens":
                used = [rng.randint(0, p) for _ in range(batch)]
                sides[at] = [Side(n, 0, u) for n, u in enumerate(used)]
                cu = [0, *torch.tensor(used).cumsum(0).tolist()]
                extra[f"cu_seqlens_{side}"] = torch.tensor(cu, dtype=torch.int32)
    size = 1.5 * torch.exp(_draw(generator, rows, 1, 1, 1))
    q = _poisoned(size * _draw(generator, rows, places[0], heads, dim), sides[0])
    k = _poisoned(_draw(generator, rows, places[1], groups, dim) + 0.3, sides[1])
    v = _poisoned(_draw(generator, rows, places[1], groups, dim_v) + 0.5, sides[1])
    shape = _table_shape(rng, batch, heads, [longest_q, longest_kv])
    left, right = rng.choice([(None, None), (None, 0), (rng.randint(0, 3), 0), (rng.randint(0, 3), rng.randint(0, 3))])
    bias_kind = rng.choice(["none", "none", "pre_scale", "post_scale"])
    softmax = rng.choice(["vanilla", "off-by-one", "learnable"])
    spec = Spec(
        layout=layout,
        lengths=lengths,
        left=left,
        right=right,
        alignment=rng.choice(["top_left", "bottom_right"]),
        arbitrary=rng.random() < 0.3,
        scale=rng.choice([None, 0.7, -0.4]),
        softcap=rng.choice([None, None, 1.5]),
        bias=bias_kind,
        alibi=rng.random() < 0.3,
        softmax=softmax,
        dropout_p=rng.choice([0.0, 0.0, 0.4, 1.0]),
        max_logit=rng.random() < 0.5,
        lse_grad=rng.random() < 0.5,
    )
    if spec.arbitrary:
        extra["attention_mask"] = torch.rand(_table_shape(rng, batch, heads, [longest_q, longest_kv]), generator=generator) < 0.3
    if bias_kind != "none":
        bias = _draw(generator, *shape)
        if bias_kind == "post_scale":
            bias[torch.rand(shape, generator=generator) < 0.2] = -torch.inf
        elif spec.softcap is not None:
            bias[torch.rand(shape, generator=generator) < 0.1] = -torch.inf
        extra["bias"] = bias
    if spec.alibi:
        extra["alibi_slopes"] = _draw(generator, batch, heads).abs() if rng.random() < 0.5 else _draw(generator, heads).abs()
    if softmax == "learnable":
        extra["softmax_offset"] = _draw(generator, heads)
    seed_value = rng.randint(-(2**63), 2**63 - 1)
    extra["dropout_seed"] = torch.tensor(seed_value)
    meaning = Meaning(
        q=q,
        k=k,
        v=v,
        sides_q=sides[0],
        sides_kv=sides[1],
        scale=spec.scale if spec.scale is not None else dim**-0.5,
        left=left,
        right=right,
        bottom_right=spec.alignment == "bottom_right",
        softcap=spec.softcap,
        mask=extra.get("attention_mask"),
        bias=extra.get("bias"),
        bias_kind=bias_kind,
        slopes=extra.get("alibi_slopes"),
        sink={"vanilla": None, "off-by-one": torch.zeros(heads).double()}.get(softmax, extra.get("softmax_offset")),
        dropout_p=spec.dropout_p,
        seed=seed_value % 2**64,
        by_storage=layout != "thd",
    )
    inputs = Inputs(q=_stored(q, layout), k=_stored(k, layout), v=_stored(v, layout), **extra)
    dout = _poisoned(_draw(generator, rows, places[0], heads, dim_v), sides[0])
    dlse = None
    if spec.lse_grad:
        dlse = _poisoned(_draw(generator, rows, places[0], heads), sides[0]).transpose(1, 2)
        dlse = dlse[0].t() if layout == "thd" else dlse
    return Generated(Problem.of(spec, inputs), inputs, meaning, _stored(dout, layout), dlse)


def _table_shape(rng, batch, heads, longest):
    full = (batch, heads, *longest)
    return tuple(rng.choice([1, size]) for size in full)
