"""Putting tiles together: the guarded log-sum-exp merge, and the sink, which enters once at the end."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_sink", "merge", "sink_gradient"]


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two partial results over disjoint keys.

    out = (e^lse out + e^lse' out') / (e^lse + e^lse'), with the larger lse subtracted from both, so
    nothing overflows. A row that is empty on one side (lse -inf) takes the other side bit for bit, one that
    is empty on both is 0, whatever the empty sides hold. A NaN in lse is kept.

    Args:
        out, other_out: [B', S, H, Dv], fp32 or fp64.
        lse, other_lse: [B', H, S] of the same dtype.

    Returns:
        The merged out and lse.

    Source: Rabe and Staats, arXiv 2112.05682, section 3.
    """
    top = torch.maximum(lse, other_lse)
    empty = top == -torch.inf
    safe = top.masked_fill(empty, 0.0)
    weight, other_weight = torch.exp(lse - safe), torch.exp(other_lse - safe)
    total = (weight + other_weight).masked_fill(empty, 1.0)
    merged_lse = torch.where(empty, -torch.inf, safe + torch.log(total))
    # A weighted sum, not out + share * (out' - out): that cancels where a large out has a small weight.
    left, right = (
        _weighted(out, weight / total, lse),
        _weighted(other_out, other_weight / total, other_lse),
    )
    # where: adding the empty side's 0 would turn -0.0 into 0.0.
    merged = torch.where(_empty(lse), right, torch.where(_empty(other_lse), left, left + right))
    return merged, merged_lse


def _rows(weight: Tensor) -> Tensor:
    """View [B', H, S] as [B', S, H, 1]."""
    return weight.transpose(1, 2).unsqueeze(-1)


def _empty(lse: Tensor) -> Tensor:
    """The rows without keys, bool [B', S, H, 1]."""
    return _rows(lse) == -torch.inf


def _weighted(out: Tensor, weight: Tensor, lse: Tensor) -> Tensor:
    """[B', S, H, Dv] times [B', H, S]; 0 in rows without keys, whatever they hold: 0 * NaN is not 0."""
    return torch.where(_empty(lse), 0.0, out * _rows(weight))


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Add exp(sink) to the denominator of a vanilla result.

    Args:
        out: [B', S, H, Dv].
        lse: [B', H, S], without the sink.
        sink: [H], the logit: 0 for off-by-one, alpha for learnable.
        valid: bool [B', S], the rows that belong to a sequence; others stay as they are.

    Returns:
        out and lse with the sink. A row without keys gets out = 0, and lse = sink if it is valid.
    """
    logit = sink.to(lse.dtype).view(1, -1, 1)
    with_sink = torch.where(valid.unsqueeze(1), torch.logaddexp(lse, logit), lse)
    keep = torch.exp(lse - with_sink)
    return _weighted(out, keep.to(out.dtype), lse), with_sink


def sink_gradient(lse: Tensor, delta: Tensor, sink: Tensor, seen: Tensor) -> Tensor:
    """dsink_h = -sum over rows of p_sink * delta, with p_sink = exp(sink - lse).

    Args:
        lse: [B', H, S], sink included.
        delta: [B', H, S], dout . out - dlse.
        sink: [H].
        seen: bool [B', H, S], rows with a visible key; the others add 0.

    Returns:
        [H] in lse's dtype.
    """
    p_sink = torch.exp(sink.to(lse.dtype).view(1, -1, 1) - lse)
    return -torch.where(seen, p_sink * delta, 0.0).sum(dim=(0, 2))
