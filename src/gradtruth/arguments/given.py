"""What a caller can give: options and tensors, in one place each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gradtruth.core.spec import Bias, Packing

__all__ = ["BIAS_TYPES", "FORMATS", "SOFTMAX_TYPES", "Options", "Sizes", "TensorArguments"]

BIAS_TYPES: dict[str, Bias] = {"pre_scale_bias": "pre_scale", "post_scale_bias": "post_scale"}
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
FORMATS = ("bshd", "sbhd", "thd")


class Options(NamedTuple):
    """What the caller chose beside tensors; the meaning of each is in ``api.attention``."""

    qkv_format: str = "bshd"
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    softmax_scale: float | None = None
    softcap: float | None = None
    bias_type: str = "post_scale_bias"
    softmax_type: str = "vanilla"
    dropout_p: float = 0.0
    deterministic: bool = True
    batch_invariant: bool = False
    max_logit: bool = False
    lse_grad: bool = False
    allow_tf32: bool = False
    packing: Packing = "separate"


class TensorArguments(NamedTuple):
    """The tensors as the caller gave them. For packed input ``query`` (or ``key``) is the packed buffer."""

    query: Tensor
    key: Tensor | None = None
    value: Tensor | None = None
    attention_mask: Tensor | tuple[Tensor, Tensor] | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softmax_offset: Tensor | None = None
    dropout_seed: Tensor | int | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that the checks compare with; B is 0 while thd lengths are not known to be right."""

    batch: int
    seqlen_q: int
    seqlen_kv: int
    heads: int
