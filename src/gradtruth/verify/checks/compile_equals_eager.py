"""compile_equals_eager: a compiled call gives what an eager one gives, for several lengths from one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradtruth.api import attention
from gradtruth.backends import ORDER
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import differences, unanswered
from gradtruth.verify.findings import Kind

__all__ = ["COMPILE_EQUALS_EAGER"]


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """A compiled backward wrote dK with the layout of a contiguous tensor: K.grad was garbage for a slice.

    pytorch/pytorch#146377. The library's own operator is compiled without a graph break, for the backend asked for.
    """
    reason = _not_reached(subject)
    missing = NotReached(reason) if reason else unanswered(subject)
    if missing is not None:
        yield missing
        return
    torch.compiler.reset()
    compiled = torch.compile(_call(subject), fullgraph=True, backend="aot_eager")
    for rows in (subject.case.problem.seqlen_q - 1, subject.case.problem.seqlen_q):
        try:
            eager, found = (
                _results(call, subject.case, rows) for call in (_call(subject), compiled)
            )
        except Exception as error:  # noqa: BLE001 - that it raises is the finding
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Judged(kind=Kind.RAISED, detail=(f"compiled, {rows} queries: {text}",))
            return
    yield from differences(subject, found, eager, "the eager call, compiled")


def _not_reached(subject: Subject) -> str | None:
    spec = subject.case.problem.spec
    if subject.backend.name not in ORDER:
        return "it is no backend of this library by name"
    plain = spec.layout != "thd" and spec.lengths == "full" and spec.bias == "none"
    plain &= not (spec.arbitrary or spec.alibi or spec.dropout_p or spec.softmax == "learnable")
    if not plain or subject.case.problem.seqlen_q < 3:
        return "it is asked of dense tensors with a plain mask"
    return None


def _call(subject: Subject) -> Callable[..., Tensor]:
    spec, name = subject.case.problem.spec, subject.backend.name
    options: dict[str, Any] = {
        "qkv_format": spec.layout,
        "window_size": tuple(-1 if bound is None else bound for bound in (spec.left, spec.right)),
        "attn_mask_type": "no_mask",
        "bottom_right_diagonal": spec.alignment == "bottom_right",
        "softmax_scale": spec.scale,
        "softcap": spec.softcap,
        "softmax_type": spec.softmax,
    }

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, backend=name, **options)

    return call


def _results(call: Callable[..., Any], case: Case, rows: int) -> dict[str, Tensor]:
    """out and gradients for the first ``rows`` queries."""
    dim = 1 if case.problem.layout == "bshd" else 0
    q, k, v = (
        tensor.detach().clone().requires_grad_()
        for tensor in (case.inputs.q.narrow(dim, 0, rows), case.inputs.k, case.inputs.v)
    )
    out = call(q, k, v)
    out.backward(case.dout.narrow(dim, 0, rows))
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


COMPILE_EQUALS_EAGER = Check("compile_equals_eager", _run, quick=False, once=True)
