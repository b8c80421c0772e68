"""A plain attention with a method for each step, so that a fault is one overridden method.

Written like a fused kernel: one sequence at a time, scores, softmax, delta, dS, sums over a group. Healthy as it
stands (a test shows that). H query heads, G KV heads, S and T the lengths of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gradtruth.backends import get
from gradtruth.core.dropout import keep_mask
from gradtruth.core.extents import resolve
from gradtruth.core.layout import canonical, canonical_lse, empty_like_query, empty_lse
from gradtruth.core.merge import sink_gradient
from gradtruth.core.support import DEFAULT_CLAIMS
from gradtruth.core.tensors import Forward, Grads


@dataclass
class Step:
    """What one sequence of one call looks like."""

    n: int
    problem: object
    inputs: object
    q: torch.Tensor  # [H, S, D]
    k: torch.Tensor  # [G, T, D]
    v: torch.Tensor  # [G, T, Dv]
    places_q: slice
    places_kv: slice
    diagonal: int
    index: tuple[int, int]
    backward: bool
    dout: torch.Tensor | None = None  # [H, S, Dv]
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None  # [H, S]
    dlse: torch.Tensor | None = None

    @property
    def S(self):
        return self.q.shape[1]

    @property
    def T(self):
        return self.k.shape[1]

    @property
    def H(self):
        return self.q.shape[0]

    @property
    def group(self):
        return self.q.shape[0] // self.k.shape[0]


class Kernel:
    """Everything of the contract but padding masks, tiles, and pre-scale bias."""

    name = "mutant"

    def __init__(self):
        self.calls = 0
        self.kept = {}  # what a faulty kernel keeps between calls

    def supports(self, problem, device):
        return get("unfused").supports(problem, device)

    def claims(self, problem, device):
        return replace(DEFAULT_CLAIMS, batch_invariant=False)

    # ------------------------------------------------------------ what a fault may override

    def window(self, step):
        """(left, right), None unlimited."""
        return step.problem.spec.left, step.problem.spec.right

    def diagonal(self, step):
        return step.diagonal

    def kv_head(self, step):
        """For each query head its KV head."""
        return torch.arange(step.H) // step.group

    def scale(self, step):
        return step.problem.scale

    def softcap(self, step):
        return step.problem.spec.softcap

    def slope(self, x, cap):
        """Derivative of the soft cap at x, before it."""
        return 1 - torch.tanh(x / cap).square()

    def visible(self, step):
        """bool [H, S, T] or broadcastable."""
        i, j = torch.arange(step.S)[:, None], torch.arange(step.T)[None]
        left, right = self.window(step)
        off = self.diagonal(step)
        seen = torch.ones(1, step.S, step.T, dtype=torch.bool)
        if left is not None:
            seen = seen & (j >= i + off - left)
        if right is not None:
            seen = seen & (j <= i + off + right)
        if step.inputs.attention_mask is not None:
            seen = seen & ~self.part(step, step.inputs.attention_mask)
        return seen

    def part(self, step, tensor):
        """[1|H, 1|S, 1|T] of bias or attention_mask."""
        part = tensor[step.n if tensor.shape[0] > 1 else 0]
        i, j = step.index
        if part.shape[1] > 1:
            part = part[:, i : i + step.S]
        return part[:, :, j : j + step.T] if part.shape[2] > 1 else part

    def bias(self, step):
        bias = step.inputs.bias
        return None if bias is None else self.part(step, bias).to(step.q.dtype)

    def alibi(self, step):
        """[H, S, T], taken off the scores."""
        slopes = step.inputs.alibi_slopes
        if slopes is None:
            return None
        slopes = slopes[step.n] if slopes.dim() == 2 else slopes
        i, j = torch.arange(step.S)[:, None], torch.arange(step.T)[None]
        return slopes.to(step.q.dtype)[:, None, None] * (i + self.diagonal(step) - j).abs()

    def sink(self, step):
        """[H] logits or None."""
        softmax = step.problem.spec.softmax
        if softmax == "vanilla":
            return None
        if softmax == "off-by-one":
            return torch.zeros(step.H, dtype=step.q.dtype)
        return step.inputs.softmax_offset.to(step.q.dtype)

    def keep(self, step):
        """[H, S, T] of what dropout keeps, scaled; None without dropout."""
        p = step.problem.spec.dropout_p
        if not p:
            return None
        if p == 1:
            return torch.zeros(1, 1, 1, dtype=step.q.dtype)
        h, i, j = torch.meshgrid(
            *(torch.arange(x) for x in (step.H, step.S, step.T)), indexing="ij"
        )
        n = torch.full_like(h, step.n)
        kept = keep_mask(p, step.inputs.dropout_seed, n, h, i, j)
        return kept.to(step.q.dtype) / (1 - p)

    def logits(self, step):
        """Raw products, scaled, [H, S, T]."""
        return step.q @ step.k[self.kv_head(step)].mT * self.scale(step)

    def scores(self, step):
        """Final scores with -inf where hidden, and the slope of the soft cap."""
        x, slope, cap = self.logits(step), None, self.softcap(step)
        if cap is not None:
            slope = self.slope(x, cap)
            x = cap * torch.tanh(x / cap)
        bias, alibi, seen = self.bias(step), self.alibi(step), self.visible(step)
        if bias is not None:
            x = x + bias
            seen = seen & (bias != -torch.inf)
        if alibi is not None:
            x = x - alibi
        return x.masked_fill(~seen, -torch.inf), slope

    def row_max(self, x):
        return (
            x.amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:2], 1), -torch.inf)
        )

    def normalise(self, step, x):
        """(P, lse)."""
        top = self.row_max(x)
        sink = self.sink(step)
        if sink is not None:
            top = torch.maximum(top, sink[:, None, None])
        top = top.masked_fill(top == -torch.inf, 0)
        e = (x - top).exp()
        total = e.sum(-1, keepdim=True)
        if sink is not None:
            total = total + (sink[:, None, None] - top).exp()
        lse = top + total.log()
        return e / total.masked_fill(total == 0, 1), lse.squeeze(-1)

    def lse_value(self, step, lse):
        return lse

    def saved_lse(self, step):
        return step.lse

    def delta(self, step):
        delta = (step.dout * step.out).sum(-1)
        return delta if step.dlse is None else delta - step.dlse

    def weights(self, step, x):
        """P again, from lse."""
        lse = self.saved_lse(step)
        return (x - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp()

    def dscores(self, step, p, dp, keep):
        """dS before the soft cap, [H, S, T]."""
        dp = dp if keep is None else dp * keep
        return p * (dp - self.delta(step)[..., None])

    def dv_weights(self, p, keep):
        return p if keep is None else p * keep

    def rounded(self, step, x):
        return x.to(step.problem.torch_dtype).to(x.dtype)

    def reduce_group(self, step, x):
        """[H, T, D] -> [G, T, D]."""
        return x.unflatten(0, (-1, step.group)).sum(1)

    def dq_of(self, step, ds):
        return ds @ step.k[self.kv_head(step)] * self.scale(step)

    def dk_of(self, step, ds):
        return self.reduce_group(step, ds.mT @ step.q * self.scale(step))

    def dv_of(self, step, dropped):
        return self.reduce_group(step, dropped.mT @ step.dout)

    def dbias_of(self, step, ds, like):
        """The part of one sequence in the shape of the bias, fp64."""
        part = ds.masked_fill(~self.visible(step), 0)
        for dim in (1, 2):
            if like.shape[dim + 1] == 1:
                part = part.sum(dim, keepdim=True)
        return part.sum(0, keepdim=True) if like.shape[1] == 1 else part

    def fresh(self, like, name):
        """Memory for a result."""
        return torch.zeros_like(like, memory_format=torch.contiguous_format)

    def write(self, name, step, target, value):
        """Put [H, L, D] of one sequence at its places of a canonical [B', L, H, D]."""
        row = 0 if step.problem.layout == "thd" else step.n
        places = step.places_kv if name in ("dk", "dv") else step.places_q
        target[row, places] = value.transpose(0, 1).to(target.dtype)

    def finish(self, name, tensor, problem, inputs):
        """The last word on a result."""
        return tensor

    # ------------------------------------------------------------ the two halves

    def forward(self, problem, inputs):
        self.calls += 1
        layout = problem.spec.layout
        out = empty_like_query(inputs.q, problem.head_dim_v).zero_()
        lse = empty_lse(inputs.q, layout).fill_(-torch.inf)
        top = torch.full((problem.num_heads,), -torch.inf)
        for step in self.steps(problem, inputs, backward=False):
            x, _ = self.scores(step)
            if x.numel():
                top = torch.maximum(top, x.flatten(1).amax(1).float())
            p, row_lse = self.normalise(step, x)
            dropped = self.dv_weights(p, self.keep(step))
            value = self.rounded(step, dropped) @ step.v[self.kv_head(step)]
            self.write("out", step, canonical(out, layout), value)
            row = 0 if problem.layout == "thd" else step.n
            canonical_lse(lse, layout)[row, :, step.places_q] = self.lse_value(step, row_lse).to(
                lse.dtype
            )
        out, lse = (self.finish(n, t, problem, inputs) for n, t in (("out", out), ("lse", lse)))
        return Forward(out=out, lse=lse, max_logit=top if problem.spec.max_logit else None)

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        self.calls += 1
        layout = problem.spec.layout
        found = {
            f"d{name}": self.fresh(getattr(inputs, name), f"d{name}") for name in ("q", "k", "v")
        }
        dbias = None if inputs.bias is None else torch.zeros(inputs.bias.shape, dtype=torch.float64)
        dsink = torch.zeros(problem.num_heads, dtype=torch.float64)
        for step in self.steps(problem, inputs, backward=True, given=(forward, dout, dlse)):
            x, slope = self.scores(step)
            p, keep = self.weights(step, x), self.keep(step)
            ds = self.dscores(step, p, step.dout @ step.v[self.kv_head(step)].mT, keep)
            if dbias is not None:
                row = dbias[step.n if len(dbias) > 1 else 0]
                self.part(replace(step, n=0), row[None]).add_(self.dbias_of(step, ds, inputs.bias))
            if problem.spec.softmax == "learnable":
                reached = (
                    (x > -torch.inf).any(-1)
                    if x.shape[-1]
                    else torch.zeros(x.shape[:2], dtype=torch.bool)
                )
                dsink += self.dsink_of(step, reached)
            ds = self.rounded(step, ds if slope is None else ds * slope)
            dropped = self.rounded(step, self.dv_weights(p, keep))
            for name, value in (
                ("dq", self.dq_of(step, ds)),
                ("dk", self.dk_of(step, ds)),
                ("dv", self.dv_of(step, dropped)),
            ):
                self.write(name, step, canonical(found[name], layout), value)
        found = {name: self.finish(name, x, problem, inputs) for name, x in found.items()}
        if dbias is not None:
            found["dbias"] = self.finish("dbias", dbias.to(inputs.bias.dtype), problem, inputs)
        if problem.spec.softmax == "learnable":
            dsink = self.finish("dsoftmax_offset", dsink, problem, inputs)
            found["dsoftmax_offset"] = dsink.to(inputs.softmax_offset.dtype)
        return Grads(**{name: x for name, x in found.items() if getattr(wanted, name)})

    def dsink_of(self, step, reached):
        """[H], of one sequence."""
        found = sink_gradient(
            step.lse[None],
            self.delta(step)[None],
            step.inputs.softmax_offset.to(step.q.dtype),
            reached[None],
        )
        return found.double()

    def steps(self, problem, inputs, *, backward, given=None):
        layout, wide = problem.spec.layout, problem.accumulate_dtype
        where = resolve(problem, inputs)
        q, k, v = (canonical(x, layout) for x in (inputs.q, inputs.k, inputs.v))
        for n in range(problem.batch):
            row = 0 if problem.layout == "thd" else n
            at, length, at_kv, length_kv, off, index_q, index_kv = (
                int(getattr(where, name)[n])
                for name in (
                    "start_q", "length_q", "start_kv", "length_kv", "diagonal", "index_q", "index_kv",
                )
            )  # fmt: skip
            queries, keys = slice(at, at + length), slice(at_kv, at_kv + length_kv)

            def heads_first(x, places, row=row):
                return x[row, places].transpose(0, 1).to(wide)

            step = Step(
                n=n,
                problem=problem,
                inputs=inputs,
                q=heads_first(q, queries),
                k=heads_first(k, keys),
                v=heads_first(v, keys),
                places_q=queries,
                places_kv=keys,
                diagonal=off,
                index=(index_q, index_kv),
                backward=backward,
            )
            if given is not None:
                forward, dout, dlse = given
                step.dout = heads_first(canonical(dout, layout), queries)
                step.out = heads_first(canonical(forward.out, layout), queries)
                step.lse = canonical_lse(forward.lse, layout)[row, :, queries].to(wide)
                if dlse is not None:
                    step.dlse = canonical_lse(dlse, layout)[row, :, queries].to(wide)
            yield step
