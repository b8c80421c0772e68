"""The fused kernels of torch's SDPA on CUDA: flash, memory-efficient and cuDNN."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gradtruth.backends.peers.places import additive_mask, places_of, plain_mask
from gradtruth.backends.peers.refusals import missing_operators, unable
from gradtruth.backends.peers.views import from_heads_first, from_lse, heads_first, to_lse
from gradtruth.core.problem import Problem
from gradtruth.core.support import Claims, Reason, ReasonCode
from gradtruth.core.tensors import Forward, Inputs

__all__ = ["CudnnCuda", "EfficientCuda", "FlashCuda"]

_HALVES = ("bfloat16", "float16")
# The first says that dq may be summed with atomic additions, the others that only this much was examined.
_CLAIMS = Claims(global_dropout=True, foreign_lse=True, no_sync=True)


def _common(problem: Problem, name: str, capability: tuple[int, int]) -> list[Reason]:
    """Reasons of all three: operators, device, scale."""
    found = missing_operators(
        (f"_scaled_dot_product_{name}", f"_scaled_dot_product_{name}_backward")
    )
    if not torch.cuda.is_available():
        found.append(Reason(ReasonCode.DEVICE, "no CUDA device is present, one is needed"))
    elif torch.cuda.get_device_capability() < capability:
        have, need = (
            ".".join(map(str, c)) for c in (torch.cuda.get_device_capability(), capability)
        )
        found.append(Reason(ReasonCode.DEVICE, f"compute capability is {have}, {need} is needed"))
    if problem.scale <= 0:
        text = f"softmax_scale is {problem.scale:g}, it must be positive: the kernel hides by -inf before it scales"
        found.append(Reason(ReasonCode.SOFTMAX, text))
    return found


def _halves_only(problem: Problem) -> list[Reason]:
    if problem.dtype in _HALVES:
        return []
    return [
        Reason(ReasonCode.DTYPE, f"dtype is {problem.dtype}, only bfloat16 and float16 are taken")
    ]


def _square_masks(problem: Problem) -> list[Reason]:
    """Against masks other than none and causal over as many queries as keys."""
    kind = plain_mask(problem)
    if kind is None:
        text = f"mask is {problem.spec.mask_label()}, only none and causal over full sequences are taken"
        return [Reason(ReasonCode.MASK, text)]
    if kind == "causal" and problem.seqlen_q != problem.seqlen_kv:
        text = f"causal with {problem.seqlen_q} queries and {problem.seqlen_kv} keys, they must be equally many"
        return [Reason(ReasonCode.MASK, text)]
    return []


def _divisible(problem: Problem, step: int, limit: int) -> list[Reason]:
    """Against head dims that are no multiple of a step or above a limit."""
    found = []
    for name in ("head_dim_qk", "head_dim_v"):
        value = getattr(problem, name)
        if value % step or value > limit:
            text = f"{name} is {value}, a multiple of {step} up to {limit} is needed"
            found.append(Reason(ReasonCode.HEAD_DIM, text))
    return found


def _equal_dims(problem: Problem) -> list[Reason]:
    if problem.head_dim_qk == problem.head_dim_v:
        return []
    text = f"head_dim_qk is {problem.head_dim_qk} and head_dim_v {problem.head_dim_v}, they must be equal"
    return [Reason(ReasonCode.HEAD_DIM, text)]


def _no_groups(problem: Problem, why: str) -> list[Reason]:
    """Against GQA where dk and dv of a group are not summed in fp32 before they are rounded."""
    if problem.group_size <= 1:
        return []
    return [
        Reason(ReasonCode.HEADS, f"{problem.group_size} query heads share a KV head, only 1: {why}")
    ]


def _operands(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [B', H, S, D], last dim contiguous, every other stride a multiple of 16 bytes."""
    q, k, v = (
        _aligned(heads_first(x, problem.spec.layout)) for x in (inputs.q, inputs.k, inputs.v)
    )
    return q, k, v


def _aligned(tensor: Tensor) -> Tensor:
    item = tensor.element_size()
    outer = tensor.stride()[:3]
    if (
        tensor.stride(3) == 1
        and tensor.data_ptr() % 16 == 0
        and all(s and s * item % 16 == 0 for s in outer)
    ):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _random_state(device: torch.device) -> Tensor:
    """A stand-in for the generator state, which is not read without dropout."""
    return torch.zeros((), dtype=torch.int64, device=device)


class FlashCuda:
    """aten::_scaled_dot_product_flash_attention, FlashAttention 2."""

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Against everything but plain attention in half precision without GQA."""
        del device
        return [
            *_common(problem, "flash_attention", (8, 0)),
            *unable(problem),
            *_halves_only(problem),
            *_divisible(problem, 8, 256),
            *_equal_dims(problem),
            *_no_groups(problem, "dk and dv of each head are rounded before the group is summed"),
            *_square_masks(problem),
        ]

    def claims(self, problem: Problem) -> Claims:
        """The same for every problem."""
        del problem
        return _CLAIMS

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """out and lse in their public form."""
        layout = problem.spec.layout
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *_operands(problem, inputs), 0.0, plain_mask(problem) == "causal", scale=problem.scale
        )
        return from_heads_first(out, layout), from_lse(lse, layout)

    def backward(
        self, problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the storage layout."""
        layout = problem.spec.layout
        state = _random_state(inputs.q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            _aligned(heads_first(dout, layout)),
            *_operands(problem, inputs),
            heads_first(forward.out, layout),
            to_lse(forward.lse, layout),
            None,
            None,
            problem.seqlen_q,
            problem.seqlen_kv,
            0.0,
            plain_mask(problem) == "causal",
            state,
            state,
            scale=problem.scale,
        )
        return (
            from_heads_first(dq, layout),
            from_heads_first(dk, layout),
            from_heads_first(dv, layout),
        )


