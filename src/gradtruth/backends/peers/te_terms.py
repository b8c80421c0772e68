"""A problem in TransformerEngine's words, and what speaks against it before TransformerEngine is asked."""

from __future__ import annotations

from dataclasses import dataclass

from gradtruth.backends.peers.bands import common_reasons, is_full, widths
from gradtruth.backends.peers.operands import halves_only, head_dims
from gradtruth.backends.peers.refusals import unable
from gradtruth.core.problem import Problem
from gradtruth.core.support import Reason, ReasonCode

__all__ = ["Terms", "common_terms_reasons", "terms_of"]

_ABLE = (
    ReasonCode.SOFTMAX,
    ReasonCode.BIAS,
    ReasonCode.ALIBI,
    ReasonCode.MAX_LOGIT,
    ReasonCode.DROPOUT,
    ReasonCode.SOFTCAP,
)
_LAYOUTS = {
    "separate": "{0}hd_{0}hd_{0}hd",
    "3hd": "{0}3hd",
    "h3d": "{0}h3d",
    "2hd": "{0}hd_{0}2hd",
    "h2d": "{0}hd_{0}h2d",
}
_STORED = {"bshd": "bs", "sbhd": "sb", "thd": "t"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Arguments of DotProductAttention, fused_attn_fwd and fused_attn_bwd that follow from metadata.

    Attributes:
        qkv_format: bshd, sbhd or thd.
        qkv_layout: the format and how q, k and v share memory, e.g. "bshd_bshd_bshd" or "sb3hd".
        attn_mask_type: a mask type that takes no tensor.
        window_size: (left, right); (-1, 0) and (-1, -1) are TransformerEngine's words for no window.
        bottom_right_diagonal: where the diagonal of mask, window and ALiBi starts.
        attn_bias_type: no_bias, post_scale_bias or alibi.
        attention_type: "self", or "cross" where keys may be laid out unlike queries.
        deterministic: False too where TransformerEngine has no deterministic variant: bias gradients and sinks.
    """

    qkv_format: str
    qkv_layout: str
    attn_mask_type: str
    window_size: tuple[int, int]
    bottom_right_diagonal: bool
    attn_bias_type: str
    attention_type: str
    deterministic: bool


def terms_of(problem: Problem, *, packed: bool = True) -> Terms:
    """The terms of a problem against which ``common_terms_reasons`` has nothing.

    Args:
        problem: what is to be computed.
        packed: name the packing of q, k and v; False names separate tensors.
    """
    spec = problem.spec
    causal = spec.right == 0
    padding = not is_full(problem)
    mask = ["padding"] * padding + ["causal"] * causal
    if causal and spec.alignment == "bottom_right":
        mask.append("bottom_right")
    bias = {"none": "no_bias", "post_scale": "post_scale_bias", "pre_scale": "pre_scale_bias"}
    alike = not spec.ragged and problem.seqlen_q == problem.seqlen_kv
    return Terms(
        qkv_format=spec.layout,
        qkv_layout=_LAYOUTS[spec.packing if packed else "separate"].format(_STORED[spec.layout]),
        attn_mask_type="_".join(mask) or "no_mask",
        window_size=widths(problem),
        bottom_right_diagonal=spec.alignment == "bottom_right",
        attn_bias_type="alibi" if spec.alibi else bias[spec.bias],
        attention_type="self" if alike else "cross",
        deterministic=spec.deterministic and not spec.sink and spec.bias == "none",
    )


def common_terms_reasons(problem: Problem, name: str) -> list[Reason]:
    """Reasons of the module and of the low-level functions, from metadata alone.

    Args:
        problem: what is to be computed.
        name: of what is called, for the texts.
    """
    found = [
        *common_reasons(problem, name),
        *unable(problem, _ABLE),
        *halves_only(problem),
        *head_dims(problem, 8, 256, equal=False),
        *_lengths_reasons(problem, name),
        *_bias_reasons(problem),
    ]
    left, right = widths(problem)
    if (left < 0) != (right < 0) and right != 0:
        text = f"window is ({left}, {right}), TransformerEngine takes both ends, (w, 0), or none"
        found.append(Reason(ReasonCode.WINDOW, text))
    if problem.spec.dropout_p == 1.0:
        found.append(
            Reason(ReasonCode.DROPOUT, "dropout_p is 1, and weights are scaled by 1 / (1 - p)")
        )
    if problem.spec.sink and problem.spec.max_logit:
        text = f"max_logit is asked for with softmax_type {problem.spec.softmax}, and cuDNN's maximum includes the sink"
        found.append(Reason(ReasonCode.MAX_LOGIT, text))
    return found


def _lengths_reasons(problem: Problem, name: str) -> list[Reason]:
    found = []
    if problem.spec.lengths == "padding_mask":
        text = (
            f"lengths are given as a padding mask, in which {name} only counts: left padding and holes would be "
            "taken for right padding; give cu_seqlens"
        )
        found.append(Reason(ReasonCode.LENGTHS, text))
    empty = 0 in (problem.batch, problem.seqlen_q, problem.seqlen_kv)
    if empty and problem.spec.sink:
        text = f"there is nothing to attend and softmax_type is {problem.spec.softmax}, {name} is not called then"
        found.append(Reason(ReasonCode.SIZE, text))
    return found


def _bias_reasons(problem: Problem) -> list[Reason]:
    spec, shape = problem.spec, problem.bias_shape
    if spec.bias == "none" or shape is None:
        return []
    texts = []
    if spec.bias == "pre_scale":
        texts.append("bias is pre_scale, fused kernels add it after the scale only")
    if problem.bias_dtype != problem.dtype:
        texts.append(f"bias is {problem.bias_dtype}, it must have q's dtype, {problem.dtype}")
    if shape[2:] != (problem.seqlen_q, problem.seqlen_kv) or problem.layout == "thd":
        texts.append(
            f"bias has shape {list(shape)}, the last two dims must be all {problem.seqlen_q} x {problem.seqlen_kv} "
            "places of a dense layout for its gradient"
        )
    if spec.sink:
        texts.append(
            f"bias beside softmax_type {spec.softmax}: dbias would get softmax_offset's shape"
        )
    if spec.alibi:
        texts.append("bias beside alibi_slopes, one of them is taken")
    return [Reason(ReasonCode.BIAS, text) for text in texts]
