"""The lse of a peer that returns none: the definition's, from the scores again. It takes no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse, empty_lse
from gradtruth.core.precision import full_precision
from gradtruth.core.problem import Problem
from gradtruth.core.scores import heads_first, scores, sink_logit, softmax
from gradtruth.core.sequences import sequences
from gradtruth.core.tensors import Inputs

__all__ = ["own_lse"]

_ROWS = 512  # queries whose scores are held at once


@torch.no_grad()
def own_lse(problem: Problem, inputs: Inputs) -> Tensor:
    """lse in its public form, in the accumulation dtype, sink included, -inf where there is no query."""
    spec, dtype = problem.spec, problem.accumulate_dtype
    lse = empty_lse(inputs.q, spec.layout).fill_(-torch.inf)
    rows = canonical_lse(lse, spec.layout).transpose(1, 2)
    q, k = (canonical(x, spec.layout) for x in (inputs.q, inputs.k))
    with full_precision(problem, inputs.q.device):
        for sequence in sequences(problem, inputs):
            for block in sequence.blocks(spec.band, _ROWS):
                left = heads_first(block.queries.take(q), problem.num_gqa_groups, dtype)
                right = heads_first(block.keys.take(k), problem.num_gqa_groups, dtype)
                x = torch.bmm(left, right.mT)
                x = x.view(problem.num_heads, len(block.queries), len(block.keys))
                scored = scores(problem, inputs, block, x, derivative=False)
                found = softmax(scored.x, sink_logit(problem, inputs))
                block.queries.put(rows, found.lse.t())
    return lse
