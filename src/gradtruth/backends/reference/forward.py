"""The forward of the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtruth.backends.reference.schedule import schedule
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
)
from gradtruth.core.sequences import Block, sequences
from gradtruth.core.tensors import Forward, Inputs

__all__ = ["attend"]


def attend(problem: Problem, inputs: Inputs) -> Forward:
    """out, lse and, when asked for, max_logit.

    Numerics: fp32 (fp64) throughout; out is rounded once, when stored.
    """
    spec, dtype, groups = problem.spec, problem.accumulate_dtype, problem.num_gqa_groups
    device = inputs.q.device
    plan, sink = schedule(problem, device), sink_logit(problem, inputs)
    stored_k, stored_v = canonical(inputs.k, spec.layout), canonical(inputs.v, spec.layout)
    found = Forward(
        out=empty_like_query(inputs.q, problem.head_dim_v).zero_(),
        lse=empty_lse(inputs.q, spec.layout).fill_(-torch.inf),
        max_logit=torch.full((problem.num_heads,), -torch.inf, dtype=torch.float32, device=device)
        if spec.max_logit
        else None,
    )
    with full_precision(problem, device):
        for sequence in sequences(problem, inputs):
            k = heads_first(sequence.kv.take(stored_k), groups, dtype)
            v = heads_first(sequence.kv.take(stored_v), groups, dtype)
            rows = plan.rows_for(problem.num_heads, len(sequence.kv))
            for block in sequence.blocks(spec.band, rows):
                part = block.key_slice
                _block(problem, inputs, block, k[:, part], v[:, part], sink, found)
    return found


def _block(
    problem: Problem,
    inputs: Inputs,
    block: Block,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    found: Forward,
) -> None:
    """One block of queries, written into ``found``. k is [G, T, D] and v [G, T, Dv]."""
    spec, heads = problem.spec, problem.num_heads
    taken = block.queries.take(canonical(inputs.q, spec.layout))
    q = heads_first(taken, problem.num_gqa_groups, problem.accumulate_dtype)
    shape = (heads, len(block.queries), len(block.keys))
    scored = scores(problem, inputs, block, torch.bmm(q, k.mT).view(shape), derivative=False)
    soft = softmax(scored.x, sink)
    p, total = soft.numerator, soft.denominator
    keep = dropout_keep(problem, inputs, block)
    if keep is not None:
        p.mul_(keep)
        total = total / dropout_scale(spec.dropout_p) if spec.dropout_p < 1 else total
    out = (
        torch.bmm(p.view(*q.shape[:2], shape[2]), v)
        .view(heads, shape[1], v.shape[-1])
        .div_(total[..., None])
    )
    blank = scored.blank()
    if blank is not None:
        out.masked_fill_(blank[..., None], 0)
    block.queries.put(canonical(found.out, spec.layout), out.transpose(0, 1))
    block.queries.put(canonical_lse(found.lse, spec.layout).transpose(1, 2), soft.lse.t())
    if found.max_logit is not None:
        found.max_logit.copy_(torch.maximum(found.max_logit, soft.top.amax(1).float()))
