"""torch_varlen: torch.nn.attention.varlen.varlen_attn, the public function."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from gradtruth.backends.peers.bands import band_reasons, common_reasons, widths
from gradtruth.backends.peers.compact import Compact
from gradtruth.backends.peers.installed import cuda_reasons, importable
from gradtruth.backends.peers.operands import aligned, finite_rows, halves_only, head_dims
from gradtruth.backends.peers.refusals import unable
from gradtruth.backends.peers.varlen import Varlen
from gradtruth.backends.protocol import Backend
from gradtruth.core.problem import Problem
from gradtruth.core.support import Reason, ReasonCode
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["create"]

_MODULE = "torch.nn.attention.varlen"


def create(name: str) -> Backend:
    """The one backend of this module."""
    return TorchVarlen(name)


class TorchVarlen(Varlen):
    """varlen_attn, which runs FlashAttention 2 and differentiates out, not lse.

    Its causal mask and windows end at the bottom right. Its lse is [H, tokens], whatever its docstring says.
    """

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Against all but plain attention in half precision, under any window."""
        missing = importable(_MODULE, "torch", ("varlen_attn", "AuxRequest"))
        return [
            *cuda_reasons(device.type, (8, 0)),
            *(missing or _window_reasons(problem)),
            *common_reasons(problem, "varlen_attn"),
            *unable(problem),
            *halves_only(problem),
            *head_dims(problem, 8, 256, equal=True),
            *band_reasons(problem, self.native, "windows"),
        ]

    def attend(self, problem: Problem, inputs: Inputs, tokens: Compact) -> tuple[Tensor, Tensor]:
        """out and lse of all tokens."""
        from torch.nn.attention import varlen

        known = signature(varlen.varlen_attn).parameters
        window = widths(problem)
        options: dict[str, Any] = (
            {"window_size": window} if "window_size" in known else {"is_causal": window[1] == 0}
        )
        if "enable_gqa" in known:
            options["enable_gqa"] = problem.group_size > 1
        out, lse = varlen.varlen_attn(
            aligned(tokens.queries(inputs.q)),
            aligned(tokens.keys(inputs.k)),
            aligned(tokens.keys(inputs.v)),
            tokens.cu_seqlens_q,
            tokens.cu_seqlens_kv,
            *tokens.longest,
            return_aux=varlen.AuxRequest(lse=True),
            scale=problem.scale,
            **options,
        )
        return out, finite_rows(lse.t())

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """By autograd, from a dout whose rows start at multiples of 16 bytes: any other ends the process."""
        return super().backward(problem, inputs, forward, aligned(dout), dlse, wanted)


def _window_reasons(problem: Problem) -> list[Reason]:
    """Releases before the one with ``window_size`` know ``is_causal`` only."""
    from torch.nn.attention import varlen

    if "window_size" in signature(varlen.varlen_attn).parameters:
        return []
    window = widths(problem)
    if window in ((-1, -1), (-1, 0)):
        return []
    text = f"window is {window}, and varlen_attn of torch {torch.__version__} has no window_size"
    return [Reason(ReasonCode.VERSION, text)]
