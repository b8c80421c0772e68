"""dropout_consistency: the backward drops the weights that the forward dropped, and the right share of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradtruth.core.layout import canonical
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.findings import Kind
from gradtruth.verify.suite.families import noise

__all__ = ["DROPOUT_CONSISTENCY"]

_SIGMAS = 5.0
_LARGEST = 128  # keys; the values are a unit matrix of that size
_NEAR = 0.05  # norms; what a mask that differs in a hundredth of its places would move


@dataclass(frozen=True, slots=True)
class _Probe:
    """A probe's results in fp64, [B, H, L, L], for values that are the unit matrix.

    Attributes:
        weights: before dropout.
        kept: which weights the forward kept.
        out: the dropped weights.
    """

    case: Case
    weights: Tensor
    kept: Tensor
    out: Tensor
    results: Mapping[str, Tensor]


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """With causal masks the backward drew its mask by another index; another backward used dropped weights in dS.

    facebookresearch/xformers#755, aws-neuron/nki-samples#81. The forward's mask is read off its output with unit
    matrices as values, so no generator needs to be known: dv must be that output transposed, dq and dk are computed
    from it in fp64.
    """
    p = subject.case.problem.spec.dropout_p
    if not 0.0 < p < 1.0:
        yield NotReached(f"dropout_p is {p:g}")
        return
    case = _probe_case(subject.case)
    refusal = subject.supports(case)
    if refusal is not None:
        yield NotReached(f"the probe {case.problem.label()}: {refusal}")
        return
    run = subject.run(case)
    if run.error is not None:
        yield Judged(kind=Kind.RAISED, detail=(f"{case.problem.label()}: {run.error}",))
        return
    probe = _read(case, run.tensors)
    yield from _forward(probe, p)
    yield from _backward(probe, p)
    yield from _seeds(subject, probe)


def _probe_case(case: Case) -> Case:
    """Two sequences of as many queries as keys as v has channels; v and dout are unit matrices."""
    problem, spec = case.problem, case.problem.spec
    L = min(problem.head_dim_v, _LARGEST)
    H, G, D, B = problem.num_heads, problem.num_gqa_groups, problem.head_dim_qk, 2
    device, dtype = case.device, problem.torch_dtype
    unit = torch.eye(L, problem.head_dim_v, device=device, dtype=dtype)
    q = (0.5 * noise(1, B, L, H, D, device=device)).to(dtype)
    k = (0.5 * noise(2, B, L, G, D, device=device)).to(dtype)
    return Case.of(
        Spec(
            left=spec.left,
            right=spec.right,
            alignment=spec.alignment,
            dropout_p=spec.dropout_p,
            deterministic=spec.deterministic,
        ),
        Inputs(
            q=q,
            k=k,
            v=unit[None, :, None].expand(B, L, G, -1).contiguous(),
            dropout_seed=case.inputs.dropout_seed,
        ),
        unit[None, :, None].expand(B, L, H, -1).contiguous(),
    )


def _read(case: Case, results: Mapping[str, Tensor]) -> _Probe:
    problem, spec = case.problem, case.problem.spec
    L, share = problem.seqlen_q, problem.group_size
    q, k = (canonical(x, "bshd").double().transpose(1, 2) for x in (case.inputs.q, case.inputs.k))
    scores = q @ k.repeat_interleave(share, 1).transpose(-1, -2) * problem.scale
    i = torch.arange(L, device=q.device)
    visible = spec.band.visible(i[:, None], i[None, :])
    if isinstance(visible, Tensor):
        scores = scores.masked_fill(~visible, -math.inf)
    weights = scores.softmax(-1)
    out = results["out"].double().transpose(1, 2)[..., :L]
    return _Probe(case, weights, out != 0, out, results)


def _forward(probe: _Probe, p: float) -> Iterator[Judged]:
    """The kept share, and the size of what is kept."""
    visible = probe.weights > 0
    total, kept = int(visible.sum()), int((probe.kept & visible).sum())
    sigma = math.sqrt(total * p * (1 - p))
    if abs(kept - total * (1 - p)) > _SIGMAS * sigma:
        text = f"{kept} of {total} weights are kept, expected {total * (1 - p):.0f} +- {sigma:.0f}"
        yield Judged(tensor="out", kind=Kind.VALUE, detail=(text,))
    if bool((probe.kept & ~visible).any()):
        yield Judged(tensor="out", kind=Kind.NOT_ZERO, detail=("a hidden key has a weight",))
    yield from _near(
        "out", probe.out, probe.weights * probe.kept / (1 - p), "weight * keep / (1 - p)"
    )


def _backward(probe: _Probe, p: float) -> Iterator[Judged]:
    """Gradients of the definition, with the mask that the forward showed; dP is keep / (1 - p) where dout = 1."""
    problem, L = probe.case.problem, probe.case.problem.seqlen_q
    share = problem.group_size
    dropped = probe.weights * probe.kept / (1 - p)
    # dout is the unit matrix, so dP = dout v^T is too, and delta its diagonal part of out.
    unit = torch.eye(L, device=dropped.device, dtype=torch.float64)
    delta = dropped.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    ds = dropped * unit - probe.weights * delta
    q, k = (x.double().transpose(1, 2) for x in (probe.case.inputs.q, probe.case.inputs.k))
    grouped = (-1, problem.num_gqa_groups, share)
    dq = ds @ k.repeat_interleave(share, 1) * problem.scale
    dk = (ds.transpose(-1, -2) @ q * problem.scale).unflatten(1, grouped[1:]).sum(2)
    dv = dropped.transpose(-1, -2).unflatten(1, grouped[1:]).sum(2)
    for name, expected in (("dq", dq), ("dk", dk), ("dv", dv)):
        if name in probe.results:
            found = probe.results[name].double().transpose(1, 2)[..., : expected.shape[-1]]
            yield from _near(name, found, expected, "the gradient under the forward's own mask")


def _seeds(subject: Subject, probe: _Probe) -> Iterator[Judged]:
    """One seed draws one mask, another seed another one, every sequence and head its own."""
    case = probe.case
    again = _read(case, subject.run(case).forward.tensors)
    if not torch.equal(again.kept, probe.kept):
        yield Judged(tensor="out", kind=Kind.BITS, detail=("the same seed drew another mask",))
    seed = case.inputs.dropout_seed
    other = replace(
        case, inputs=replace(case.inputs, dropout_seed=None if seed is None else seed + 1)
    )
    if torch.equal(_read(other, subject.run(other).forward.tensors).kept, probe.kept):
        yield Judged(tensor="out", kind=Kind.VALUE, detail=("another seed drew the same mask",))
    flat = probe.kept.flatten(0, 1)
    alike = [n for n in range(1, len(flat)) if torch.equal(flat[n], flat[0])]
    if alike:
        text = f"{len(alike) + 1} of {len(flat)} (sequence, head) have the same mask"
        yield Judged(tensor="out", kind=Kind.VALUE, detail=(text,))


def _near(name: str, found: Tensor, expected: Tensor, what: str) -> Iterator[Judged]:
    error, norm = float((found - expected).norm()), float(expected.norm())
    if not error <= _NEAR * norm:
        text = f"|error| = {error / max(norm, 1e-300):.3g} of the norm, against {what}"
        yield Judged(tensor=name, kind=Kind.VALUE, detail=(text,))


DROPOUT_CONSISTENCY = Check("dropout_consistency", _run, any_dropout=True)
