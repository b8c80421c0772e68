"""sdpa_math: torch's plain SDPA, which materialises the scores, and autograd through it."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtruth.backends.peers.places import additive_mask, places_of, plain_mask
from gradtruth.backends.peers.refusals import head_dims, missing_operators, unable
from gradtruth.backends.peers.rerun import differentiate, widened
from gradtruth.backends.peers.views import (
    empty_forward,
    empty_grads,
    from_heads_first,
    from_lse,
    has_no_elements,
    heads_first,
)
from gradtruth.core.problem import Problem
from gradtruth.core.support import Claims, ReasonCode, Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["SdpaMath"]

_ABLE = (ReasonCode.BIAS, ReasonCode.ALIBI, ReasonCode.LSE_GRAD)


class SdpaMath:
    """aten::_scaled_dot_product_attention_math in the accumulation dtype.

    Half-precision inputs are widened to fp32 first: whether the operator does so itself depends on a global
    switch, and without it scores and weights are rounded to half precision. It returns the weights P instead of
    an lse; lse_i = x_ij - ln P_ij at the key j of the largest weight. Memory is O(S x T).
    """

    name = "sdpa_math"

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """Everything but dropout, softcap, sinks and max_logit."""
        del device
        reasons = missing_operators(("_scaled_dot_product_attention_math",))
        return Support((*reasons, *unable(problem, _ABLE), *head_dims(problem)))

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
        out, lse = _run(problem, inputs)
        return Forward(out=out.to(inputs.q.dtype), lse=from_lse(lse, problem.spec.layout))

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


def _run(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out in the storage layout and lse [B', H, S], in the accumulation dtype."""
    layout = problem.spec.layout
    inputs = widened(problem, inputs)
    q, k, v = (heads_first(x, layout) for x in (inputs.q, inputs.k, inputs.v))
    kind = plain_mask(problem)
    mask = None if kind else additive_mask(problem, inputs, places_of(problem, inputs), inputs.bias)
    with torch.autocast(q.device.type, enabled=False):
        out, weights = torch.ops.aten._scaled_dot_product_attention_math(
            q,
            k,
            v,
            mask,
            0.0,
            kind == "causal",
            scale=problem.scale,
            enable_gqa=problem.group_size > 1,
        )
    return from_heads_first(out, layout), _lse(problem, (q, k), mask, weights)


def _lse(
    problem: Problem, operands: tuple[Tensor, Tensor], mask: Tensor | None, weights: Tensor
) -> Tensor:
    """lse [B', H, S] from the weights: x - ln P at the key with the largest weight, at least 1 / T."""
    q, k = operands
    weight, key = weights.max(dim=-1, keepdim=True)
    nearest = k.repeat_interleave(problem.group_size, dim=1).gather(
        2, key.expand(*key.shape[:3], k.shape[3])
    )
    score = (q * nearest).sum(-1) * problem.scale
    if mask is not None:
        score = score + mask.expand(weights.shape).gather(3, key).squeeze(-1)
    weight = weight.squeeze(-1)
    seen = weight > 0
    return torch.where(seen, score - torch.log(weight.masked_fill(~seen, 1.0)), -torch.inf)
