"""sdpa_nested: torch's scaled_dot_product_attention on jagged nested tensors."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from gradtruth.backends.peers.bands import band_reasons, common_reasons
from gradtruth.backends.peers.compact import Compact
from gradtruth.backends.peers.operands import aligned
from gradtruth.backends.peers.refusals import unable
from gradtruth.backends.peers.varlen import Varlen
from gradtruth.backends.protocol import Backend
from gradtruth.core.problem import Problem
from gradtruth.core.support import Reason, ReasonCode
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["create"]


def create(name: str) -> Backend:
    """The one backend of this module."""
    return SdpaNested(name)


class SdpaNested(Varlen):
    """Jagged SDPA. torch picks the kernel: flash or memory-efficient on CUDA, the plain one where these cannot.

    The fused kernels' causal masks have different corners, so causal needs equal lengths; the plain kernel has no
    causal mask and computes in the input dtype: half-precision inputs are widened for it. No lse is
    returned: the one reported is computed from the scores again.
    """

    native = None

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Against GQA, windows and, on the CPU, causal."""
        found = [
            *common_reasons(problem, "SDPA of nested tensors"),
            *unable(problem),
            *band_reasons(problem, self.native, "causal"),
        ]
        if device.type not in ("cpu", "cuda"):
            text = f"device is {device.type}, CPU or CUDA is needed"
            found.append(Reason(ReasonCode.DEVICE, text))
        if not hasattr(torch.nested, "nested_tensor_from_jagged"):
            text = f"torch {torch.__version__} has no torch.nested.nested_tensor_from_jagged"
            found.append(Reason(ReasonCode.VERSION, text))
        if problem.group_size > 1:
            text = f"{problem.group_size} query heads share a KV head, only 1 where gradients are wanted"
            found.append(Reason(ReasonCode.HEADS, text))
        if not problem.spec.band.open:
            found += _causal_reasons(problem, device)
        if device.type == "cuda":
            found += _cuda_reasons(problem)
        return found

    def content(self, tokens: Compact) -> list[Reason]:
        """Empty sequences are for the plain kernel alone, which has no causal mask."""
        found = super().content(tokens)
        lengths = (*tokens.lengths_q, *tokens.lengths_kv)
        if 0 in lengths and not tokens.problem.spec.band.open:
            text = "a sequence is empty, and the kernels with a causal mask take none"
            found.append(Reason(ReasonCode.LENGTHS, text))
        return found

    def attend(self, problem: Problem, inputs: Inputs, tokens: Compact) -> tuple[Tensor, None]:
        """out of all tokens."""
        plain = inputs.q.device.type == "cpu" or 0 in (*tokens.lengths_q, *tokens.lengths_kv)
        wide = problem.accumulate_dtype if plain else inputs.q.dtype
        q = _nested(tokens.queries(inputs.q).to(wide), tokens.cu_seqlens_q, tokens.lengths_q)
        k, v = (
            _nested(tokens.keys(x).to(wide), tokens.cu_seqlens_kv, tokens.lengths_kv)
            for x in (inputs.k, inputs.v)
        )
        with warnings.catch_warnings():
            # torch says once a process that nested tensors are a prototype; who named this backend knows.
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=problem.spec.right == 0, scale=problem.scale
            )
        return out.transpose(1, 2).values().to(inputs.q.dtype), None

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """By autograd; on CUDA from a dout whose rows start at multiples of 16 bytes: any other ends the process."""
        given = aligned(dout) if dout.device.type == "cuda" else dout
        return super().backward(problem, inputs, forward, given, dlse, wanted)


def _causal_reasons(problem: Problem, device: torch.device) -> list[Reason]:
    if device.type == "cpu":
        text = "mask is causal, and the plain kernel, the only one on a CPU, takes none"
        return [Reason(ReasonCode.MASK, text)]
    if problem.dtype == "float64":
        text = "mask is causal and dtype float64, and the kernels with a causal mask take up to float32"
        return [Reason(ReasonCode.DTYPE, text)]
    return []


def _cuda_reasons(problem: Problem) -> list[Reason]:
    """Head dims that the fused kernels do not take would leave half precision to the plain kernel."""
    step = {"float32": 4, "float64": 1}.get(problem.dtype, 8)
    return [
        Reason(
            ReasonCode.HEAD_DIM,
            f"{name} is {getattr(problem, name)}, a multiple of {step} is needed",
        )
        for name in ("head_dim_qk", "head_dim_v")
        if getattr(problem, name) % step
    ]


def _nested(tokens: Tensor, offsets: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """[tokens, H, D] as a jagged [B, H, j, D]. The plain kernel wants the tokens contiguous, the others aligned."""
    found = torch.nested.nested_tensor_from_jagged(
        aligned(tokens).contiguous(),
        offsets.long(),
        min_seqlen=min(lengths),
        max_seqlen=max(lengths),
    )
    return found.transpose(1, 2)
