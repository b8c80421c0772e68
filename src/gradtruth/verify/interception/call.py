"""Call: one attention call of a running program, and what a listener is told about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradtruth.arguments import Options, TensorArguments, inputs_of, max_seqlens, spec_of
from gradtruth.core.layout import split_packed
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs

__all__ = ["Answer", "Call", "Listener", "Meaning", "Translation", "Unseen", "meaning_of"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a call computes.

    Attributes:
        problem: the problem.
        inputs: its tensors, detached views of the caller's memory with the caller's strides.
        known_dropout: without dropout, or with the library's own mask from ``inputs.dropout_seed``. False: which
            weights were dropped is not known, and ``dropout_seed`` is 0 and means nothing.
    """

    problem: Problem
    inputs: Inputs
    known_dropout: bool


def meaning_of(
    tensors: TensorArguments, options: Options, *, known_dropout: bool = False
) -> Meaning:
    """What arguments in the words of ``gradtruth.attention`` mean.

    Raises:
        InvalidProblem: they contradict each other.
    """
    if tensors.dropout_seed is None:
        # A seed that is given keeps the program's generator as it is.
        tensors = tensors._replace(dropout_seed=0)
    spec = Spec.decode(spec_of(options, tensors))
    bounds = max_seqlens(options, tensors)
    detached: list[Any] = [x if x is None else x.detach() for x in inputs_of(options, tensors)]
    q, k, v, *rest = detached
    inputs = Inputs(*split_packed(spec.packing, q, k, v), *rest)
    problem = Problem.of(spec, inputs, *bounds)
    return Meaning(problem, inputs, known_dropout or spec.dropout_p in (0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """How one call of one entry point is understood, and how it is made with other tensors in place of its own.

    Attributes:
        meaning: what it computes.
        operands: the differentiable tensors that it reads, by a name of the entry point's own.
        run: makes the call, with these in place of the operands.
        gradients: from gradients of operands to dq, dk, dv, dbias, dsoftmax_offset in the problem's layout; what
            is None is left out.
        outputs: out and lse (or None) of what the call returned, as it returned them.
        out, lse: one of these, or a gradient of it, as a view in the problem's layout.
    """

    meaning: Meaning
    operands: Mapping[str, Tensor]
    run: Callable[[Mapping[str, Tensor]], Any]
    gradients: Callable[[Mapping[str, Tensor | None]], dict[str, Tensor]]
    outputs: Callable[[Any], tuple[Tensor, Tensor | None]]
    out: Callable[[Tensor], Tensor] = lambda x: x
    lse: Callable[[Tensor], Tensor] = lambda x: x


@dataclass(frozen=True, slots=True)
class Unseen:
    """A call that could not be looked at.

    Attributes:
        entry, layer: which.
        reason: why.
    """

    entry: str
    layer: str
    reason: str

    def __str__(self) -> str:
        where = f" in {self.layer}" if self.layer else ""
        return f"{self.entry}{where} is not seen: {self.reason}"


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call, before it is made.

    Attributes:
        entry: name of the entry point, as in ``table.ENTRIES``.
        layer: qualified name of the innermost module that makes it; "" outside every module.
        meaning: what it computes.
        differentiable: a backward can follow.
        recomputed: it is made inside a backward: by activation checkpointing.
    """

    entry: str
    layer: str
    meaning: Meaning
    differentiable: bool
    recomputed: bool
    versions: tuple[int, ...] = field(repr=False)

    @property
    def problem(self) -> Problem:
        """What it computes."""
        return self.meaning.problem

    @property
    def spec(self) -> Spec:
        """The size-free part of it."""
        return self.meaning.problem.spec

    @property
    def inputs(self) -> Inputs:
        """Its tensors: views of the caller's memory."""
        return self.meaning.inputs

    @property
    def known_dropout(self) -> bool:
        """See ``Meaning``."""
        return self.meaning.known_dropout

    @cached_property
    def label(self) -> str:
        """Layer and entry point in words."""
        return f"{self.layer or 'no module'} ({self.entry})"

    def intact(self) -> bool:
        """Whether the inputs still hold what they held: nothing wrote to them since."""
        return self.versions == versions_of(self.inputs)


def versions_of(inputs: Inputs) -> tuple[int, ...]:
    """How often each tensor was written to; inference tensors do not count."""
    return tuple(
        0 if tensor.is_inference() else tensor._version
        for _, tensor in inputs.items()
        if isinstance(tensor, torch.Tensor)
    )


class Answer(Enum):
    """What ``on_call`` may say of a call beside a Listener and None."""

    INSIDE = "not this one, but the calls that it makes itself"


class Listener:
    """What is told about a call whose ``on_call`` returned this. The methods do nothing; override some.

    Attributes:
        wants_gradients: operands go through an identity, and ``backward`` gets their gradients. Without it
            ``backward`` is called with dout and dlse alone, before the call's own backward runs.
    """

    wants_gradients: bool = True

    def forward(self, out: Tensor, lse: Tensor | None) -> None:
        """After the forward.

        Args:
            out: detached, in the problem's layout.
            lse: where the entry point returns one.
        """

    def backward(
        self, dout: Tensor | None, dlse: Tensor | None, grads: Mapping[str, Tensor]
    ) -> None:
        """In the backward; in each one, where there are several.

        Args:
            dout: gradient of out, in the problem's layout, strides as they are; None where out got none.
            dlse: gradient of lse, None where it got none.
            grads: dq, dk, dv and, where there is such an input, dbias and dsoftmax_offset: of this call alone.
                Missing where autograd was not asked for it.
        """
