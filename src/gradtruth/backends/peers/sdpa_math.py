"""sdpa_math: torch's plain SDPA, which materialises the scores, and autograd through it."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtruth.backends.peers.places import additive_mask, places_of, plain_mask
from gradtruth.backends.peers.refusals import missing_operators, unable
from gradtruth.backends.peers.rerun import differentiate, widened
from gradtruth.backends.peers.views import (
    empty_forward,
    empty_grads,
    from_heads_first,
    from_lse,
    has_no_elements,
    heads_first,
)
from gradtruth.core.precision import full_precision
from gradtruth.core.problem import Problem
from gradtruth.core.support import Claims, ReasonCode, Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["SdpaMath"]

_ABLE = (ReasonCode.BIAS, ReasonCode.ALIBI)
_SCORES = 1 << 18  # per head, in a block of the lse


class SdpaMath:
    """aten::_scaled_dot_product_attention_math in the accumulation dtype.

    Half-precision inputs are widened to fp32 first: whether the operator does so itself depends on a global
    switch, and without it scores and weights are rounded to half precision. It returns no lse: that is computed
    here, from the scores again, and takes no gradient. Memory is O(S x T).
    """

    name = "sdpa_math"

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """Everything but dropout, softcap, sinks, max_logit and a gradient of lse."""
        del device
        reasons = missing_operators(("_scaled_dot_product_attention_math",))
        return Support((*reasons, *unable(problem, _ABLE)))

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """Not foreign_lse: the backward runs the forward again. Hidden NaN reaches valid places through 0 * NaN."""
        cpu = device.type == "cpu"
        return Claims(
            pure=True,
            shielded=not problem.spec.ragged,
            exact_zeros=True,
            deterministic=cpu,
            global_dropout=True,
            no_sync=True,
            graph_capturable=cpu,
        )

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """out and lse."""
        if has_no_elements(problem, inputs):
            return empty_forward(problem, inputs)
        out, _ = _run(problem, inputs)
        lse = from_lse(_lse(problem, inputs), problem.spec.layout)
        return Forward(out=out.to(inputs.q.dtype), lse=lse)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """The wanted gradients, by autograd; ``forward`` is not read."""
        del forward
        if has_no_elements(problem, inputs):
            return empty_grads(inputs, wanted)
        return differentiate(_run, problem, inputs, dout, dlse, wanted)


def _run(problem: Problem, inputs: Inputs) -> tuple[Tensor, None]:
    """out in the storage layout, in the accumulation dtype."""
    layout = problem.spec.layout
    q, k, v, mask = _operands(problem, inputs)
    with full_precision(problem, q.device):
        out, _ = torch.ops.aten._scaled_dot_product_attention_math(
            q,
            k,
            v,
            mask,
            0.0,
            plain_mask(problem) == "causal",
            scale=problem.scale,
            enable_gqa=problem.group_size > 1,
        )
    return from_heads_first(out, layout), None


def _operands(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v as [B', H, S, D] and the additive mask, in the accumulation dtype."""
    layout = problem.spec.layout
    wide = widened(problem, inputs)
    q, k, v = (heads_first(x, layout) for x in (wide.q, wide.k, wide.v))
    if plain_mask(problem) is not None:
        return q, k, v, None
    return q, k, v, additive_mask(problem, wide, places_of(problem, inputs), wide.bias)


def _lse(problem: Problem, inputs: Inputs) -> Tensor:
    """lse [B', H, S], by blocks of queries."""
    q, k, _, mask = _operands(problem, inputs)
    q = q.unflatten(1, (problem.num_gqa_groups, problem.group_size))
    keys = k.transpose(2, 3).unsqueeze(2)
    rows = max(1, _SCORES // k.shape[2])
    found = []
    with full_precision(problem, q.device):
        for start in range(0, q.shape[3], rows):
            scores = (q[:, :, :, start : start + rows] @ keys).flatten(1, 2) * problem.scale
            if mask is not None:
                scores = scores + mask[:, :, start : start + rows]
            elif plain_mask(problem) == "causal":
                shape = scores.shape[2:]
                hidden = torch.ones(shape, dtype=torch.bool, device=q.device).triu(start + 1)
                scores = scores.masked_fill(hidden, -torch.inf)
            found.append(torch.logsumexp(scores, -1))
    return torch.cat(found, 2)
