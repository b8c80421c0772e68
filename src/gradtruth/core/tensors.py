"""The tensors of a problem: what goes in, what a forward returns, what a backward returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import Tensor

__all__ = ["Forward", "Grads", "Inputs", "Wanted"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """All tensors that an attention reads, in the order of the operators' arguments.

    B sequences, S x T storage rows, H query and G KV heads.

    Attributes:
        q: [B, S, H, D], [S, B, H, D] or [tokens, H, D].
        k: the same with G heads; last dim D.
        v: the same with G heads; last dim Dv.
        cu_seqlens_q, cu_seqlens_kv: int32 [B + 1], actual lengths cumulated.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 [B + 1], thd storage offsets; default as above.
        padding_mask_q: bool [B, S], True = not part of the sequence.
        padding_mask_kv: bool [B, T], True = not part of the sequence.
        extents: int32 [rows, B], the packed form of ``core.extents.Extents`` of a tile.
        attention_mask: bool, [1|B, 1|H, 1|S, 1|T], True = masked out; thd [1|B, 1|H, 1|max_q, 1|max_kv].
        bias: the same shapes, in q's dtype or fp32.
        alibi_slopes: fp32 [H] or [B, H].
        softmax_offset: fp32 [H] (fp64 for fp64 inputs), the logit of the learnable sink.
        dropout_seed: int64 scalar tensor on the device.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    padding_mask_q: Tensor | None = None
    padding_mask_kv: Tensor | None = None
    extents: Tensor | None = None
    attention_mask: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softmax_offset: Tensor | None = None
    dropout_seed: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of every tensor that is present."""
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None:
                yield field.name, tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What a forward returns.

    Attributes:
        out: like q, last dim Dv; contiguous.
        lse: fp32 (fp64 for fp64 inputs) [B, H, S], for thd [tokens, H] stored head-major; natural log, sink
            included, -inf for rows without a visible key and outside every sequence.
        max_logit: fp32 [H] when the Spec asks for it.
    """

    out: Tensor
    lse: Tensor
    max_logit: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grads:
    """What a backward returns; None where a gradient was not wanted.

    Attributes:
        dq, dk, dv: like q, k, v; contiguous.
        dbias: in the bias's own shape and dtype.
        dsoftmax_offset: [H], in softmax_offset's dtype.
    """

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dsoftmax_offset: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of every gradient that is present."""
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None:
                yield field.name, tensor


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which gradients a backward shall compute."""

    dq: bool = True
    dk: bool = True
    dv: bool = True
    dbias: bool = True
    dsoftmax_offset: bool = True
