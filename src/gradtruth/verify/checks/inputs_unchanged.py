"""inputs_unchanged: no call writes what it was given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from gradtruth.core.tensors import Forward
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import unanswered
from gradtruth.verify.findings import Kind
from gradtruth.verify.same_bits import same_bits
from gradtruth.verify.trial import as_called, wanted_of

__all__ = ["INPUTS_UNCHANGED"]


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """Tensors saved for the backward were modified in place, so a second backward on the graph was another one.

    pytorch/pytorch#116350 and its like: with recomputation, checkpointing and retain_graph they are read again. All
    inputs, dout and dlse are compared bit for bit after each half, out and lse after the backward.
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    seen: set[str] = set()
    for trial in (subject.first.forward, subject.first.backward):
        for base, text in ({} if trial is None else trial.wrong).items():
            # Tensors that share memory are named together.
            for name in base.split("+") if "wrote" in text else ():
                if name not in seen:
                    seen.add(name)
                    yield Judged(tensor=name, kind=Kind.WRITTEN, detail=(text,))
    yield from _saved(subject)


def _saved(subject: Subject) -> Iterator[Judged]:
    """out and lse as the backward leaves them."""
    case, forward = subject.case, subject.first.forward.returned
    if not isinstance(forward, Forward):
        return
    own = {"out": forward.out.clone(), "lse": forward.lse.clone()}
    given = as_called(case, case.to(case.device).tensors())
    with torch.no_grad():
        subject.backend.backward(
            case.problem,
            given.inputs,
            replace(forward, **own),
            given.dout,
            given.dlse,
            wanted_of(case),
        )
    for name, tensor in own.items():
        if not same_bits(tensor, getattr(forward, name)):
            text = f"the backend wrote {name}, which its backward was given"
            yield Judged(tensor=name, kind=Kind.WRITTEN, detail=(text,))


INPUTS_UNCHANGED = Check("inputs_unchanged", _run)
