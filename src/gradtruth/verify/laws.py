"""Conservation laws: identities between an attention's inputs, outputs and gradients that need no reference.

With dS'_ij = d loss / d (q_i . k_j) the gradient of the raw product, and P~ the weights after dropout:

A: <q, dq> = <k, dk>. q and k enter the scores only through their products, so dq_i = sum_j dS'_ij k_j and
   dk_j = sum_i dS'_ij q_i, and both sides are sum_ij dS'_ij (q_i . k_j). What happens to a product later (scale,
   softcap, bias before or behind the scale, ALiBi, mask, softmax, sink, dropout) is in dS' and the same on both sides.
   Per KV head, the query side summed over its group, because k_j meets every q_i of the group.
B: <v, dv> = <out, dout>. out_i = sum_j P~_ij v_j is linear in v, so both sides are sum_ij P~_ij (dout_i . v_j). P~ may
   be anything: dropped, short of 1 because of a sink.
C: sum_j dk_j = scale * sum_i (p_sink_i * delta_i + dlse_i) q_i. Without a softcap dS' = scale * dS, and
   dS_ij = P_ij (dP_ij - delta_i) with delta_i = sum_j P_ij dP_ij - dlse_i. So sum_j dS_ij is
   delta_i + dlse_i - delta_i sum_j P_ij, and sum_j P_ij = 1 - p_sink_i. A row without a visible key adds nothing: with
   a sink p_sink is 1 and delta -dlse, without one lse is -inf, and it is left out. Without sink and dlse the gradients
   of the keys add up to 0: adding a constant to every key changes no weight. A softcap weighs the terms by its
   derivative, which voids it.

All on valid rows. They are blind to dq and dk that are zero, negated or scaled together, and A to a wrong delta or lse,
for both sides use the same wrong dS: hence the oracle, and the probes. All sums are fp64.

**Bounds** (``Residual.bound``), for use without a reference. An error of dS is in both sides of A alike, so A errs by
the rounding of dq and dk themselves, eps |q o dq| and eps |k o dk| in quadrature (o elementwise), and by what
sums and recomputed weights lose: eps_acc (1 + |x|) times the largest terms, scale |q_i| |k| w_i with
w_i = |dout_i| |v| keep / (1 - p) + |dlse_i|. B has P rounded apart in forward and backward: eps w_i beside
eps |out o dout| and eps |v o dv|. C has the sums of rounded dS: eps scale |q_i| w_i beside eps |dk|. |k|, |v| and |x|
are the largest row norms and score. The sum is taken ``_DEVIATIONS`` times; docs/watch.md has what healthy ones use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Inputs
from gradtruth.verify.truth.rounding import rounding_of
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
        bound: what it may be at most in a healthy attention, from norms alone; see the module.
    """

    law: str
    sequence: int
    head: int
    value: float
    size: float
    rounding: float = 0.0
    bound: float = math.inf

    @property
    def holds(self) -> bool:
        """Within the bound; NaN is not."""
        return self.value <= self.bound


