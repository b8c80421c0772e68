"""exact_zeros: what nothing contributes to is 0 bit for bit, and its lse -inf."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import unanswered
from gradtruth.verify.findings import Kind
from gradtruth.verify.suite.poison import valid_places

__all__ = ["EXACT_ZEROS"]

_PLACED = ("out", "lse", "dq", "dk", "dv")
_NAMES = (*_PLACED, "dbias")


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """Gradient rows past the last sequence kept what freed memory held: NaN, which a linear layer spread everywhere.

    pytorch/pytorch#188933, fla-org/flash-linear-attention#892. Looked at are padding, gaps and tails (bit for bit),
    keys that no query sees, rows that see no key, and a bias that reaches no weight.
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    reached = False
    for name in _NAMES:
        found = subject.first.tensors.get(name)
        if found is None:
            continue
        nothing, exact = _nothing(subject, name)
        reached |= bool(nothing.any())
        # In a sequence a product with a negative number may be -0.0.
        stray = nothing & (found != exact)
        outside = nothing & (stray | (found.signbit() != (exact < 0))) & ~_inside(subject, name)
        for part, breaks, where in (
            (outside, "exact_zeros", "outside every sequence"),
            (stray & ~outside, None, "inside a sequence"),
        ):
            count = int(part.sum())
            if count:
                text = f"{count} elements {where} are not {exact:g}, where nothing contributes"
                yield Judged(tensor=name, kind=Kind.NOT_ZERO, breaks=breaks, detail=(text,))
    if not reached:
        yield NotReached("something contributes to every element")


def _nothing(subject: Subject, name: str) -> tuple[Tensor, float]:
    """Where nothing contributes, and what stands there."""
    scale = subject.standard.own
    truth, device = scale.values[name], subject.case.device
    if name == "lse":
        return (truth == -math.inf).to(device), -math.inf
    return (scale.magnitudes[name].bound == 0).to(device) & (truth == 0).to(device), 0.0


def _inside(subject: Subject, name: str) -> Tensor:
    """Which elements of a tensor lie in a sequence; all of one that does not go by places."""
    case = subject.case
    if name not in _PLACED:
        return torch.ones_like(subject.first.tensors[name], dtype=torch.bool)
    layout = case.problem.spec.layout
    valid = valid_places(case.problem, case.inputs)[1 if name in ("dk", "dv") else 0]
    found = torch.zeros_like(subject.first.tensors[name], dtype=torch.bool)
    if name == "lse":
        canonical_lse(found, layout).transpose(1, 2)[valid] = True
    else:
        canonical(found, layout)[valid] = True
    return found


EXACT_ZEROS = Check("exact_zeros", _run)
