"""autograd_contract: a gradient does not depend on which others are asked for, how often, or on recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradtruth.core.tensors import Forward, Wanted
from gradtruth.verify.checks.again import same
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.operator import Operator, Results, operator_of
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import differences, unanswered
from gradtruth.verify.findings import Kind
from gradtruth.verify.trial import Given, as_called, wanted_of

__all__ = ["AUTOGRAD_CONTRACT"]

_NAMES = ("dq", "dk", "dv", "dbias", "dsoftmax_offset")


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """With only the mask requiring grad the lse was not saved: an illegal access in the backward.

    pytorch/pytorch#188302. Every set of gradients is asked for, then all of them twice from one forward, as
    retain_graph does. A backend that the library knows by name is also run through autograd: a second backward on a
    kept graph, both variants of checkpointing, and a second derivative, which must raise.
    """
    missing = unanswered(subject)
    forward = subject.first.forward.returned
    if missing is not None or not isinstance(forward, Forward):
        yield missing or NotReached("its forward gave nothing to start from")
        return
    yield from _sets(subject, forward)
    operator = operator_of(subject)
    if operator is not None:
        yield from _through_autograd(subject, operator)


def _sets(subject: Subject, forward: Forward) -> Iterator[Judged]:
    """All subsets of the gradients, from one forward; the whole set comes last, so it is a second backward too."""
    wanted = wanted_of(subject.case)
    names = [name for name in _NAMES if getattr(wanted, name)]
    expected = subject.first.tensors
    # One copy for all sets: what a backend writes there shows in the next one, and not in later checks.
    given = as_called(subject.case, subject.case.to(subject.case.device).tensors())
    own = replace(forward, out=forward.out.clone(), lse=forward.lse.clone())
    for count in range(1, len(names) + 1):
        for some in combinations(names, count):
            found = _asked(subject, given, own, some)
            if count == len(names):
                whole = {name: expected[name] for name in some if name in expected}
                yield from same(subject, found, whole, "the first backward of the same forward")
                continue
            alone = ", ".join(some)
            for name in sorted(set(some) - set(found)):
                text = f"{name} is missing where {alone} are wanted"
                yield Judged(tensor=name, kind=Kind.FORM, detail=(text,))
            what = f"the full set, with only {alone} wanted"
            yield from differences(subject, found, expected, what, some)


def _asked(
    subject: Subject, given: Given, forward: Forward, some: tuple[str, ...]
) -> dict[str, Tensor]:
    asked = Wanted(**{name: name in some for name in _NAMES})
    with torch.no_grad():
        found = subject.backend.backward(
            subject.case.problem, given.inputs, forward, given.dout, given.dlse, asked
        )
    return dict(found.items())


def _through_autograd(subject: Subject, operator: Operator) -> Iterator[Judged]:
    expected = {
        name: tensor
        for name, tensor in subject.first.tensors.items()
        if name.removeprefix("d") in operator.leaves
    }
    tensors = operator.tensors(operator.leaves)
    results = operator.call(*tensors.values())
    for time in ("first", "second"):
        found = operator.gradients(results, tensors, retain=True)
        yield from same(subject, found, expected, f"the direct call, in the {time} backward")
    yield from _second_derivative(results[0], tensors)
    for reentrant in (False, True):
        tensors = operator.tensors(operator.leaves)
        again = checkpoint(operator.call, *tensors.values(), use_reentrant=reentrant)
        found = _recomputed(operator, again, tensors)
        what = f"the direct call, recomputed (use_reentrant={reentrant})"
        yield from same(subject, found, expected, what)


def _recomputed(
    operator: Operator,
    results: Results,
    tensors: dict[str, Tensor | None],
) -> dict[str, Tensor]:
    """Gradients by ``backward``: reentrant checkpointing refuses ``torch.autograd.grad``."""
    operator.backward(results)
    return {
        f"d{name}": tensor.grad
        for name, tensor in tensors.items()
        if tensor is not None and tensor.grad is not None
    }


def _second_derivative(out: Tensor, tensors: dict[str, Tensor | None]) -> Iterator[Judged]:
    """A second derivative that is not there must not come out as 0."""
    leaves = [x for x in tensors.values() if x is not None and x.requires_grad]
    ones = torch.ones_like(out).requires_grad_()
    grads = torch.autograd.grad([out], leaves, [ones], create_graph=True)
    try:
        total = torch.stack([grad.float().square().sum() for grad in grads]).sum()
        torch.autograd.grad([total], leaves)
    except (NotImplementedError, RuntimeError):
        return
    yield Judged(
        kind=Kind.LAW, detail=("a second derivative came out, expected an error: there is none",)
    )


AUTOGRAD_CONTRACT = Check("autograd_contract", _run)