def residuals(
    problem: Problem,
    inputs: Inputs,
    tensors: Mapping[str, Tensor],
    dout: Tensor,
    dlse: Tensor | None = None,
    errors: Mapping[str, Tensor] | None = None,
    *,
    sequences: Iterable[int] | None = None,
    coarse: bool = False,
) -> Iterator[Residual]:
    """The laws that hold for a problem, for every (sequence, KV head).

    Args:
        problem, inputs: what was computed.
        tensors: out, lse, dq, dk, dv, as far as there are any; a law without its tensors is passed over.
        dout, dlse: what the backward got.
        errors: standard deviations of the errors of these tensors, elementwise.
        sequences: numbers of those to look at; None is all.
        coarse: for the bounds, see ``probes.Found``.
    """
    given = {**tensors, "q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": dout}
    if dlse is not None:
        given["dlse"] = dlse
    where = places(problem, inputs)
    some = list(range(len(where)) if sequences is None else sequences)
    most = _added(problem, inputs)
    found: list[_Found] = []
    limit = _ELEMENTS if inputs.q.device.type == "cpu" else _ELEMENTS_OF_A_DEVICE
    for numbers, groups in _batches(problem, where, some, limit):
        rows = _Rows(problem, inputs, [where[n] for n in numbers], numbers, groups)
        parts = {name: rows.take(name, x) for name, x in given.items() if name in _SIDES}
        spread = {name: rows.take(name, x) for name, x in (errors or {}).items() if name in _SIDES}
        norms = _Norms.of(problem, parts, most, coarse=coarse)
        for law, left, right in _PRODUCTS:
            if {*left, *right} <= set(parts):
                found.append(_product(law, rows, (left, right), parts, spread, norms))
        if problem.spec.softcap is None and _needed_for_sum(problem, dlse) <= set(parts):
            found.append(_key_sum(rows, parts, spread, norms))
    yield from _on_host(found)


_DEVIATIONS = 8.0  # of one eps; a rounding errs by 0.29 of one, partial sums in a low dtype by more
_ELEMENTS = 1 << 22  # of one tensor that are looked at in one go on a CPU
_ELEMENTS_OF_A_DEVICE = 1 << 23  # there each go costs what its operators cost the host
_HIDING = 1e4  # a bias beyond this hides a key and rounds no score
_LINES = ("lse", "dlse")
_QUERY, _KEY = ("q", "dq", "out", "dout", *_LINES), ("k", "v", "dk", "dv")
_SIDES = (*_QUERY, *_KEY)
_PRODUCTS = (("A", ("q", "dq"), ("k", "dk")), ("B", ("out", "dout"), ("v", "dv")))


def _needed_for_sum(problem: Problem, dlse: Tensor | None) -> set[str]:
    """What law C reads beside q and dout."""
    needed = {"dk", "dq"}
    if problem.spec.sink or dlse is not None:
        needed |= {"out", "lse"}
    return needed


