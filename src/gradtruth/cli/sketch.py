"""A problem from options alone: tensors without memory, through the same checks as real ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradtruth.arguments import Options, TensorArguments, inputs_of, max_seqlens, spec_of
from gradtruth.core.layout import split_packed
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.errors import InvalidProblem

__all__ = ["Sizes", "problem_of"]


class Sizes(NamedTuple):
    """The sizes of a problem; for thd every sequence has the same lengths."""

    batch: int
    seqlen_q: int
    seqlen_kv: int
    heads: int
    groups: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    bias_dims: str | None
    alibi: bool


def problem_of(options: Options, sizes: Sizes) -> Problem:
    """The problem of these options.

    Raises:
        InvalidProblem: the options contradict each other.
    """
    tensors = _tensors(options, sizes)
    spec = Spec.decode(spec_of(options, tensors))
    q, k, v, *rest = inputs_of(options, tensors)
    if q is None:
        raise InvalidProblem("query is None")
    split = split_packed(spec.packing, q, k, v)
    return Problem.of(spec, Inputs(*split, *rest), *max_seqlens(options, tensors))


def _tensors(options: Options, sizes: Sizes) -> TensorArguments:
    B, S, T, H = sizes.batch, sizes.seqlen_q, sizes.seqlen_kv, sizes.heads
    thd = options.qkv_format == "thd"
    padding = "padding" in options.attn_mask_type
    query, key, value = _packed(options, sizes)
    bias = None
    if sizes.bias_dims is not None:
        full = dict(zip("BHST", (B, H, S, T), strict=True))
        bias = _empty(
            *(n if name in sizes.bias_dims else 1 for name, n in full.items()), dtype=sizes.dtype
        )
    pairs = (
        _empty(B, 1, S, T, dtype=torch.bool)
        if options.attn_mask_type.startswith("arbitrary")
        else None
    )
    lengths = _empty(B + 1, dtype=torch.int32) if padding or thd else None
    return TensorArguments(
        query=query,
        key=key,
        value=value,
        attention_mask=pairs,
        cu_seqlens_q=lengths,
        cu_seqlens_kv=lengths,
        bias=bias,
        alibi_slopes=_empty(H, dtype=torch.float32) if sizes.alibi else None,
        softmax_offset=_empty(H, dtype=torch.float32)
        if options.softmax_type == "learnable"
        else None,
    )


def _packed(options: Options, sizes: Sizes) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """query, key and value, or the packed buffers that hold them."""
    lead_q, lead_kv = _lead(options, sizes, sizes.seqlen_q), _lead(options, sizes, sizes.seqlen_kv)
    query = _empty(*lead_q, sizes.heads, sizes.head_dim, dtype=sizes.dtype)
    key = _empty(*lead_kv, sizes.groups, sizes.head_dim, dtype=sizes.dtype)
    value = _empty(*lead_kv, sizes.groups, sizes.head_dim_v, dtype=sizes.dtype)
    if options.packing == "separate":
        return query, key, value
    if sizes.head_dim != sizes.head_dim_v:
        raise InvalidProblem(
            f"packing is {options.packing!r}, expected equal head dims of query and value"
        )
    dim = -3 if options.packing in ("3hd", "2hd") else -2
    if options.packing in ("3hd", "h3d"):
        if query.shape != key.shape:
            raise InvalidProblem(
                f"packing is {options.packing!r}, expected as many keys and groups as queries and heads"
            )
        return torch.stack((query, query, query), dim), None, None
    return query, torch.stack((key, key), dim), None


def _lead(options: Options, sizes: Sizes, length: int) -> tuple[int, ...]:
    if options.qkv_format == "thd":
        return (sizes.batch * length,)
    return (length, sizes.batch) if options.qkv_format == "sbhd" else (sizes.batch, length)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device="meta")
    except (RuntimeError, OverflowError, TypeError) as error:
        raise InvalidProblem(
            f"a tensor would have shape {list(shape)}, expected at most 2^63 bytes"
        ) from error
