"""compile_equals_eager: a compiled call gives what an eager one gives, for several lengths from one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradtruth.errors import UnsupportedProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.again import same
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.operator import Operator, operator_of
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.variants import variant
from gradtruth.verify.checks.verdicts import bits, unanswered
from gradtruth.verify.findings import Kind

__all__ = ["COMPILE_EQUALS_EAGER"]

_COMPILER: Any = "aot_eager"


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """A compiled backward wrote dK with the layout of a contiguous tensor: K.grad was garbage for a slice.

    pytorch/pytorch#146377. The library's operator is compiled without a graph break, for the backend asked for:
    forward, backward, and where no tensor but q has a row per query, one query less from the same graph.
    """
    operator, missing = operator_of(subject), unanswered(subject)
    if missing is not None or operator is None:
        yield missing or NotReached("it is no backend of this library by name")
        return
    torch.compiler.reset()
    try:
        yield from _compared(subject, operator)
    except UnsupportedProblem as error:
        yield NotReached(str(error).splitlines()[0])
    except Exception as error:  # noqa: BLE001 - that it raises is the finding
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        yield Judged(kind=Kind.RAISED, detail=(f"compiled: {text}",))
    finally:
        torch.compiler.reset()


def _compared(subject: Subject, operator: Operator) -> Iterator[Judged]:
    compiled = torch.compile(operator.call, fullgraph=True, dynamic=True, backend=_COMPILER)
    fewer = _one_query_less(subject.case)
    if fewer is not None and subject.supports(fewer) is None:
        part = Operator(fewer, subject.backend.name)
        found, eager = (_results(part, call) for call in (compiled, operator.call))
        if subject.claims.deterministic:
            yield from bits(found, eager, "the eager call of one query less, compiled", "pure")
    found = _results(operator, compiled)
    expected = {name: x for name, x in subject.first.tensors.items() if name in found}
    yield from same(subject, found, expected, "the eager call, compiled")


def _results(operator: Operator, call: Callable[..., Any]) -> dict[str, Tensor]:
    """out, lse and gradients."""
    tensors = operator.tensors(operator.leaves)
    results = call(*tensors.values())
    grads = operator.gradients(results, tensors)
    return {"out": results[0].detach(), "lse": results[1].detach(), **grads}


def _one_query_less(case: Case) -> Case | None:
    """The case without its last query, None where other tensors go by queries too."""
    spec, problem = case.problem.spec, case.problem
    dense = spec.layout != "thd" and spec.lengths == "full" and problem.seqlen_q > 2
    if not dense or case.dlse is not None or spec.bias != "none" or spec.arbitrary:
        return None
    dim = 1 if problem.layout == "bshd" else 0
    rows = problem.seqlen_q - 1
    shorter = {"q": case.inputs.q, "dout": case.dout}
    return variant(case, {name: x.narrow(dim, 0, rows) for name, x in shorter.items()})


COMPILE_EQUALS_EAGER = Check("compile_equals_eager", _run, quick=False, once=True)