def _batches(
    problem: Problem, where: Sequence[Place], sequences: Sequence[int], limit: int
) -> Iterator[tuple[list[int], slice]]:
    """(sequences, range of KV heads) that are looked at in one go: several sequences with all heads, or some of one's.

    One after the other costs a GPU's host more than the sums themselves.
    """
    heads, width = problem.num_gqa_groups, max(problem.head_dim_qk, problem.head_dim_v)
    many: list[int] = []
    for n in sequences:
        if many and _longest(problem, where, [*many, n]) * heads * width * (len(many) + 1) > limit:
            yield many, slice(0, heads)
            many = []
        step = max(1, limit // (_longest(problem, where, [n]) * width))
        if step < heads:
            for first in range(0, heads, step):
                yield [n], slice(first, min(first + step, heads))
        else:
            many.append(n)
    if many:
        yield many, slice(0, heads)


def _longest(problem: Problem, where: Sequence[Place], sequences: Sequence[int]) -> int:
    """Rows of one KV head, on the longer side."""
    sides = ((where[n].length_q * problem.group_size, where[n].length_kv) for n in sequences)
    return max(1, *(length for side in sides for length in side))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The share of some sequences and KV heads of every tensor; one axis N * G has all, sequence by sequence."""

    problem: Problem
    inputs: Inputs
    where: list[Place]
    numbers: list[int]
    groups: slice

    @property
    def heads(self) -> slice:
        """The query heads."""
        size = self.problem.group_size
        return slice(self.groups.start * size, self.groups.stop * size)

    @property
    def length_q(self) -> int:
        """Queries of the longest sequence."""
        return max(place.length_q for place in self.where)

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """fp64 [N * G, R * S, D] on the query side, [N * G, T, D] on the key side; lse has one channel.

        0 where a place is hidden, and behind the end of a sequence that is not the longest.
        """
        keys, layout = name in _KEY, self.problem.layout
        heads = self.groups if keys else self.heads
        if name in _LINES:
            whole = canonical_lse(tensor, layout).transpose(1, 2)[:, :, heads].unsqueeze(-1)
        else:
            whole = canonical(tensor, layout)[:, :, heads]
        part, hidden = self._places(whole, keys=keys)
        part = part.double()
        if hidden is not None:
            part = part.masked_fill(hidden[..., None, None], 0.0)
        many = len(self.numbers) * (self.groups.stop - self.groups.start)
        part = part.transpose(1, 2)
        return part.reshape(many, -1 if part.numel() else 0, part.shape[-1])

    def _places(self, whole: Tensor, *, keys: bool) -> tuple[Tensor, Tensor | None]:
        """[N, places, heads, D] of [B', S', heads, D], and bool [N, places] of what is hidden there."""
        starts = [place.start_kv if keys else place.start_q for place in self.where]
        lengths = [place.length_kv if keys else place.length_q for place in self.where]
        thd = self.problem.layout == "thd"
        mask = None if thd else getattr(self.inputs, f"padding_mask_{'kv' if keys else 'q'}")
        first, last = self.numbers[0], self.numbers[-1] + 1
        alike = len({*zip(starts, lengths, strict=True)}) == 1
        if alike and last - first == len(self.numbers) and (not thd or len(lengths) == 1):
            rows = slice(0, 1) if thd else slice(first, last)
            at = slice(starts[0], starts[0] + lengths[0])
            return whole[rows, at], None if mask is None else mask[rows, at]
        begin, length, rows = torch.tensor(
            [starts, lengths, [0] * len(starts) if thd else self.numbers], device=whole.device
        )[..., None]
        offsets = torch.arange(max(lengths), device=whole.device)
        beyond = offsets >= length
        at = (begin + offsets).masked_fill(beyond, 0)
        hidden = beyond if mask is None else beyond | mask[rows, at]
        return whole[rows, at], hidden


@dataclass(frozen=True, slots=True)
class _Norms:
    """What the bounds are made of, [G] each but eps; see the module.

    Attributes:
        eps, fine: of operands and results, and of sums times 1 + |x|.
        key: the largest norm of a key.
        row: w_i in quadrature.
        query: scale |q_i| w_i in quadrature.
    """

    eps: float
    fine: Tensor
    key: Tensor
    row: Tensor
    query: Tensor

    @staticmethod
    def of(
        problem: Problem, parts: Mapping[str, Tensor], added: Tensor | float, *, coarse: bool
    ) -> _Norms:
        spec, rounding = problem.spec, rounding_of(problem)
        ratio = 1.0 if coarse else rounding.ratio
        size = {name: parts[name].norm(dim=-1) for name in ("q", "k", "v", "dout")}
        most = {name: _largest(size[name]) for name in ("q", "k", "v")}
        score = abs(problem.scale) * most["q"] * most["k"] + added
        kept = 1.0 if spec.dropout_p in (0.0, 1.0) else 1.0 / (1.0 - spec.dropout_p)
        weight = size["dout"] * most["v"].unsqueeze(-1) * kept
        if "dlse" in parts:
            weight = weight + parts["dlse"].abs().squeeze(-1)
        return _Norms(
            eps=rounding.unit,
            fine=rounding.unit * ratio * (1.0 + score),
            key=most["k"],
            row=weight.norm(dim=-1),
            query=abs(problem.scale) * (size["q"] * weight).norm(dim=-1),
        )


def _added(problem: Problem, inputs: Inputs) -> Tensor | float:
    """The largest that is added to the product of a query and a key."""
    found: Tensor | float = 0.0
    if inputs.bias is not None and inputs.bias.numel():
        bias = inputs.bias.detach().abs()
        found = found + bias.masked_fill(bias > _HIDING, 0).max().double()
    if inputs.alibi_slopes is not None:
        found = found + inputs.alibi_slopes.abs().max().double() * problem.seqlen_kv
    return found


def _largest(rows: Tensor) -> Tensor:
    """[G] of [G, rows]."""
    return rows.amax(-1) if rows.shape[-1] else rows.new_zeros(rows.shape[:1])


def _product(
    law: str,
    rows: _Rows,
    sides: tuple[tuple[str, str], tuple[str, str]],
    parts: Mapping[str, Tensor],
    spread: Mapping[str, Tensor],
    norms: _Norms,
) -> _Found:
    """<left> - <right> per KV head."""
    sums, sizes, variance = [], [], torch.zeros_like(norms.key)
    bound = norms.fine * norms.key * norms.query
    if law == "B":
        bound = (norms.eps + norms.fine) * norms.row
    for a, b in sides:
        terms = parts[a] * parts[b]
        sums.append(terms.sum((1, 2)))
        bound = bound + norms.eps * terms.norm(dim=(1, 2))
        sizes.append(parts[a].norm(dim=(1, 2)) * parts[b].norm(dim=(1, 2)))
        for mine, other in ((a, b), (b, a)):
            if mine in spread:
                variance = variance + (spread[mine] * parts[other]).square().sum((1, 2))
    value = (sums[0] - sums[1]).abs()
    return _found(law, rows, (value, sizes[0] + sizes[1], variance.sqrt(), bound))


def _key_sum(
    rows: _Rows,
    parts: Mapping[str, Tensor],
    spread: Mapping[str, Tensor],
    norms: _Norms,
) -> _Found:
    """|sum_j dk_j - scale * sum_i (p_sink_i * delta_i + dlse_i) q_i| per KV head."""
    problem, inputs = rows.problem, rows.inputs
    expected: Tensor | float = 0.0
    line = parts.get("dlse")
    if problem.spec.sink or line is not None:
        taken = torch.zeros_like(parts["lse"])
        finite = parts["lse"] > -torch.inf
        if problem.spec.sink:
            sink = torch.zeros(problem.num_heads, dtype=torch.float64)
            if inputs.softmax_offset is not None:
                sink = inputs.softmax_offset.double()
            shape = (len(rows.numbers), -1, rows.length_q)
            logit = sink.to(taken.device)[rows.heads].view(1, -1, 1).expand(shape).reshape_as(taken)
            delta = (parts["out"] * parts["dout"]).sum(-1, keepdim=True)
            delta = delta if line is None else delta - line
            # Without a visible key p_sink is 1, and what is added below takes this back.
            taken = torch.where(finite, (logit - parts["lse"]).exp() * delta, 0.0)
        if line is not None:
            taken = taken + torch.where(finite, line, 0.0)
        expected = (taken * parts["q"]).sum(1) * problem.scale
    value = (parts["dk"].sum(1) - expected).norm(dim=-1)
    size = parts["dk"].norm(dim=-1).sum(-1)
    rounding = torch.zeros_like(value)
    if "dk" in spread:
        rounding = spread["dk"].square().sum((1, 2)).sqrt()
    bound = norms.eps * parts["dk"].norm(dim=(1, 2)) + (norms.eps + norms.fine) * norms.query
    return _found("C", rows, (value, size, rounding, bound))


class _Found(NamedTuple):
    """One law in some sequences: fp64 [N * G, 4] of value, size, rounding and bound."""

    law: str
    numbers: list[int]
    groups: slice
    columns: Tensor


def _found(law: str, rows: _Rows, columns: tuple[Tensor, Tensor, Tensor, Tensor]) -> _Found:
    *values, bound = columns
    return _Found(law, rows.numbers, rows.groups, torch.stack((*values, _DEVIATIONS * bound), 1))


def _on_host(found: list[_Found]) -> Iterator[Residual]:
    """Everything that was found; a device is waited for once."""
    if not found:
        return
    columns = iter(torch.cat([each.columns for each in found]).tolist())
    for each in found:
        for n in each.numbers:
            for head in range(each.groups.start, each.groups.stop):
                yield Residual(each.law, n, head, *next(columns))
