"""fla: parallel_attn of flash-linear-attention, its causal softmax attention in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtruth.backends.peers.bands import band_reasons, common_reasons
from gradtruth.backends.peers.compact import Compact
from gradtruth.backends.peers.installed import library_on_cuda
from gradtruth.backends.peers.operands import halves_only
from gradtruth.backends.peers.refusals import unable
from gradtruth.backends.peers.varlen import Varlen
from gradtruth.backends.protocol import Backend
from gradtruth.core.layout import canonical, stored
from gradtruth.core.problem import Problem
from gradtruth.core.scores import sink_logit
from gradtruth.core.support import Reason, ReasonCode
from gradtruth.core.tensors import Inputs

__all__ = ["create"]

_MODULE, _PROJECT = "fla.ops.attn.parallel", "flash-linear-attention"


def create(name: str) -> Backend:
    """The one backend of this module."""
    return Fla(name)


class Fla(Varlen):
    """parallel_attn: causal self-attention with GQA, sliding windows, a learnable sink with a gradient, D != Dv.

    It returns no lse: the one reported is computed from the scores again. In fp32 its products are TF32.
    """

    native = None

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Against all masks but causal ones over equal lengths, softcap, bias, fp32."""
        found = library_on_cuda(device.type, (8, 0), _MODULE, _PROJECT, ("parallel_attn",))
        found += common_reasons(problem, "parallel_attn")
        found += unable(problem, (ReasonCode.SOFTMAX,))
        found += halves_only(problem)
        found += band_reasons(problem, self.native, "causal windows")
        if problem.spec.band.open:
            found.append(Reason(ReasonCode.MASK, "mask is not causal, and parallel_attn always is"))
        for name in ("head_dim_qk", "head_dim_v"):
            value = getattr(problem, name)
            if value > 128:
                # Its tiles ask for 240 to 256 KiB of shared memory at 192 and 256.
                text = f"{name} is {value}, up to 128 fits in shared memory"
                found.append(Reason(ReasonCode.HEAD_DIM, text))
        return found

    def attend(self, problem: Problem, inputs: Inputs, tokens: Compact) -> tuple[Tensor, None]:
        """One batch entry with all tokens."""
        q, k, v = (
            x.unsqueeze(0)
            for x in (tokens.queries(inputs.q), tokens.keys(inputs.k), tokens.keys(inputs.v))
        )
        out = _call(problem, inputs, (q, k, v), tokens.cu_seqlens_q.long())
        return out.squeeze(0), None

    def attend_dense(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, None]:
        """[B, S, H, D]."""
        layout = problem.layout
        q, k, v = (canonical(x, layout) for x in (inputs.q, inputs.k, inputs.v))
        return stored(_call(problem, inputs, (q, k, v), None), layout).contiguous(), None


def _call(
    problem: Problem,
    inputs: Inputs,
    tensors: tuple[Tensor, Tensor, Tensor],
    cu_seqlens: Tensor | None,
) -> Tensor:
    from fla.ops.attn.parallel import parallel_attn

    spec = problem.spec
    return parallel_attn(
        *tensors,
        scale=problem.scale,
        window_size=None if spec.left is None else spec.left + 1,
        cu_seqlens=cu_seqlens,
        sink_bias=sink_logit(problem, inputs),
    )
