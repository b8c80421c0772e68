"""Any function as a backend: ``module:function``, called in the words of ``gradtruth.attention``."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor

from gradtruth.backends.peers.keywords import KEYWORD_CODES, keywords_of, unsayable
from gradtruth.backends.peers.located import located
from gradtruth.backends.peers.own_lse import own_lse
from gradtruth.backends.peers.rerun import differentiate
from gradtruth.backends.peers.views import from_lse, to_lse
from gradtruth.backends.protocol import Backend
from gradtruth.core.problem import Problem
from gradtruth.core.support import Claims, Reason, ReasonCode, Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted
from gradtruth.errors import InvalidProblem, UnsupportedProblem

__all__ = ["Function", "of"]


def of(text: str) -> Backend:
    """The backend that a text names: an object that is one, or a function that becomes one.

    Args:
        text: "module:name" or "file.py:name"; a name may have dots.

    Raises:
        InvalidProblem: no such module, no such name in it, or what it names is neither; says what was expected.
    """
    found = located(text)
    if isinstance(found, type):
        raise InvalidProblem(
            f"backend is {text!r}, which is a class, expected a function or an object with a backend's methods"
        )
    if isinstance(found, Backend):
        return found
    if not callable(found):
        raise InvalidProblem(
            f"backend is {text!r}, which is {type(found).__name__}, expected a function or a backend"
        )
    return Function(text, found)


class Function:
    """A function (query, key, value, **keywords) -> out or (out, lse), differentiated by autograd.

    It gets exactly the keywords of ``gradtruth.attention`` that the problem has beyond their defaults, in the same
    meaning and shapes; a problem whose keyword it does not take is refused. lse has its public form. Where it
    returns out alone, the lse reported is the definition's, and gradients of lse are refused.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function
        self._signature = _signature(function)

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """A reason for every keyword that the function does not take. It is not called."""
        found = unsayable(problem)
        if device.type == "meta":
            found.append(Reason(ReasonCode.DEVICE, "device is meta, whose tensors have no values"))
        if not found:
            found += self._untaken(keywords_of(problem, None))
        return Support(tuple(found))

    def supports_content(self, problem: Problem, inputs: Inputs) -> Support:
        """A reason for keywords that only tensors tell: storage offsets of thd."""
        return Support(tuple(self._untaken(keywords_of(problem, inputs))))

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """That a function which is told the seed draws the stateless mask; nothing else."""
        del device
        told = problem.spec.dropout_p in (0.0, 1.0) or self._takes("dropout_seed")
        return Claims(global_dropout=told)

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """out as it was returned, and lse."""
        out, lse = self._call(problem, inputs)
        if lse is None:
            return Forward(out=out.contiguous(), lse=own_lse(problem, inputs))
        return Forward(
            out=out.contiguous(), lse=from_lse(to_lse(lse, problem.layout), problem.layout)
        )

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """The wanted gradients, by autograd; ``forward`` is not read."""
        del forward

        def run(p: Problem, given: Inputs) -> tuple[Tensor, Tensor | None]:
            out, lse = self._call(p, given)
            return out, None if lse is None else to_lse(lse, p.layout)

        return differentiate(run, problem, inputs, dout, dlse, wanted)

    def _call(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        keywords = keywords_of(problem, inputs)
        untaken = self._untaken(keywords)
        if untaken:
            raise UnsupportedProblem(f"{self.name}: {'; '.join(map(str, untaken))}")
        found = self._function(inputs.q, inputs.k, inputs.v, **keywords)
        pair = found if isinstance(found, tuple | list) else (found, None)
        if len(pair) != 2 or not isinstance(pair[0], Tensor):
            raise InvalidProblem(
                f"{self.name} returned {_described(found)}, expected out or (out, lse)"
            )
        out, lse = pair
        if lse is None and problem.spec.lse_grad:
            text = "lse may receive a gradient, and the function returns out alone"
            raise UnsupportedProblem(f"{self.name}: {text}")
        if out.shape != (*inputs.q.shape[:-1], problem.head_dim_v):
            raise InvalidProblem(
                f"{self.name} returned out with shape {list(out.shape)}, expected "
                f"{[*inputs.q.shape[:-1], problem.head_dim_v]}"
            )
        return out, lse

    def _takes(self, name: str) -> bool:
        if self._signature is None:
            return True
        found = self._signature.parameters
        if name in found:
            return found[name].kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        return any(p.kind is Parameter.VAR_KEYWORD for p in found.values())

    def _untaken(self, keywords: dict[str, Any]) -> list[Reason]:
        found = [
            Reason(KEYWORD_CODES[name], f"the function takes no {name}{_value(value)}")
            for name, value in keywords.items()
            if not self._takes(name)
        ]
        if found or self._signature is None:
            return found
        try:
            self._signature.bind(None, None, None, **keywords)
        except TypeError as error:
            text = f"the function {self._signature} does not take (query, key, value) and the keywords: {error}"
            return [Reason(ReasonCode.VERSION, text)]
        return []


def _signature(function: Callable[..., Any]) -> Signature | None:
    """None where Python cannot tell, as for some functions written in C."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return signature(target)
    except (TypeError, ValueError):
        return None


def _value(value: object) -> str:
    """A keyword's value where it is short."""
    return (
        f", which is {value!r}"
        if isinstance(value, str | int | float | tuple)
        and (not isinstance(value, tuple) or all(isinstance(x, int) for x in value))
        else ""
    )


def _described(found: object) -> str:
    if isinstance(found, tuple | list):
        return f"({', '.join(type(x).__name__ for x in found)})"
    return type(found).__name__
