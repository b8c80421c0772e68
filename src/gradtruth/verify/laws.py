"""Conservation laws: identities between an attention's inputs, outputs and gradients that need no reference.

With dS' the gradient of the raw products q_i . k_j, and P~ the weights after dropout:

A: <q, dq> = <k, dk>. Both are the sum of dS'_ij (q_i . k_j) over all i and j; per KV head, the query side summed over
   its group. Holds under any mask, bias, softcap, sink and dropout.
B: <v, dv> = <out, dout>. Both are the sum of P~_ij (dout_i . v_j). Holds always too, on valid rows.
C: sum_j dk_j = scale * sum_i (p_sink_i * delta_i + dlse_i) q_i, because sum_j dS_ij is what the sink and lse take. Void
   under a softcap; without sink and dlse it says that the gradients of the keys add up to 0.

They are blind to dq and dk that are zero, negated or scaled together, and A to a wrong delta or lse: hence the oracle,
and the probes. All sums are fp64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Inputs
from gradtruth.verify.truth.scoring import Place, places

__all__ = ["Residual", "residuals"]


@dataclass(frozen=True, slots=True)
class Residual:
    """One law for one (sequence, KV head).

    Attributes:
        law: "A", "B" or "C".
        sequence, head: where; the KV head.
        value: how far the two sides are apart: a difference, of C the norm of one.
        size: the product of norms that it is small against.
        rounding: its standard deviation under independent errors of the given standard deviations; 0 without any.
    """

    law: str
    sequence: int
    head: int
    value: float
    size: float
    rounding: float = 0.0


def residuals(
    problem: Problem,
    inputs: Inputs,
    tensors: Mapping[str, Tensor],
    dout: Tensor,
    dlse: Tensor | None = None,
    errors: Mapping[str, Tensor] | None = None,
) -> Iterator[Residual]:
    """The laws that hold for a problem, for every (sequence, KV head).

    Args:
        problem, inputs: what was computed.
        tensors: out, lse, dq, dk, dv, as far as there are any; a law without its tensors is passed over.
        dout, dlse: what the backward got.
        errors: standard deviations of the errors of these tensors, elementwise.
    """
    given = {**tensors, "q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": dout}
    for n, place in enumerate(places(problem, inputs)):
        rows = _Rows(problem, n, place)
        parts = {name: rows.take(name, tensor) for name, tensor in given.items() if name in _SIDES}
        spread = {
            name: rows.take(name, tensor)
            for name, tensor in (errors or {}).items()
            if name in _SIDES
        }
        for law, left, right in _PRODUCTS:
            if {*left, *right} <= set(parts):
                yield from _product(law, n, left, right, parts, spread)
        if problem.spec.softcap is None and {"dk", "dq", "out", "lse"} <= set(parts):
            yield from _key_sum(problem, inputs, rows, parts, spread, dlse)


_QUERY, _KEY = ("q", "dq", "out", "dout", "lse"), ("k", "v", "dk", "dv")
_SIDES = (*_QUERY, *_KEY)
_PRODUCTS = (("A", ("q", "dq"), ("k", "dk")), ("B", ("out", "dout"), ("v", "dv")))


@dataclass(frozen=True, slots=True)
class _Rows:
    """One sequence's share of every tensor."""

    problem: Problem
    n: int
    place: Place

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """fp64 [G, R * S, D] on the query side, [G, T, D] on the key side; lse has one channel."""
        problem = self.problem
        row = 0 if problem.layout == "thd" else self.n
        at = self.place.keys if name in _KEY else self.place.queries
        if name == "lse":
            part = canonical_lse(tensor, problem.layout)[row, :, at].unsqueeze(-1)
        else:
            part = canonical(tensor, problem.spec.layout)[row, at].transpose(0, 1)
        return part.double().reshape(problem.num_gqa_groups, -1, part.shape[-1])


def _product(
    law: str,
    n: int,
    left: tuple[str, str],
    right: tuple[str, str],
    parts: Mapping[str, Tensor],
    spread: Mapping[str, Tensor],
) -> Iterator[Residual]:
    """<left> - <right> per KV head."""
    sums, sizes, variance = [], [], torch.zeros(())
    for a, b in (left, right):
        sums.append((parts[a] * parts[b]).sum((1, 2)))
        sizes.append(parts[a].norm(dim=(1, 2)) * parts[b].norm(dim=(1, 2)))
        for mine, other in ((a, b), (b, a)):
            if mine in spread:
                variance = variance + (spread[mine] * parts[other]).square().sum((1, 2))
    value, size = (sums[0] - sums[1]).abs(), sizes[0] + sizes[1]
    rounding = variance.sqrt().expand_as(value)
    for head, (v, s, r) in enumerate(
        zip(value.tolist(), size.tolist(), rounding.tolist(), strict=True)
    ):
        yield Residual(law, n, head, v, s, r)


def _key_sum(
    problem: Problem,
    inputs: Inputs,
    rows: _Rows,
    parts: Mapping[str, Tensor],
    spread: Mapping[str, Tensor],
    dlse: Tensor | None,
) -> Iterator[Residual]:
    """|sum_j dk_j - scale * sum_i (p_sink_i * delta_i + dlse_i) q_i| per KV head."""
    taken = torch.zeros_like(parts["lse"])
    line = None if dlse is None else rows.take("lse", dlse)
    finite = parts["lse"] > -torch.inf
    if problem.spec.sink:
        sink = torch.zeros(problem.num_heads, dtype=torch.float64)
        if inputs.softmax_offset is not None:
            sink = inputs.softmax_offset.double()
        S = rows.place.length_q
        logit = sink.to(taken.device).repeat_interleave(S).view_as(taken)
        delta = (parts["out"] * parts["dout"]).sum(-1, keepdim=True)
        delta = delta if line is None else delta - line
        seen = parts["out"].abs().amax(-1, keepdim=True) > 0
        taken = torch.where(finite & seen, (logit - parts["lse"]).exp() * delta, 0.0)
    if line is not None:
        taken = taken + torch.where(finite, line, 0.0)
    expected = (taken * parts["q"]).sum(1) * problem.scale
    apart = (parts["dk"].sum(1) - expected).norm(dim=-1)
    size = parts["dk"].norm(dim=-1).sum(-1)
    rounding = torch.zeros_like(apart)
    if "dk" in spread:
        rounding = spread["dk"].square().sum((1, 2)).sqrt()
    for head, (v, s, r) in enumerate(
        zip(apart.tolist(), size.tolist(), rounding.tolist(), strict=True)
    ):
        yield Residual("C", rows.n, head, v, s, r)
