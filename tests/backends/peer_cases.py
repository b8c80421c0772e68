"""Random problems for peers, and their answer from the definition: loops over sequences and heads, in fp64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.core.problem import DTYPES, Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs


@dataclass(frozen=True)
class Side:
    """Storage row, first place, length and hidden places (counted from the first) of every sequence."""

    row: list[int]
    start: list[int]
    length: list[int]
    hidden: list[set[int]]


@dataclass(frozen=True)
class PeerCase:
    problem: Problem
    inputs: Inputs
    queries: Side
    keys: Side
    dout: torch.Tensor
    dlse: torch.Tensor | None


def draw(seed, **fixed):
    """A case whose features are those of ``fixed``; sizes, lengths and numbers are random.

    Args:
        seed: of everything random.
        fixed: layout, lengths, dtype, gqa, dims and fields of Spec.
    """
    rng = random.Random(seed)
    gen = torch.Generator().manual_seed(seed)
    layout, lengths = fixed.pop("layout", "bshd"), fixed.pop("lengths", "full")
    dtype = DTYPES[fixed.pop("dtype", "float32")]
    dim, dim_v = fixed.pop("dims", (16, 16))
    groups, share = fixed.pop("groups", 2), fixed.pop("gqa", 1)
    batch = fixed.pop("batch", rng.choice([1, 2, 3]))
    sizes = fixed.pop("sizes", (rng.randint(1, 40), rng.randint(1, 40)))
    bias_dims, mask_dims = (
        fixed.pop("bias_dims", (1, 1, 1, 1)),
        fixed.pop("mask_dims", (1, 1, 1, 1)),
    )
    fixed_slopes = fixed.pop("slopes", "H")
    heads = groups * share
    sides = [_side(rng, layout, lengths, batch, size) for size in sizes]
    places = [_places(side, layout, size) for side, size in zip(sides, sizes, strict=True)]

    def tensor(side, count, last):
        # Heterogeneous per row, head and storage row, so that a mix-up shows.
        shape = (places[side][0], places[side][1], count, last)
        x = torch.randn(shape, generator=gen) * (0.5 + torch.rand(*shape[:3], 1, generator=gen))
        x = x + torch.randn(shape[0], 1, count, 1, generator=gen) * 0.5
        return _store(x.to(dtype), layout)

    spec = Spec(layout=layout, lengths=lengths, **fixed)
    full = (
        batch,
        heads,
        *(
            max(side.length, default=0) if layout == "thd" else size
            for side, size in zip(sides, sizes, strict=True)
        ),
    )
    slopes_shape = (batch, heads) if fixed_slopes == "BH" else (heads,)
    bias_shape = tuple(n if d else 1 for n, d in zip(full, bias_dims, strict=True))
    mask_shape = tuple(n if d else 1 for n, d in zip(full, mask_dims, strict=True))
    inputs = Inputs(
        q=tensor(0, heads, dim),
        k=tensor(1, groups, dim),
        v=tensor(1, groups, dim_v),
        bias=None
        if spec.bias == "none"
        else _bias(bias_shape, dtype, gen, hide=spec.bias == "post_scale"),
        attention_mask=torch.rand(mask_shape, generator=gen) < 0.4 if spec.arbitrary else None,
        alibi_slopes=torch.rand(slopes_shape, generator=gen) * 0.3 if spec.alibi else None,
        softmax_offset=torch.randn(heads, generator=gen) if spec.softmax == "learnable" else None,
        **_lengths(sides, places, layout, lengths),
    )
    problem = Problem.of(spec, inputs)
    dout = tensor(0, heads, dim_v)
    dlse = None
    if spec.lse_grad:
        dlse = torch.randn(
            places[0][0], heads, places[0][1], generator=gen, dtype=problem.accumulate_dtype
        )
        dlse = dlse.squeeze(0).t() if layout == "thd" else dlse
    return PeerCase(problem, inputs, *sides, dout, dlse)


def _side(rng, layout, lengths, batch, size):
    length = [size] * batch
    start, hidden = [0] * batch, [set() for _ in range(batch)]
    if lengths != "full":
        length = [rng.choice([0, 1, size, rng.randint(0, size)]) for _ in range(batch)]
    if layout == "thd":
        at = 0
        for n in range(batch):
            start[n], at = at, at + length[n] + rng.choice([0, 3])
        return Side([0] * batch, start, length, hidden)
    if lengths == "padding_mask":
        start = [rng.randint(0, size - n) if n else 0 for n in length]
        hidden = [{i for i in range(1, n - 1) if rng.random() < 0.2} for n in length]
    return Side(list(range(batch)), start, length, hidden)


def _places(side, layout, size):
    if layout != "thd":
        return len(side.row), size
    return 1, side.start[-1] + side.length[-1] + 4


def _store(x, layout):
    if layout == "sbhd":
        return x.transpose(0, 1).contiguous()
    return x.squeeze(0) if layout == "thd" else x


def _bias(shape, dtype, gen, hide):
    bias = torch.randn(shape, generator=gen).to(dtype)
    if hide and bias.numel() > 8:
        bias[torch.rand(shape, generator=gen) < 0.1] = -torch.inf
    return bias


def _lengths(sides, places, layout, lengths):
    found = {}
    for name, side, (rows, size) in zip(("q", "kv"), sides, places, strict=True):
        cu = torch.tensor([0, *side.length]).cumsum(0).int()
        if lengths == "cu_seqlens":
            found[f"cu_seqlens_{name}"] = cu
            if layout == "thd":
                found[f"cu_seqlens_{name}_padded"] = torch.tensor([*side.start, size]).int()
        elif lengths == "padding_mask":
            mask = torch.ones(rows, size, dtype=torch.bool)
            for n in range(rows):
                for i in range(side.length[n]):
                    mask[n, side.start[n] + i] = i in side.hidden[n]
            found[f"padding_mask_{name}"] = mask
    return found


def answer(case, out=None):
    """The definition, and how far from it a result may lie.

    Args:
        case: what to compute.
        out: stored, the out whose rounded values delta uses; None is the exact one.

    Returns:
        Two dicts by name (out, lse, dq, dk, dv, dbias, dsoftmax_offset, max_logit), storage layout: values, and
        magnitudes: the same sums with absolute values.
    """
    spec, inputs = case.problem.spec, case.inputs
    wide = {name: x.double() for name, x in inputs.items() if x.is_floating_point()}
    q, k, v, dout = (
        canonical(x.double(), spec.layout) for x in (inputs.q, inputs.k, inputs.v, case.dout)
    )
    out_given = None if out is None else canonical(out.double(), spec.layout)
    dlse = None if case.dlse is None else canonical_lse(case.dlse.double(), spec.layout)
    shapes = {"out": dout, "dq": q, "dk": k, "dv": v, "lse": q[..., 0].transpose(1, 2)}
    value = {name: torch.zeros_like(x) for name, x in shapes.items()}
    value["lse"].fill_(-torch.inf)
    value["dbias"] = torch.zeros_like(wide["bias"]) if "bias" in wide else None
    heads = case.problem.num_heads
    value["dsoftmax_offset"], value["max_logit"] = (
        torch.zeros(heads).double(),
        torch.full((heads,), -torch.inf).double(),
    )
    magnitude = {name: None if x is None else torch.zeros_like(x) for name, x in value.items()}
    for n in range(case.problem.batch):
        for h in range(heads):
            _one(case, (n, h), (q, k, v, dout, out_given, dlse), wide, (value, magnitude))
    for found in (value, magnitude):
        for name in ("out", "dq", "dk", "dv"):
            found[name] = _store(found[name], spec.layout)
        if spec.layout == "thd":
            found["lse"] = found["lse"].squeeze(0).t()
    return value, magnitude


def _one(case, which, tensors, wide, results):
    """Add one sequence and head to the results."""
    (n, h), (q, k, v, dout, out_given, dlse), (value, magnitude) = which, tensors, results
    problem, spec, inputs = case.problem, case.problem.spec, case.inputs
    rows = slice(case.queries.start[n], case.queries.start[n] + case.queries.length[n])
    cols = slice(case.keys.start[n], case.keys.start[n] + case.keys.length[n])
    b, c, g = case.queries.row[n], case.keys.row[n], h // problem.group_size
    qn, kn, vn, dn = q[b, rows, h], k[c, cols, g], v[c, cols, g], dout[b, rows, h]
    lq, lk = len(qn), len(kn)
    if lq == 0:
        return
    visible, at = _visible(case, (n, h), (lq, lk))
    i, j = torch.arange(lq)[:, None], torch.arange(lk)[None]
    diagonal = lk - lq if spec.alignment == "bottom_right" else 0
    scale = problem.scale
    x = (qn @ kn.T) * scale
    if spec.bias == "pre_scale":
        x = x + wide["bias"][at(wide["bias"])] * scale
    slope = torch.ones_like(x)
    if spec.softcap is not None:
        x = spec.softcap * torch.tanh(x / spec.softcap)
        slope = 1 - (x / spec.softcap) ** 2
    if spec.bias == "post_scale":
        added = wide["bias"][at(wide["bias"])].expand(lq, lk)
        visible = visible & (added > -torch.inf)
        x = x + added
    if inputs.alibi_slopes is not None:
        x = x - wide["alibi_slopes"].expand(problem.batch, -1)[n, h] * (i + diagonal - j).abs()
    x = x.masked_fill(~visible, -torch.inf)
    valid = torch.tensor([a not in case.queries.hidden[n] for a in range(lq)])
    seen = visible.any(1)
    terms = x
    if spec.sink:
        logit = wide["softmax_offset"][h] if "softmax_offset" in wide else torch.zeros(()).double()
        terms = torch.cat([x, logit.expand(lq, 1)], 1)
    lse = torch.where(valid, torch.logsumexp(terms, 1), -torch.inf)
    p = torch.where(visible, torch.exp(x - lse.masked_fill(lse == -torch.inf, 0.0)[:, None]), 0.0)
    out = p @ vn
    used = out if out_given is None else out_given[b, rows, h]
    back = torch.zeros(lq).double() if dlse is None else dlse[b, h, rows]
    delta = (dn * used).sum(1) - back
    size = (dn * used).abs().sum(1) + back.abs()
    dp = dn @ vn.T
    ds, ds_size = p * (dp - delta[:, None]), p * (dn.abs() @ vn.abs().T + size[:, None])
    # How an error of the scores, eps |q| |k| scale, moves the weights.
    shaky = (
        1 + (qn.abs() @ kn.abs().T * abs(scale)).amax(1, keepdim=True)
        if lk
        else torch.ones(lq, 1).double()
    )
    value["lse"][b, h, rows] = lse
    magnitude["lse"][b, h, rows] = shaky[:, 0] + lse.nan_to_num(0.0, 0.0, 0.0).abs()
    for found, w, s, top in ((value, p, ds, None), (magnitude, p * shaky, ds_size * shaky, shaky)):
        a = (lambda y: y) if top is None else torch.abs
        found["out"][b, rows, h] += w @ a(vn)
        inner = s * slope * scale if top is None else s * slope.abs().clamp(min=0.1) * abs(scale)
        found["dq"][b, rows, h] += inner @ a(kn)
        found["dk"][c, cols, g] += inner.T @ a(qn)
        found["dv"][c, cols, g] += w.T @ a(dn)
        if spec.bias != "none":
            shown = inner if spec.bias == "pre_scale" else s
            where = at(found["dbias"])
            found["dbias"].index_put_(
                tuple(torch.as_tensor(y).expand(lq, lk) for y in where),
                shown.expand(lq, lk).clone(),
                accumulate=True,
            )
        if spec.sink:
            weight = torch.where(seen, torch.exp(logit - lse), 0.0)
            found["dsoftmax_offset"][h] += (
                -(weight * delta).sum() if top is None else (weight * size * shaky[:, 0]).sum()
            )
    if visible.any():
        value["max_logit"][h] = torch.maximum(value["max_logit"][h], x[visible].max())
        magnitude["max_logit"][h] = torch.maximum(magnitude["max_logit"][h], shaky.max())


def _visible(case, which, lengths):
    """Which keys each query sees, bias aside, and how to look into a bias or mask."""
    (n, h), (lq, lk) = which, lengths
    spec, inputs = case.problem.spec, case.inputs
    i, j = torch.arange(lq)[:, None], torch.arange(lk)[None]
    diagonal = lk - lq if spec.alignment == "bottom_right" else 0
    visible = torch.ones(lq, lk, dtype=torch.bool)
    if spec.left is not None:
        visible &= j >= i + diagonal - spec.left
    if spec.right is not None:
        visible &= j <= i + diagonal + spec.right
    for a in case.queries.hidden[n]:
        visible[a] = False
    for a in case.keys.hidden[n]:
        visible[:, a] = False
    offset = (0, 0) if spec.layout == "thd" else (case.queries.start[n], case.keys.start[n])
    at = _index(n, h, i + offset[0], j + offset[1])
    if inputs.attention_mask is not None:
        visible &= ~inputs.attention_mask[at(inputs.attention_mask)]
    return visible, at


def _index(n, h, i, j):
    """Indices into a tensor [1|B, 1|H, 1|S, 1|T]."""

    def at(tensor):
        batches, heads, rows, columns = tensor.shape
        zero = torch.zeros_like(i)
        return (
            n if batches > 1 else 0,
            h if heads > 1 else 0,
            i if rows > 1 else zero,
            j if columns > 1 else torch.zeros_like(j),
        )

    return at
