"""flash-attn 2, 3 and 4: their public functions, dense, for tokens, and packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradtruth.arguments import Options, TensorArguments
from gradtruth.verify.interception.call import Translation, meaning_of
from gradtruth.verify.interception.entry import Entry, bound, loaded, only, rerun

__all__ = ["FLASH"]

_HOMES = {
    "flash_attn": "flash_attn.flash_attn_interface",
    "flash_attn_interface": "flash_attn_interface",
    "flash_attn.cute": "flash_attn.cute.interface",
}
_FUNCTIONS = tuple(
    f"flash_attn_{kind}func" for kind in ("", "varlen_", *(
        f"{length}{packed}packed_" for length in ("", "varlen_") for packed in ("qkv", "kv")
    ))
)  # fmt: skip
_READ = (
    "q", "k", "v", "qkv", "kv", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen",
    "max_seqlen_q", "max_seqlen_k", "dropout_p", "softmax_scale", "causal", "window_size",
    "softcap", "alibi_slopes", "learnable_sink",
)  # fmt: skip
_SPEED = (
    "deterministic", "num_splits", "pack_gqa", "sm_margin", "return_attn_probs", "return_softmax_lse",
    "return_lse", "return_softmax", "min_seqlen_q", "min_seqlen_k", "m_block_size", "n_block_size",
    "num_threads", "zero_tensors",
)  # fmt: skip
_PLAIN = {
    "attention_chunk": (0,),
    "softcap": (0, 0.0),
    "num_heads_q": (),
    "args": ((),),
    "kwargs": ({},),
}


def _translate(original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Translation:
    arguments = bound(original, args, kwargs)
    given = arguments.arguments
    only(given, (*_READ, *_SPEED), _PLAIN)
    operands = {n: given[n] for n in ("q", "k", "v", "qkv", "kv", "learnable_sink")
                if isinstance(given.get(n), Tensor)}  # fmt: skip
    q, k, v = _parts(given)
    cu_q = given.get("cu_seqlens_q", given.get("cu_seqlens"))
    cu_kv = given.get("cu_seqlens_k", given.get("cu_seqlens"))
    thd = cu_q is not None
    causal, window = _band(given)
    sink = given.get("learnable_sink")
    tensors = TensorArguments(
        q, k, v,
        cu_seqlens_q=cu_q,
        cu_seqlens_kv=cu_kv,
        alibi_slopes=given.get("alibi_slopes"),
        softmax_offset=None if sink is None else sink.detach().float(),
    )  # fmt: skip
    options = Options(
        qkv_format="thd" if thd else "bshd",
        attn_mask_type=("padding" if thd else "no_mask") if not causal
        else "padding_causal_bottom_right" if thd else "causal_bottom_right",
        window_size=window,
        bottom_right_diagonal=True if causal or window != (-1, -1) else None,
        max_seqlen_q=_whole(given.get("max_seqlen_q", given.get("max_seqlen"))),
        max_seqlen_kv=_whole(given.get("max_seqlen_k", given.get("max_seqlen"))),
        softmax_scale=given.get("softmax_scale"),
        softcap=given.get("softcap") or None,
        softmax_type="vanilla" if sink is None else "learnable",
        dropout_p=float(given.get("dropout_p") or 0.0),
        deterministic=bool(given.get("deterministic", False)),
    )  # fmt: skip

    return Translation(
        meaning=meaning_of(tensors, options),
        operands=operands,
        run=rerun(original, arguments),
        gradients=_gradients,
        # Their lse takes part in no gradient, or in one that its shape does not tell: it is not read.
        outputs=lambda result: (result if isinstance(result, Tensor) else result[0], None),
    )


def _parts(given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; packed buffers are [..., 3, H, D] and [..., 2, G, D]."""
    if "qkv" in given:
        packed = given["qkv"]
        if packed.dim() < 4 or packed.shape[-3] != 3:
            raise NotImplementedError(f"qkv has shape {list(packed.shape)}, [..., 3, H, D] is seen")
        q, k, v = packed.unbind(-3)
        return q, k, v
    if "kv" in given:
        k, v = given["kv"].unbind(-3)
        return given["q"], k, v
    return given["q"], given["k"], given["v"]


def _band(given: Mapping[str, Any]) -> tuple[bool, tuple[int, int]]:
    """Causal or not, and the window; None and -1 are unlimited."""
    left, right = given.get("window_size") or (-1, -1)
    window = (-1 if left is None else int(left), -1 if right is None else int(right))
    if min(window) < -1:
        raise NotImplementedError(f"window_size is {window}, which is not understood")
    return bool(given.get("causal")), window


def _whole(bound: Any) -> int | None:
    """A bound on lengths as an int: some callers pass a tensor."""
    if isinstance(bound, Tensor):
        return int(bound.item())
    return None if bound is None else int(bound)


def _gradients(found: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, x in found.items():
        if x is None:
            continue
        if name == "qkv":
            named |= dict(zip(("dq", "dk", "dv"), x.unbind(-3), strict=True))
        elif name == "kv":
            named |= dict(zip(("dk", "dv"), x.unbind(-3), strict=True))
        elif name == "learnable_sink":
            named["dsoftmax_offset"] = x.to(torch.float32)
        else:
            named[f"d{name}"] = x
    return named


FLASH = tuple(
    Entry(
        f"{package}.{name}",
        lambda home=home, name=name, package=package: loaded(home, name) or loaded(package, name),
        _translate,
    )
    for package, home in _HOMES.items()
    for name in _FUNCTIONS
)
