"""reference: the whole contract in fp32 (fp64), blocked over queries, in plain torch on any device.

README.md beside this file derives what is computed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.backends.reference.backward import differentiate
from gradtruth.backends.reference.forward import attend
from gradtruth.core.problem import Problem
from gradtruth.core.sequences import known_on_host
from gradtruth.core.support import DEFAULT_CLAIMS, Claims, Support, anywhere
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["Reference", "create"]


class Reference:
    """Every problem on every device, in O(rows x T) memory beyond inputs and outputs.

    Cannot: nothing in the contract. It is slow on a GPU when sequences are ragged, because each is computed
    as if it filled its storage (or max_seqlen) rather than read a length on the host.

    Numerics: every intermediate is fp32 (fp64), P and dS included; out and each gradient are rounded once.
    """

    name = "reference"

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """Everything, on any device whose tensors have values."""
        return anywhere(device)

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """All; batch invariance where the host knows the lengths, so that a sequence has its own shapes."""
        return replace(DEFAULT_CLAIMS, batch_invariant=known_on_host(problem, device))

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """See ``forward.attend``."""
        return attend(problem, inputs)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """See ``backward.differentiate``."""
        return differentiate(problem, inputs, forward, dout, dlse, wanted)


def create(name: str) -> Reference:
    """The backend."""
    return Reference()
