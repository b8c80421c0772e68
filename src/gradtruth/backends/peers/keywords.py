"""A problem in the words of ``gradtruth.attention``: the keywords that say what is not a default."""

from __future__ import annotations

from typing import Any

from gradtruth.backends.peers.bands import widths
from gradtruth.core.problem import Problem
from gradtruth.core.support import Reason, ReasonCode
from gradtruth.core.tensors import Inputs

__all__ = ["KEYWORD_CODES", "keywords_of", "unsayable"]

KEYWORD_CODES: dict[str, ReasonCode] = {
    "qkv_format": ReasonCode.LAYOUT,
    "attn_mask_type": ReasonCode.MASK,
    "attention_mask": ReasonCode.MASK,
    "bottom_right_diagonal": ReasonCode.MASK,
    "window_size": ReasonCode.WINDOW,
    "cu_seqlens_q": ReasonCode.LENGTHS,
    "cu_seqlens_kv": ReasonCode.LENGTHS,
    "cu_seqlens_q_padded": ReasonCode.LENGTHS,
    "cu_seqlens_kv_padded": ReasonCode.LENGTHS,
    "max_seqlen_q": ReasonCode.LENGTHS,
    "max_seqlen_kv": ReasonCode.LENGTHS,
    "softmax_scale": ReasonCode.SOFTMAX,
    "softmax_type": ReasonCode.SOFTMAX,
    "softmax_offset": ReasonCode.SOFTMAX,
    "softcap": ReasonCode.SOFTCAP,
    "bias": ReasonCode.BIAS,
    "bias_type": ReasonCode.BIAS,
    "alibi_slopes": ReasonCode.ALIBI,
    "dropout_p": ReasonCode.DROPOUT,
    "dropout_seed": ReasonCode.DROPOUT,
    "deterministic": ReasonCode.GUARANTEE,
    "batch_invariant": ReasonCode.GUARANTEE,
}
"""What a missing keyword is about."""


def unsayable(problem: Problem) -> list[Reason]:
    """Against what ``gradtruth.attention`` has no keyword for."""
    found, spec = [], problem.spec
    if spec.lengths == "extents":
        text = "the problem is a tile, which no keyword describes"
        found.append(Reason(ReasonCode.LENGTHS, text))
    if spec.arbitrary and spec.lengths == "padding_mask":
        text = "an arbitrary attention_mask and a padding mask are one keyword, only one of them can be given"
        found.append(Reason(ReasonCode.MASK, text))
    if spec.max_logit:
        text = "max_logit is asked for, and a function returns out or (out, lse)"
        found.append(Reason(ReasonCode.MAX_LOGIT, text))
    return found


def keywords_of(problem: Problem, inputs: Inputs | None) -> dict[str, Any]:
    """The keywords and their values.

    Args:
        problem: against which ``unsayable`` has nothing.
        inputs: of the problem; None for names alone: then tensors are None, and cu_seqlens_*_padded, which a
            problem does not know of, are left out.
    """
    spec = problem.spec
    found: dict[str, Any] = _mask(problem)
    if spec.layout != "bshd":
        found["qkv_format"] = spec.layout
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        if getattr(problem, name) is not None:
            found[name] = getattr(problem, name)
    if spec.scale is not None:
        found["softmax_scale"] = spec.scale
    if spec.softcap is not None:
        found["softcap"] = spec.softcap
    if spec.bias == "pre_scale":
        found["bias_type"] = "pre_scale_bias"
    if spec.sink:
        found["softmax_type"] = spec.softmax
    if spec.dropout_p:
        found["dropout_p"] = spec.dropout_p
    if not spec.deterministic:
        found["deterministic"] = False
    if spec.batch_invariant:
        found["batch_invariant"] = True
    return found | _tensors(problem, inputs)


def _mask(problem: Problem) -> dict[str, Any]:
    """attn_mask_type, window_size and bottom_right_diagonal."""
    spec, found = problem.spec, {}
    left, right = widths(problem)
    parts = ["padding"] if spec.ragged else []
    bottom_right = spec.alignment == "bottom_right"
    if right == 0:
        parts.append("causal_bottom_right" if bottom_right else "causal")
        if left >= 0:
            found["window_size"] = (left, 0)
    else:
        if not spec.band.open:
            found["window_size"] = (left, right)
        if (not spec.band.open or spec.alibi) and not bottom_right:
            found["bottom_right_diagonal"] = False
    name = "_".join(parts)
    if spec.arbitrary:
        name = f"arbitrary,{name}" if name else "arbitrary"
    if name:
        found["attn_mask_type"] = name
    return found


def _tensors(problem: Problem, inputs: Inputs | None) -> dict[str, Any]:
    """The tensors beside q, k and v."""
    spec = problem.spec
    names = {
        "cu_seqlens_q": spec.lengths == "cu_seqlens",
        "cu_seqlens_kv": spec.lengths == "cu_seqlens",
        "cu_seqlens_q_padded": inputs is not None and inputs.cu_seqlens_q_padded is not None,
        "cu_seqlens_kv_padded": inputs is not None and inputs.cu_seqlens_kv_padded is not None,
        "attention_mask": spec.arbitrary,
        "bias": spec.bias != "none",
        "alibi_slopes": spec.alibi,
        "softmax_offset": spec.softmax == "learnable",
        "dropout_seed": spec.dropout_p > 0,
    }
    found = {name: getattr(inputs, name, None) for name, given in names.items() if given}
    if spec.lengths == "padding_mask":
        pair = (
            getattr(inputs, "padding_mask_q", None),
            getattr(inputs, "padding_mask_kv", None),
        )
        found["attention_mask"] = pair
    return found
