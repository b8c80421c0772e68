"""The tensors in their one internal form, in the order of ``Inputs``'s fields."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from gradtruth.arguments.given import Options, TensorArguments
from gradtruth.core.mask import parse_mask_type
from gradtruth.errors import InvalidProblem

__all__ = ["inputs_of", "max_seqlens"]


def max_seqlens(options: Options, tensors: TensorArguments) -> tuple[int | None, int | None]:
    """The bounds on a sequence's lengths: as given, or for thd what bias and attention_mask can index."""
    bounds = [options.max_seqlen_q, options.max_seqlen_kv]
    if options.qkv_format == "thd":
        for dim in (0, 1):
            for name in ("attention_mask", "bias"):
                size = 1 if (given := getattr(tensors, name)) is None else given.shape[2 + dim]
                if size == 1:
                    continue
                if bounds[dim] is not None and bounds[dim] != size:
                    raise InvalidProblem(
                        f"{name} has shape {list(given.shape)}, expected {bounds[dim]} or 1 in dim {2 + dim}, as "
                        f"attention_mask has or max_seqlen_{'q' if dim == 0 else 'kv'} says"
                    )
                bounds[dim] = size
    return bounds[0], bounds[1]


def inputs_of(options: Options, tensors: TensorArguments) -> tuple[Tensor | None, ...]:
    """The tensors in the order of ``Inputs``'s fields, k and v None where packed.

    Padding masks become bool [B, S]; the sink and the seed get their dtype; with dropout and no seed given,
    one is drawn from PyTorch's generator of the device.
    """
    q, mask = tensors.query, tensors.attention_mask
    mask_q = mask_kv = pairs = None
    if mask is not None:
        if parse_mask_type(options.attn_mask_type).arbitrary:
            pairs = cast("Tensor", mask)
        else:
            mask_q, mask_kv = mask if isinstance(mask, tuple | list) else (mask, mask)
            mask_q, mask_kv = _rows(mask_q), _rows(mask_kv)
    offset = tensors.softmax_offset
    if offset is not None:
        offset = offset.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    return (
        q,
        tensors.key,
        tensors.value,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_kv,
        tensors.cu_seqlens_q_padded,
        tensors.cu_seqlens_kv_padded,
        mask_q,
        mask_kv,
        None,
        pairs,
        tensors.bias,
        tensors.alibi_slopes,
        offset,
        _seed(options, tensors),
    )


def _rows(mask: Tensor) -> Tensor:
    return mask if mask.dim() == 2 else mask[:, 0, 0, :]


def _seed(options: Options, tensors: TensorArguments) -> Tensor | None:
    if options.dropout_p == 0.0:
        return None
    seed, device = tensors.dropout_seed, tensors.query.device
    if seed is None:
        # Outside the operator, so that manual_seed, RNG trackers, checkpointing and CUDA graphs work.
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, int):
        return torch.full((), seed, dtype=torch.int64, device=device)
    return seed.reshape(())
