"""select: which backend computes a problem, and why not each other one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from gradtruth.backends import ORDER, get
from gradtruth.backends.protocol import Backend
from gradtruth.core.problem import Problem
from gradtruth.core.support import DEFAULT_CLAIMS, Claims, Reason, ReasonCode, Support
from gradtruth.errors import UnsupportedProblem

__all__ = ["Considered", "Selection", "required_claims", "select"]


@dataclass(frozen=True, slots=True)
class Considered:
    """One line of the trace: a backend and what speaks against it (nothing, if it was chosen)."""

    name: str
    support: Support


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice and its trace.

    Attributes:
        problem, device: what was asked.
        forward, backward: the chosen backends; None when nothing can.
        trace: every backend considered, with every reason.
        copies: names of inputs that are copied because their last dim is not contiguous.
    """

    problem: Problem
    device: torch.device
    forward: Backend | None
    backward: Backend | None
    trace: tuple[Considered, ...]
    copies: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.forward is None or self.backward is None:
            chosen = "none"
        elif self.forward is self.backward:
            chosen = self.forward.name
        else:
            chosen = f"{self.forward.name} forward, {self.backward.name} backward"
        lines = [f"{self.problem.label()} on {self.device}", f"backend: {chosen}"]
        lines += [f"copied: {name} (its last dim is not contiguous)" for name in self.copies]
        for line in self.trace:
            verdict = "; ".join(map(str, line.support.reasons)) or "can"
            lines.append(f"  {line.name}: {verdict}")
        return "\n".join(lines)


def required_claims(problem: Problem) -> Claims:
    """The guarantees that ``auto`` demands: the default set, less or more as the Spec asks."""
    return _demanded(problem.spec.deterministic, problem.spec.batch_invariant)


@cache
def _demanded(deterministic: bool, batch_invariant: bool) -> Claims:  # noqa: FBT001 - cached
    return replace(DEFAULT_CLAIMS, deterministic=deterministic, batch_invariant=batch_invariant)


@lru_cache(maxsize=4096)
def select(
    problem: Problem, device: torch.device, backend: str = "auto", *, whole: bool = False
) -> Selection:
    """Choose a backend.

    Args:
        problem: what is to be computed.
        device: where.
        whole: ask every backend, also those after the chosen one, so that the trace is complete.
        backend: "auto": the first of ``ORDER`` that supports the problem and makes the required claims; a
            name: that one or an error; "a,b": a's forward with b's backward.

    Raises:
        InvalidProblem: an unknown name.
        UnsupportedProblem: the named backend, or every backend, refuses; lists every reason.
    """
    copies = tuple(name for name, found in problem.strides if not found.unit)
    if backend == "auto":
        lines: list[Considered] = []
        for name in ORDER:
            lines.append(_consider(name, problem, device))
            if lines[-1].support.ok and not whole:
                break
        trace = tuple(lines)
        chosen = next((get(line.name) for line in trace if line.support.ok), None)
        if chosen is None:
            raise UnsupportedProblem(_refusal(problem, device, trace))
        return Selection(problem, device, chosen, chosen, trace, copies)
    first, comma, second = backend.partition(",")
    pair = (get(first), get(second if comma else first))
    trace = tuple(Considered(b.name, b.supports(problem, device)) for b in dict.fromkeys(pair))
    if second and second != first and not pair[1].claims(problem, device).foreign_lse:
        foreign = Reason(
            ReasonCode.GUARANTEE, "its backward does not accept out and lse made by another backend"
        )
        trace = (*trace[:-1], Considered(second, Support((*trace[-1].support.reasons, foreign))))
    if any(not line.support.ok for line in trace):
        raise UnsupportedProblem(_refusal(problem, device, trace))
    return Selection(problem, device, *pair, trace, copies)


def _consider(name: str, problem: Problem, device: torch.device) -> Considered:
    """A backend under ``auto``: missing guarantees are reasons too."""
    backend = get(name)
    support = backend.supports(problem, device)
    if support.ok:
        missing = backend.claims(problem, device).missing(required_claims(problem))
        if missing:
            support = Support(
                (Reason(ReasonCode.GUARANTEE, f"does not guarantee {', '.join(missing)}"),)
            )
    return Considered(name, support)


def _refusal(problem: Problem, device: torch.device, trace: tuple[Considered, ...]) -> str:
    lines = [f"no backend computes {problem.label()} on {device}:"]
    for line in trace:
        lines += [f"  {line.name}: {reason}" for reason in line.support.reasons]
    return "\n".join(lines)
