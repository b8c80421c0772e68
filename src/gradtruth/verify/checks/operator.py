"""The library's operator pair on a case, by a backend's name: differentiable, compilable, under checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gradtruth.backends import ORDER, get
from gradtruth.core.tensors import Inputs
from gradtruth.ops import attend
from gradtruth.verify.cases import storage
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.subject import Subject

__all__ = ["Operator", "Results", "operator_of"]

Results = tuple[Tensor, Tensor, Tensor | None]
Call = Callable[..., Results]

_DIFFERENTIABLE = ("q", "k", "v", "bias", "softmax_offset")


class Operator:
    """A case as the operator takes it.

    Attributes:
        leaves: what has a gradient: q, k, v, and bias and softmax_offset where the case has them.
        call: inputs, in the order of their names in ``Inputs``, to out, lse and max_logit.
    """

    def __init__(self, case: Case, backend: str) -> None:
        self._case = case
        problem = case.problem
        options = (problem.max_seqlen_q, problem.max_seqlen_kv, problem.spec.encode(), backend)

        def call(*tensors: Tensor | None) -> Results:
            return attend(None, options, tensors)

        self.call: Call = call
        self.leaves = tuple(
            name for name in _DIFFERENTIABLE if getattr(case.inputs, name) is not None
        )

    def tensors(self, wanted: Sequence[str]) -> dict[str, Tensor | None]:
        """Fresh inputs by name, strides as in the case; those of ``wanted`` require a gradient."""
        bases, views = storage.split(dict(self._case.inputs.items()))
        copies = storage.join({name: base.clone() for name, base in bases.items()}, views)
        found = {name: copies.get(name) for name in Inputs.__dataclass_fields__}
        for name in wanted:
            tensor = found[name]
            if tensor is not None:
                tensor.requires_grad_()
        return found

    def gradients(
        self,
        results: Results,
        tensors: Mapping[str, Tensor | None],
        *,
        retain: bool = False,
    ) -> dict[str, Tensor]:
        """dq, dk ... of the leaves that require one.

        Args:
            results: of ``call``.
            tensors: that it was given.
            retain: keep the graph.
        """
        leaves = {name: x for name, x in tensors.items() if x is not None and x.requires_grad}
        ends, given = self._ends(results)
        grads = torch.autograd.grad(ends, list(leaves.values()), given, retain_graph=retain)
        return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}

    def backward(self, results: Results) -> None:
        """Leave the gradients in ``.grad`` of the leaves."""
        ends, given = self._ends(results)
        torch.autograd.backward(ends, given)

    def _ends(self, results: Results) -> tuple[list[Tensor], list[Tensor]]:
        """Results with a gradient, and their gradients, which are copies as the inputs are."""
        out, lse, _ = results
        case = self._case.to(self._case.device)
        if case.dlse is None:
            return [out], [case.dout]
        return [out, lse], [case.dout, case.dlse]


def operator_of(subject: Subject) -> Operator | None:
    """The operator for a subject whose backend the library knows by name; None for any other object."""
    backend = subject.backend
    if backend.name not in ORDER or get(backend.name) is not backend:
        return None
    return Operator(subject.case, backend.name)
