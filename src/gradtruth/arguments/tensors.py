"""Checks of the tensors' metadata: query, key and value first, then what comes with them."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from gradtruth.arguments.given import BIAS_TYPES, SOFTMAX_TYPES, Options, Sizes, TensorArguments
from gradtruth.core.layout import split_packed
from gradtruth.core.mask import MaskType
from gradtruth.core.problem import DTYPES
from gradtruth.errors import InvalidProblem

__all__ = [
    "check_bias",
    "check_bool",
    "check_device",
    "check_mask",
    "check_qkv",
    "check_seed",
    "check_sink",
    "check_slopes",
    "check_tensor",
]

_DENSE_DIMS = {"bshd": "[B, S, H, D]", "sbhd": "[S, B, H, D]", "thd": "[tokens, H, D]"}
_FLOATS = tuple(DTYPES.values())


def check_qkv(options: Options, tensors: TensorArguments) -> Sizes:
    """Shapes, dtypes and devices of query, key and value (packed or not)."""
    for name in ("query", "key", "value"):
        tensor = getattr(tensors, name)
        if tensor is None and options.packing != "separate":
            continue
        tensor = check_tensor(name, tensor)
        if tensor.dtype not in _FLOATS:
            raise InvalidProblem(
                f"{name} has dtype {tensor.dtype}, expected float16, bfloat16, float32 or float64"
            )
        if tensor.device != tensors.query.device:
            raise InvalidProblem(
                f"{name} is on {tensor.device}, expected query's device, {tensors.query.device}"
            )
        if tensor.dtype != tensors.query.dtype:
            raise InvalidProblem(
                f"{name} has dtype {tensor.dtype}, expected query's dtype, {tensors.query.dtype}"
            )
    q, k, v = split_packed(options.packing, tensors.query, tensors.key, tensors.value)
    form = options.qkv_format
    _check_shapes(form, q, k, v)
    heads = q.shape[-2]
    if form == "thd":
        return Sizes(_thd_batch(tensors), q.shape[0], k.shape[0], heads)
    batch_dim, seq_dim = (0, 1) if form == "bshd" else (1, 0)
    if q.shape[batch_dim] != k.shape[batch_dim]:
        raise InvalidProblem(
            f"key has batch {k.shape[batch_dim]}, expected query's batch, {q.shape[batch_dim]}"
        )
    return Sizes(q.shape[batch_dim], q.shape[seq_dim], k.shape[seq_dim], heads)


def _check_shapes(form: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    rank = 3 if form == "thd" else 4
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        if tensor.dim() != rank:
            raise InvalidProblem(
                f"{name} has shape {list(tensor.shape)}, expected {rank} dims, {_DENSE_DIMS[form]}, "
                f"for qkv_format {form!r}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise InvalidProblem(
            f"value has shape {list(v.shape)}, expected {list(k.shape[:-1])} + [Dv] as key has"
        )
    if q.shape[-1] != k.shape[-1]:
        raise InvalidProblem(
            f"key has head dim {k.shape[-1]}, expected query's head dim, {q.shape[-1]}"
        )
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise InvalidProblem(f"head dims are {q.shape[-1]} and {v.shape[-1]}, expected at least 1")
    heads, groups = q.shape[-2], k.shape[-2]
    if groups == 0 or heads == 0 or heads % groups:
        raise InvalidProblem(
            f"query has {heads} heads, expected a positive multiple of key's {groups} heads"
        )


def check_tensor(name: str, given: object) -> Tensor:
    """A strided tensor, or InvalidProblem."""
    if not isinstance(given, Tensor):
        raise InvalidProblem(f"{name} is {type(given).__name__}, expected a torch.Tensor")
    tensor = cast("Tensor", given)
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InvalidProblem(
            f"{name} has layout {tensor.layout}{' (nested)' if tensor.is_nested else ''}, expected a strided tensor; "
            "for sequences of different lengths use qkv_format 'thd' with cu_seqlens"
        )
    return tensor


def check_device(name: str, tensor: Tensor, tensors: TensorArguments) -> None:
    """On the query's device."""
    if tensor.device != tensors.query.device:
        raise InvalidProblem(
            f"{name} is on {tensor.device}, expected query's device, {tensors.query.device}"
        )


def check_bool(name: str, mask: object, tensors: TensorArguments) -> None:
    """A bool tensor on the query's device."""
    given = check_tensor(name, mask)
    if given.dtype != torch.bool:
        raise InvalidProblem(
            f"{name} has dtype {given.dtype}, expected torch.bool (True = masked out)"
        )
    check_device(name, given, tensors)


def _thd_batch(tensors: TensorArguments) -> int:
    cu = tensors.cu_seqlens_q
    if not isinstance(cu, Tensor) or cu.dim() != 1 or cu.shape[0] < 1:
        return 0  # reported by check_lengths
    return cu.shape[0] - 1


