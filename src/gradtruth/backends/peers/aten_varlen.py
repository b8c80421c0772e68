"""aten_flash_varlen and aten_cudnn_varlen: the operators with variable lengths below torch's varlen attention.

Called directly, forward and backward, so the backward takes (out, lse) from anywhere.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from gradtruth.backends.peers.bands import band_reasons, common_reasons, widths
from gradtruth.backends.peers.compact import Compact
from gradtruth.backends.peers.installed import cuda_reasons
from gradtruth.backends.peers.operands import (
    aligned,
    finite_rows,
    halves_only,
    head_dims,
    infinite_rows,
)
from gradtruth.backends.peers.refusals import missing_operators, unable
from gradtruth.backends.peers.varlen import Varlen
from gradtruth.backends.peers.views import empty_grads, has_no_elements
from gradtruth.backends.protocol import Backend
from gradtruth.core.problem import Problem
from gradtruth.core.support import Claims, Reason
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["create"]

_Three = tuple[Tensor, Tensor, Tensor]


def create(name: str) -> Backend:
    """The backend of this name: aten_flash_varlen or aten_cudnn_varlen."""
    return AtenFlash(name) if name == "aten_flash_varlen" else AtenCudnn(name)


class _Aten(Varlen):
    """A pair of operators over tokens."""

    operators: tuple[str, str]

    @abstractmethod
    def differentiate(self, problem: Problem, tokens: Compact, given: tuple[Tensor, ...]) -> _Three:
        """dq, dk, dv of tokens, from dout, q, k, v, out [tokens, ...] and lse [tokens, H]."""

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """foreign_lse beside what follows from the adapter."""
        del problem, device
        return Claims(global_dropout=True, foreign_lse=True)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """The wanted gradients, from (out, lse) made here or elsewhere. Problems with a dlse are refused."""
        del dlse
        if has_no_elements(problem, inputs):
            return empty_grads(inputs, wanted)
        tokens = self.tokens(problem, inputs)
        if 0 in tokens.tokens:
            return empty_grads(inputs, wanted)
        given = (
            aligned(tokens.queries(dout)),
            *_operands(inputs, tokens),
            tokens.queries(forward.out).contiguous(),
            infinite_rows(tokens.rows(forward.lse)),
        )
        dq, dk, dv = self.differentiate(problem, tokens, given)
        return Grads(
            dq=tokens.store_queries(dq) if wanted.dq else None,
            dk=tokens.store_keys(dk) if wanted.dk else None,
            dv=tokens.store_keys(dv) if wanted.dv else None,
        )


def _operands(inputs: Inputs, tokens: Compact) -> _Three:
    return (
        aligned(tokens.queries(inputs.q)),
        aligned(tokens.keys(inputs.k)),
        aligned(tokens.keys(inputs.v)),
    )


class AtenFlash(_Aten):
    """aten::_flash_attention_forward and _backward, FlashAttention 2.

    Its backward takes no ALiBi slopes, though its forward does. lse is [H, tokens], +inf in rows without a key.
    """

    operators = ("_flash_attention_forward", "_flash_attention_backward")

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Against all but plain attention in half precision, under any window."""
        return [
            *cuda_reasons(device.type, (8, 0)),
            *missing_operators(self.operators),
            *common_reasons(problem, "the operator"),
            *unable(problem),
            *halves_only(problem),
            *head_dims(problem, 8, 256, equal=True),
            *band_reasons(problem, self.native, "windows"),
        ]

    def attend(self, problem: Problem, inputs: Inputs, tokens: Compact) -> tuple[Tensor, Tensor]:
        """out and lse of all tokens."""
        left, right = widths(problem)
        debug = False
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *_operands(inputs, tokens),
            tokens.cu_seqlens_q,
            tokens.cu_seqlens_kv,
            *tokens.longest,
            0.0,
            (left, right) == (-1, 0),
            debug,
            scale=problem.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, finite_rows(lse.t())

    def differentiate(self, problem: Problem, tokens: Compact, given: tuple[Tensor, ...]) -> _Three:
        """By the operator."""
        left, right = widths(problem)
        device = given[0].device
        return torch.ops.aten._flash_attention_backward(
            *given[:-1],
            given[-1].t().contiguous(),
            tokens.cu_seqlens_q,
            tokens.cu_seqlens_kv,
            *tokens.longest,
            0.0,
            (left, right) == (-1, 0),
            torch.zeros(2, dtype=torch.uint64, device=device),
            torch.empty(0, device=device),
            scale=problem.scale,
            window_size_left=left,
            window_size_right=right,
        )


class AtenCudnn(_Aten):
    """aten::_cudnn_attention_forward and _backward with cumulated lengths, cuDNN over ragged tensors.

    Its causal mask starts at the top left. It places out by the head dim of q and takes tensors as densely packed,
    so the dims must be equal. lse is [tokens, H, 1].
    """

    native = "top_left"
    operators = ("_cudnn_attention_forward", "_cudnn_attention_backward")

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Against all but plain attention in half precision, full or causal."""
        return [
            *cuda_reasons(device.type, (8, 0)),
            *missing_operators(self.operators),
            *common_reasons(problem, "the operator"),
            *unable(problem),
            *halves_only(problem),
            *head_dims(problem, 8, 128, equal=True),
            *band_reasons(problem, self.native, "causal"),
        ]

    def attend(self, problem: Problem, inputs: Inputs, tokens: Compact) -> tuple[Tensor, Tensor]:
        """out and lse of all tokens."""
        q, k, v = (x.contiguous() for x in _operands(inputs, tokens))
        compute_lse, debug = True, False
        out, lse, *_ = torch.ops.aten._cudnn_attention_forward(
            q,
            k,
            v,
            None,
            tokens.cu_seqlens_q,
            tokens.cu_seqlens_kv,
            *tokens.longest,
            compute_lse,
            0.0,
            problem.spec.right == 0,
            debug,
            scale=problem.scale,
        )
        return out, finite_rows(lse.reshape(q.shape[:2]))

    def differentiate(self, problem: Problem, tokens: Compact, given: tuple[Tensor, ...]) -> _Three:
        """By the operator."""
        state = torch.zeros((), dtype=torch.int64, device=given[0].device)
        return torch.ops.aten._cudnn_attention_backward(
            *(x.contiguous() for x in given[:-1]),
            given[-1].contiguous().unsqueeze(-1),
            state,
            state,
            None,
            tokens.cu_seqlens_q,
            tokens.cu_seqlens_kv,
            *tokens.longest,
            0.0,
            problem.spec.right == 0,
            scale=problem.scale,
        )