class CudnnCuda:
    """aten::_scaled_dot_product_cudnn_attention."""

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Against everything but plain attention in half precision without GQA."""
        del device
        found = [
            *_common(problem, "cudnn_attention", (8, 0)),
            *unable(problem),
            *_halves_only(problem),
            *_divisible(problem, 8, 128),
            *_no_groups(problem, "where dk and dv of a group are rounded is not documented"),
            *_square_masks(problem),
        ]
        if problem.seqlen_kv == 1:
            found.append(Reason(ReasonCode.SIZE, "seqlen_kv is 1, at least 2 is needed"))
        return found

    def claims(self, problem: Problem) -> Claims:
        """The same for every problem."""
        del problem
        return _CLAIMS

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """out and lse in their public form."""
        layout = problem.spec.layout
        q, k, v = _operands(problem, inputs)
        compute_lse = True
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, compute_lse, 0.0, plain_mask(problem) == "causal", scale=problem.scale
        )
        return from_heads_first(out, layout), from_lse(lse.reshape(q.shape[:3]), layout)

    def backward(
        self, problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the storage layout."""
        layout = problem.spec.layout
        state = _random_state(inputs.q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            _aligned(heads_first(dout, layout)),
            *_operands(problem, inputs),
            heads_first(forward.out, layout),
            to_lse(forward.lse, layout).unsqueeze(-1),
            state,
            state,
            None,
            None,
            None,
            problem.seqlen_q,
            problem.seqlen_kv,
            0.0,
            plain_mask(problem) == "causal",
            scale=problem.scale,
        )
        return (
            from_heads_first(dq, layout),
            from_heads_first(dk, layout),
            from_heads_first(dv, layout),
        )


class EfficientCuda:
    """aten::_scaled_dot_product_efficient_attention, CUTLASS' memory-efficient attention.

    It knows no GQA: KV heads are repeated, and in fp32 the group is summed here. Masks other than top-left causal
    are passed as an additive S x T tensor in the input dtype, in which 0 and -inf are exact.
    """

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Against bias, fp64, and in half precision GQA and ALiBi."""
        del device
        half = problem.dtype in _HALVES
        able = () if half else (ReasonCode.ALIBI,)
        found = [
            *_common(problem, "efficient_attention", (5, 0)),
            *unable(problem, able),
            *_divisible(problem, 8 if half else 4, 65536),
        ]
        if problem.dtype == "float64":
            found.append(Reason(ReasonCode.DTYPE, "dtype is float64, up to float32 is taken"))
        if half:
            found += _no_groups(
                problem, "dk and dv of each head are rounded before the group is summed"
            )
        return found

    def claims(self, problem: Problem) -> Claims:
        """The same for every problem."""
        del problem
        return _CLAIMS

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """out and lse in their public form."""
        layout = problem.spec.layout
        q, k, v = _repeated(problem, inputs)
        mask = _padded_mask(problem, inputs)
        compute_lse = True
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, compute_lse, 0.0, plain_mask(problem) == "causal", scale=problem.scale
        )
        lse = lse[:, :, : q.shape[2]]
        if mask is not None:
            seen = (mask > -torch.inf).any(-1)
            lse = torch.where(seen, lse, -torch.inf)
            out = torch.where(seen[..., None], out, 0.0)
        return from_heads_first(out, layout), from_lse(lse, layout)

    def backward(
        self, problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the storage layout."""
        layout, rows = problem.spec.layout, problem.seqlen_q
        lse = to_lse(forward.lse, layout)
        out, dout = heads_first(forward.out, layout), _aligned(heads_first(dout, layout))
        mask = _padded_mask(problem, inputs)
        if mask is not None:
            # P of a row without a visible key is exp(-inf - lse) and must be 0, whatever was handed in.
            seen = (mask > -torch.inf).any(-1)
            lse = torch.where(seen, lse, 0.0)
            out, dout = (torch.where(seen[..., None], x, 0.0) for x in (out, dout))
        state = _random_state(inputs.q.device)
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            _sequence_major(dout),
            *_repeated(problem, inputs),
            mask,
            _sequence_major(out),
            F.pad(lse, (0, -rows % 32), value=torch.inf),  # exp(x - inf) is 0
            state,
            state,
            0.0,
            [True, True, True, False],
            plain_mask(problem) == "causal",
            scale=problem.scale,
        )
        if problem.group_size > 1:
            shape = (problem.num_gqa_groups, problem.group_size)
            dk, dv = dk.unflatten(1, shape).sum(2), dv.unflatten(1, shape).sum(2)
        return (
            from_heads_first(dq, layout),
            from_heads_first(dk, layout),
            from_heads_first(dv, layout),
        )


def _repeated(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with one KV head per query head."""
    q, k, v = _operands(problem, inputs)
    if problem.group_size > 1:
        k, v = (x.repeat_interleave(problem.group_size, dim=1) for x in (k, v))
    return q, k, v


def _sequence_major(tensor: Tensor) -> Tensor:
    """[B', H, S, D] stored as [B', S, H, D]: from other strides of out and dout the kernel makes a wrong delta."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _padded_mask(problem: Problem, inputs: Inputs) -> Tensor | None:
    """[B', H, S, T] with rows that start at multiples of 8 elements, as the kernel demands."""
    if plain_mask(problem) is not None:
        return None
    mask = additive_mask(problem, inputs, places_of(problem, inputs), None).to(inputs.q.dtype)
    keys = mask.shape[3]
    padded = F.pad(mask, (0, -keys % 8))[..., :keys]
    return padded.expand(mask.shape[0], problem.num_heads, *mask.shape[2:])
