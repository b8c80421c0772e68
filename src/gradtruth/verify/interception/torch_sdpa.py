"""torch.nn.functional.scaled_dot_product_attention, and FlexAttention as far as it has no code of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from gradtruth.arguments import Options, TensorArguments
from gradtruth.verify.interception.call import Translation, meaning_of
from gradtruth.verify.interception.entry import Entry, Target, autocast, bound, loaded, only, rerun

__all__ = ["FLEX", "SDPA", "heads_second"]


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - PyTorch's
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """The signature: the function itself is written in C and has none."""


_SIGNATURE = signature(_sdpa)
_NAMES = ("query", "key", "value")


def heads_second(tensor: Tensor) -> Tensor:
    """[B, H, S, D] as [B, S, H, D], [S, D] and [B, S, D] with one head."""
    if tensor.dim() not in (2, 3, 4):
        raise NotImplementedError(f"query, key or value has {tensor.dim()} dims, 2 to 4 are seen")
    if tensor.dim() == 2:
        return tensor[None, :, None]
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor.transpose(1, 2)


def pairs(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(attention_mask with True = hidden, bias) of torch's attn_mask, four dims."""
    if mask is None:
        return None, None
    four = mask[(None,) * max(0, 4 - mask.dim())]
    return (_inverted(four), None) if mask.dtype == torch.bool else (None, four)


def _inverted(mask: Tensor) -> Tensor:
    """~mask, expanded where the mask is."""
    once = tuple(slice(None) if step else slice(0, 1) for step in mask.stride())
    return (~mask[once]).expand(mask.shape)


def _translate(original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Translation:
    arguments = bound(_SIGNATURE, args, kwargs)
    given = arguments.arguments
    mask = given["attn_mask"]
    q, k, v, mask = autocast(*(given[name] for name in _NAMES), mask)
    if type(mask) not in (type(None), Tensor, torch.nn.Parameter):
        raise NotImplementedError(f"attn_mask is a {type(mask).__name__}, a tensor is understood")
    # Masks of a call without heads: [.., S, T] becomes [.., 1, S, T].
    headless = mask is not None and q.dim() != 4 and mask.dim() >= q.dim()
    hidden, bias = pairs(mask.unsqueeze(-3) if headless else mask)
    if not given["enable_gqa"] and q.dim() == 4 and q.shape[1] != k.shape[1]:
        raise NotImplementedError(f"key has {k.shape[1]} heads for {q.shape[1]} without enable_gqa")
    tensors = TensorArguments(*map(heads_second, (q, k, v)), attention_mask=hidden, bias=bias)
    causal = "causal" if given["is_causal"] else "no_mask"
    options = Options(
        attn_mask_type=causal if hidden is None else "arbitrary",
        softmax_scale=given["scale"],
        dropout_p=float(given["dropout_p"]),
    )
    operands = {"query": q, "key": k, "value": v}
    if bias is not None:
        operands["attn_mask"] = mask

    def gradients(found: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        named = {f"d{n[0]}": x for n, x in found.items() if n != "attn_mask"}
        views = {name: heads_second(x) for name, x in named.items() if x is not None}
        dmask = found.get("attn_mask")
        if dmask is None:
            return views
        dbias = dmask.unsqueeze(-3) if headless else dmask
        return {**views, "dbias": dbias[(None,) * (4 - dbias.dim())]}

    return Translation(
        meaning=meaning_of(tensors, options),
        operands=operands,
        run=rerun(original, arguments),
        gradients=gradients,
        outputs=lambda result: (result, None),
        out=heads_second,
    )


SDPA = Entry(
    "torch.nn.functional.scaled_dot_product_attention",
    lambda: [Target(torch.nn.functional, "scaled_dot_product_attention")],
    _translate,
)


def _translate_flex(
    original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Translation:
    arguments = bound(original, args, kwargs)
    given = arguments.arguments
    known = (*_NAMES, "scale", "enable_gqa", "kernel_options")
    only(given, known, {"return_lse": (False,)})
    q, k, v = (given[name] for name in _NAMES)
    options = Options(softmax_scale=given.get("scale"))
    return Translation(
        meaning=meaning_of(TensorArguments(*map(heads_second, (q, k, v))), options),
        operands={"query": q, "key": k, "value": v},
        run=rerun(original, arguments),
        gradients=lambda found: {
            f"d{n[0]}": heads_second(x) for n, x in found.items() if x is not None
        },
        outputs=lambda result: (result, None),
        out=heads_second,
    )


def _flex_targets() -> Iterable[Target]:
    return loaded("torch.nn.attention.flex_attention", "flex_attention")


FLEX = Entry("torch.nn.attention.flex_attention", _flex_targets, _translate_flex)
