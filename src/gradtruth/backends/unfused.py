"""unfused: plain products and a softmax over the whole S x T of a sequence. The yardstick."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradtruth.core.gradients import BackwardRows, GradientStore
from gradtruth.core.layout import canonical, canonical_lse, empty_like_query, empty_lse
from gradtruth.core.precision import full_precision
from gradtruth.core.problem import Problem
from gradtruth.core.scores import (
    dropout_keep,
    dropout_scale,
    heads_first,
    scores,
    sink_logit,
    softmax,
    weights,
)
from gradtruth.core.sequences import Sequence, known_on_host, sequences
from gradtruth.core.support import DEFAULT_CLAIMS, Claims, Support, anywhere
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["Unfused", "create"]


class Unfused:
    """Every problem on every device, in O(H x S x T) memory.

    Cannot: nothing in the contract; it is slow and large on purpose, so that nothing hides in a schedule.

    Numerics: this is the error that the contract allows and no more. Scores, softmax, dP, delta and sums are
        fp32 (fp64); P and dS are rounded to the input dtype as operands of products, which are fp32 products
        of operands that hold low precision values, so each single product is exact; out and each gradient
        are rounded once.
    """

    name = "unfused"

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """Everything, on any device whose tensors have values."""
        return anywhere(device)

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """All; batch invariance where the host knows the lengths, so that a sequence has its own shapes."""
        return replace(DEFAULT_CLAIMS, batch_invariant=known_on_host(problem, device))

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """out, lse and, when asked for, max_logit."""
        spec, device = problem.spec, inputs.q.device
        out = empty_like_query(inputs.q, problem.head_dim_v).zero_()
        lse = empty_lse(inputs.q, spec.layout).fill_(-torch.inf)
        max_logit = torch.full((problem.num_heads,), -torch.inf, dtype=torch.float32, device=device)
        with full_precision(problem, device):
            for sequence in sequences(problem, inputs):
                found = _attend(problem, inputs, sequence)
                sequence.q.put(canonical(out, spec.layout), found.out.transpose(0, 1))
                sequence.q.put(canonical_lse(lse, spec.layout).transpose(1, 2), found.lse.t())
                if found.top.shape[1]:
                    max_logit = torch.maximum(max_logit, found.top.amax(1).float())
        return Forward(out=out, lse=lse, max_logit=max_logit if spec.max_logit else None)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """The wanted gradients, from any (out, lse)."""
        reader = BackwardRows(problem, inputs, forward, dout, dlse)
        store = GradientStore.of(problem, inputs, wanted)
        with full_precision(problem, inputs.q.device):
            for sequence in sequences(problem, inputs):
                _differentiate(problem, inputs, sequence, reader, store)
        return store.grads()


@dataclass(frozen=True, slots=True)
class _Attended:
    """out [H, M, Dv], lse and the largest score [H, M] of one sequence."""

    out: Tensor
    lse: Tensor
    top: Tensor


def _attend(problem: Problem, inputs: Inputs, sequence: Sequence) -> _Attended:
    block = sequence.whole(problem.spec.band)
    q = _grouped(problem, sequence.q.take(canonical(inputs.q, problem.spec.layout)))
    k, v = _keys(problem, inputs, sequence)
    raw = torch.bmm(q, k.mT)
    x = raw.view(problem.num_heads, len(block.queries), len(block.keys))
    scored = scores(problem, inputs, block, x, derivative=False)
    soft = softmax(scored.x, sink_logit(problem, inputs))
    p = soft.numerator / soft.denominator[..., None]
    keep = dropout_keep(problem, inputs, block)
    if keep is not None:
        p = p * keep * dropout_scale(problem.spec.dropout_p)
    out = torch.bmm(_operand(problem, p).view(raw.shape), v).view(*x.shape[:2], v.shape[-1])
    blank = scored.blank()
    if blank is not None:
        out.masked_fill_(blank[..., None], 0)
    return _Attended(out, soft.lse, soft.top)


def _differentiate(
    problem: Problem, inputs: Inputs, sequence: Sequence, reader: BackwardRows, store: GradientStore
) -> None:
    block = sequence.whole(problem.spec.band)
    rows = reader.take(sequence.q)
    k, v = _keys(problem, inputs, sequence)
    raw = torch.bmm(rows.q, k.mT)
    x = raw.view(problem.num_heads, len(block.queries), len(block.keys))
    scored = scores(problem, inputs, block, x, derivative=True)
    blank = scored.blank()
    store.add_sink(rows, blank)
    p = weights(scored.x, rows.lse)
    dp = torch.bmm(rows.dout, v.mT).view(x.shape)
    dropped = p
    keep = dropout_keep(problem, inputs, block)
    if keep is not None:
        scale = dropout_scale(problem.spec.dropout_p)
        dropped, dp = p * keep * scale, dp * keep * scale
    ds = store.through_cap(block, p * (dp - rows.delta[..., None]), scored)
    ds = _operand(problem, ds).view(raw.shape)
    dropped = _operand(problem, dropped).view(raw.shape)
    store.put_queries(sequence.q, torch.bmm(ds, k) * problem.scale, blank)
    store.put_keys(
        sequence, torch.bmm(ds.mT, rows.q) * problem.scale, torch.bmm(dropped.mT, rows.dout)
    )


def _grouped(problem: Problem, taken: Tensor) -> Tensor:
    return heads_first(taken, problem.num_gqa_groups, problem.accumulate_dtype)


def _keys(problem: Problem, inputs: Inputs, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """k [G, T, D] and v [G, T, Dv] of a sequence."""
    layout = problem.spec.layout
    k, v = (_grouped(problem, sequence.kv.take(canonical(x, layout))) for x in (inputs.k, inputs.v))
    return k, v


def _operand(problem: Problem, tensor: Tensor) -> Tensor:
    """Rounded to the input dtype, as an operand of an fp32 (fp64) product."""
    return tensor.to(problem.torch_dtype).to(problem.accumulate_dtype)


def create(name: str) -> Unfused:
    """The backend."""
    return Unfused()
