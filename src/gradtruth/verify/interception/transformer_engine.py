"""TransformerEngine's DotProductAttention: what its constructor and its forward say together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gradtruth.arguments import Options, TensorArguments
from gradtruth.core.mask import parse_mask_type
from gradtruth.module import alibi_slopes_of
from gradtruth.verify.interception.call import Translation, meaning_of
from gradtruth.verify.interception.entry import Entry, Target, bound, only, rerun

__all__ = ["TRANSFORMER_ENGINE"]

_LAYERS = ("query_layer", "key_layer", "value_layer")
_READ = (
    "self", *_LAYERS, "attention_mask", "qkv_format", "cu_seqlens_q", "cu_seqlens_kv",
    "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv",
    "attn_mask_type", "window_size", "bottom_right_diagonal", "core_attention_bias_type",
    "core_attention_bias", "alibi_slopes", "softcap",
    # These change the speed, or what is computed where nothing is valid.
    "checkpoint_core_attention", "fast_zero_fill", "pad_between_seqs", "num_splits",
)  # fmt: skip
_PLAIN = {
    "fp8_output": (False,), "bf16_backward": (False,), "args": ((),), "kwargs": ({},),
    # How a packed buffer and policies are meant, which are refused where they are given.
    "qkv_interleave_dim": (-3,), "thd_attention_policy_dispatch": ("auto",),
}  # fmt: skip


def _translate(original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Translation:
    arguments = bound(original, args, kwargs)
    given, module = arguments.arguments, arguments.arguments["self"]
    only(given, _READ, _PLAIN)
    _refuse(module)
    layers = {name: given[name] for name in _LAYERS}
    for name, x in layers.items():
        if type(x).__module__.partition(".")[0] == "transformer_engine" or not isinstance(
            x, Tensor
        ):
            raise NotImplementedError(
                f"{name} is a {type(x).__name__}, a plain tensor is understood"
            )
    form = given["qkv_format"] or module.qkv_format
    mask_type = given["attn_mask_type"] or module.attn_mask_type
    heads = layers["query_layer"].shape[-2]
    tensors, bias_type = _tensors(given, module, mask_type, form, heads)
    options = Options(
        qkv_format=form,
        attn_mask_type=mask_type,
        window_size=_window(given, module, mask_type),
        bottom_right_diagonal=_first(
            given.get("bottom_right_diagonal"), getattr(module, "bottom_right_diagonal", None)
        ) if parse_mask_type(mask_type).alignment is None else None,
        max_seqlen_q=given["max_seqlen_q"],
        max_seqlen_kv=given["max_seqlen_kv"],
        softmax_scale=getattr(module, "softmax_scale", None),
        softcap=_first(given.get("softcap"), getattr(module, "softcap", None)) or None,
        bias_type=bias_type,
        softmax_type=getattr(module, "softmax_type", "vanilla"),
        dropout_p=_dropout(module),
    )  # fmt: skip
    width = layers["value_layer"].shape[-1]
    operands = dict(layers)
    if tensors.bias is not None:
        operands["core_attention_bias"] = tensors.bias
    return Translation(
        meaning=meaning_of(tensors, options),
        operands=operands,
        run=rerun(original, arguments),
        gradients=_gradients,
        outputs=lambda result: (result if isinstance(result, Tensor) else result[0], None),
        out=lambda x: x.unflatten(-1, (heads, width)),
    )


def _tensors(
    given: Mapping[str, Any], module: Any, mask_type: str, form: str, heads: int
) -> tuple[TensorArguments, str]:
    """The tensors as our words have them, and where the bias enters."""
    kind, mask = parse_mask_type(mask_type), given["attention_mask"]
    thd = form == "thd"
    if not (kind.arbitrary or (kind.padding and given["cu_seqlens_q"] is None)):
        mask = None
    bias_type, slopes = given["core_attention_bias_type"], given["alibi_slopes"]
    if bias_type == "alibi" and slopes is None:
        slopes = alibi_slopes_of(heads, given["query_layer"].device)
    lengths = {n: given[n] for n in ("cu_seqlens_q", "cu_seqlens_kv") if kind.padding}
    if thd:
        lengths |= {n: given[n] for n in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")}
    # With "off-by-one" it is zeros.
    learnable = getattr(module, "softmax_type", "vanilla") == "learnable"
    offset = module.softmax_offset if learnable else None
    tensors = TensorArguments(
        *(given[name] for name in _LAYERS),
        attention_mask=mask,
        bias=given["core_attention_bias"] if bias_type.endswith("_scale_bias") else None,
        alibi_slopes=slopes if bias_type == "alibi" else None,
        # The module keeps it as [1, H, 1, 1] in some releases.
        softmax_offset=None if offset is None else offset.detach().reshape(-1).float(),
        **lengths,
    )
    return tensors, bias_type if bias_type.endswith("_scale_bias") else "post_scale_bias"


def _refuse(module: Any) -> None:
    """What a constructor may ask for beyond this."""
    if getattr(module, "cp_group", None) is not None:
        raise NotImplementedError("cp_group is given: one rank holds a part of the sequences")
    if getattr(module, "fp8", False) and getattr(module, "fp8_meta", {}).get("recipe", None):
        recipe = module.fp8_meta["recipe"]
        if getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
            raise NotImplementedError("the attention is computed in fp8")


def _window(given: Mapping[str, Any], module: Any, mask_type: str) -> tuple[int, int]:
    window = _first(given["window_size"], getattr(module, "window_size", None)) or (-1, -1)
    left, right = int(window[0]), int(window[1])
    if parse_mask_type(mask_type).causal:
        return left, -1
    # The module keeps (-1, 0) of a causal mask, which without one is no window.
    return (-1, -1) if (left, right) == (-1, 0) else (left, right)


def _dropout(module: Any) -> float:
    p = getattr(module, "attention_dropout", None)
    if p is None:
        context = getattr(module, "attention_dropout_ctx", None)
        p = getattr(getattr(module, "unfused_attention", None), "attention_dropout", None)
        p = getattr(p, "p", 0.0) if p is not None or context is None else 0.0
    return float(getattr(p, "p", p)) if module.training else 0.0


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given


def _gradients(found: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    names = {
        "query_layer": "dq",
        "key_layer": "dk",
        "value_layer": "dv",
        "core_attention_bias": "dbias",
    }
    return {names[n]: x for n, x in found.items() if x is not None}


def _targets() -> list[Target]:
    found = sys.modules.get("transformer_engine.pytorch")
    module = None if found is None else vars(found).get("DotProductAttention")
    if not isinstance(module, type) or "forward" not in vars(module):
        return []
    return [Target(module, "forward", shared=False)]


TRANSFORMER_ENGINE = Entry("transformer_engine.pytorch.DotProductAttention", _targets, _translate)
