"""Varlen: the parts that peers with autograd, which take tokens and lengths, have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gradtruth.backends.peers.bands import content_reasons, is_full
from gradtruth.backends.peers.compact import Compact, compact
from gradtruth.backends.peers.own_lse import own_lse
from gradtruth.backends.peers.rerun import differentiate
from gradtruth.backends.peers.views import (
    empty_forward,
    empty_grads,
    from_lse,
    has_no_elements,
    to_lse,
)
from gradtruth.core.mask import Alignment
from gradtruth.core.precision import full_precision
from gradtruth.core.problem import Problem
from gradtruth.core.support import Claims, Reason, Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted
from gradtruth.errors import UnsupportedProblem

__all__ = ["Varlen"]


class Varlen(ABC):
    """A peer that is called with all tokens and differentiated by autograd.

    Subclasses say what they cannot do and call the peer; this class finds the tokens, refuses what only lengths
    can tell, answers problems without a token, and runs the forward again in the backward. It does not claim
    foreign_lse, and reads the lengths on the host.
    """

    native: Alignment | None = "bottom_right"

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Everything against, from metadata."""

    @abstractmethod
    def attend(
        self, problem: Problem, inputs: Inputs, tokens: Compact
    ) -> tuple[Tensor, Tensor | None]:
        """Call the peer with tokens.

        Returns:
            out [tokens, H, Dv], and lse [tokens, H] in the contract's form; None where the peer has none.
        """

    def attend_dense(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor | None] | None:
        """Call the peer with full tensors, where it has a function for them; None where not.

        Returns:
            out in the storage layout, and lse [B, H, S]; None where the peer has none.
        """
        del problem, inputs
        return None

    def content(self, tokens: Compact) -> list[Reason]:
        """What only lengths can tell, of a problem against whose metadata nothing speaks."""
        return content_reasons(tokens, self.native)

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """Every reason that metadata can tell."""
        return Support(tuple(self.reasons(problem, device)))

    def supports_content(self, problem: Problem, inputs: Inputs) -> Support:
        """Every reason that lengths can tell; waits for the device."""
        if has_no_elements(problem, inputs) or is_full(problem):
            return Support()
        return Support(tuple(self.content(compact(problem, inputs))))

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """Only what follows from the adapter: there is no dropout, and the host waits where it packs tokens."""
        del device
        packs = type(self).attend_dense is Varlen.attend_dense or not is_full(problem)
        return Claims(global_dropout=True, no_sync=not packs)

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """out and lse."""
        if has_no_elements(problem, inputs):
            return self._empty(problem, inputs)
        with full_precision(problem, inputs.q.device):
            out, lse = self._run(problem, inputs)
        if lse is None:
            return Forward(out=out, lse=own_lse(problem, inputs))
        return Forward(out=out, lse=from_lse(lse.to(problem.accumulate_dtype), problem.layout))

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
        if has_no_elements(problem, inputs) or (
            not is_full(problem) and 0 in compact(problem, inputs).tokens
        ):
            return empty_grads(inputs, wanted)
        return differentiate(self._run, problem, inputs, dout, dlse, wanted)

    def _empty(self, problem: Problem, inputs: Inputs) -> Forward:
        found = empty_forward(problem, inputs)
        if problem.spec.sink and inputs.q.numel():
            return Forward(out=found.out, lse=own_lse(problem, inputs))
        return found

    def tokens(self, problem: Problem, inputs: Inputs) -> Compact:
        """The tokens; raises UnsupportedProblem with what only lengths can tell."""
        tokens = compact(problem, inputs)
        reasons = self.content(tokens)
        if reasons:
            raise UnsupportedProblem(f"{self.name}: {'; '.join(map(str, reasons))}")
        return tokens

    def _run(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """out in the storage layout and lse [B', H, S], recorded where gradients are wanted."""
        if is_full(problem):
            found = self.attend_dense(problem, inputs)
            if found is not None:
                return found
        tokens = self.tokens(problem, inputs)
        if 0 in tokens.tokens:
            empty = self._empty(problem, inputs)
            return empty.out, to_lse(empty.lse, problem.layout)
        out, lse = self.attend(problem, inputs, tokens)
        return tokens.store_queries(out), None if lse is None else tokens.store_rows(lse)