def check_mask(options: Options, mask: MaskType, tensors: TensorArguments, sizes: Sizes) -> None:
    """An arbitrary mask where, and only where, the mask type reads one."""
    given = tensors.attention_mask
    if not mask.arbitrary:
        if given is not None and not mask.padding:
            raise InvalidProblem(
                f"attention_mask is given with attn_mask_type {options.attn_mask_type!r}, which does not read it; "
                "expected 'arbitrary' (or 'arbitrary,' before the name), or no attention_mask"
            )
        return
    if given is None:
        raise InvalidProblem(
            f"attention_mask is None, expected a bool tensor [1|B, 1|H, 1|S, 1|T] for attn_mask_type "
            f"{options.attn_mask_type!r}"
        )
    check_bool("attention_mask", given, tensors)
    _check_pairs("attention_mask", cast("Tensor", given), options, sizes)


def _check_pairs(name: str, tensor: Tensor, options: Options, sizes: Sizes) -> None:
    """The shape of a tensor over pairs (i, j): each dim full or 1."""
    thd = options.qkv_format == "thd"
    if tensor.dim() != 4:
        raise InvalidProblem(
            f"{name} has shape {list(tensor.shape)}, expected four dims [1|B, 1|H, 1|S, 1|T]"
        )
    full: tuple[int | None, ...] = (sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_kv)
    if thd:
        # Without max_seqlen the tensor's own size bounds the sequences.
        full = (sizes.batch, sizes.heads, options.max_seqlen_q, options.max_seqlen_kv)
    for have, want in zip(tensor.shape, full, strict=True):
        if have != 1 and want is not None and have != want:
            shown = ", ".join("1|max_seqlen" if n is None else f"1|{n}" for n in full)
            raise InvalidProblem(f"{name} has shape {list(tensor.shape)}, expected [{shown}]")


def check_bias(options: Options, tensors: TensorArguments, sizes: Sizes) -> None:
    """Kind, dtype and shape of the bias."""
    if options.bias_type not in BIAS_TYPES:
        known = ", ".join(map(repr, BIAS_TYPES))
        raise InvalidProblem(f"bias_type is {options.bias_type!r}, expected one of {known}")
    bias = tensors.bias
    if bias is None:
        return
    check_tensor("bias", bias)
    if bias.dtype not in (tensors.query.dtype, torch.float32):
        raise InvalidProblem(
            f"bias has dtype {bias.dtype}, expected query's dtype, {tensors.query.dtype}, or torch.float32"
        )
    check_device("bias", bias, tensors)
    _check_pairs("bias", bias, options, sizes)


def check_slopes(tensors: TensorArguments, sizes: Sizes) -> None:
    """ALiBi slopes: fp32 [H] or [B, H]."""
    slopes = tensors.alibi_slopes
    if slopes is None:
        return
    check_tensor("alibi_slopes", slopes)
    if slopes.dtype != torch.float32:
        raise InvalidProblem(f"alibi_slopes has dtype {slopes.dtype}, expected torch.float32")
    check_device("alibi_slopes", slopes, tensors)
    if tuple(slopes.shape) not in ((sizes.heads,), (sizes.batch, sizes.heads)):
        raise InvalidProblem(
            f"alibi_slopes has shape {list(slopes.shape)}, expected [{sizes.heads}] or [{sizes.batch}, {sizes.heads}]"
        )


def check_sink(options: Options, tensors: TensorArguments, sizes: Sizes) -> None:
    """The softmax type and its offset."""
    kind, offset = options.softmax_type, tensors.softmax_offset
    if kind not in SOFTMAX_TYPES:
        raise InvalidProblem(
            f"softmax_type is {kind!r}, expected one of {', '.join(map(repr, SOFTMAX_TYPES))}"
        )
    if kind != "learnable":
        if offset is not None:
            raise InvalidProblem(
                f"softmax_offset is given with softmax_type {kind!r}, expected it only with 'learnable'"
            )
        return
    if offset is None:
        raise InvalidProblem(
            f"softmax_offset is None, expected float32 [{sizes.heads}] for softmax_type 'learnable'"
        )
    check_tensor("softmax_offset", offset)
    if tuple(offset.shape) != (sizes.heads,):
        raise InvalidProblem(
            f"softmax_offset has shape {list(offset.shape)}, expected [{sizes.heads}]"
        )
    if offset.dtype not in _FLOATS:
        raise InvalidProblem(f"softmax_offset has dtype {offset.dtype}, expected torch.float32")
    check_device("softmax_offset", offset, tensors)


def check_seed(tensors: TensorArguments) -> None:
    """An int64 seed, as int or tensor."""
    seed = tensors.dropout_seed
    if seed is None or (
        isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 2**63
    ):
        return
    if not isinstance(seed, Tensor):
        raise InvalidProblem(
            f"dropout_seed is {seed!r}, expected a 64-bit int or an int64 scalar tensor"
        )
    seed = cast("Tensor", seed)
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise InvalidProblem(
            f"dropout_seed is {seed.dtype} {list(seed.shape)}, expected one torch.int64 element"
        )
    check_device("dropout_seed", seed, tensors)
