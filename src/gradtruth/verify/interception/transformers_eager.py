"""transformers: the eager attention of every model, and attention functions that a program registered.

Its other functions (sdpa, flash_attention_*, flex_attention) end in entry points of their own libraries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradtruth.arguments import Options, TensorArguments
from gradtruth.verify.interception.call import Translation, meaning_of
from gradtruth.verify.interception.entry import Entry, Target, autocast, bound, only, rerun
from gradtruth.verify.interception.torch_sdpa import heads_second, pairs

__all__ = ["EAGER", "REGISTERED"]

_NAMES = ("query", "key", "value")
_READ = ("module", *_NAMES, "attention_mask", "scaling", "dropout", "softcap", "sinks", "position_ids",
         "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
         "is_causal", "sliding_window", "s_aux", "output_router_logits", "num_items_in_batch",
         "logits_to_keep", "past_key_values", "cache", "position_embeddings")  # fmt: skip


def _translate_eager(
    original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Translation:
    return _translate(original, args, kwargs, masked=True)


def _translate_registered(
    original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Translation:
    return _translate(original, args, kwargs, masked=False)


def _translate(
    original: Callable[..., Any], args: tuple, kwargs: dict[str, Any], *, masked: bool
) -> Translation:
    arguments = bound(original, args, kwargs)
    given = _named(arguments.arguments)
    only(given, _READ, {})
    module, mask = given["module"], given.get("attention_mask")
    q, k, v = autocast(*(given[name] for name in _NAMES))
    hidden, bias = _mask(mask, q, k)
    causal = False
    if mask is None and not masked:
        wanted = given.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if wanted is None else wanted)
        causal = causal and q.shape[2] > 1
        if given.get("sliding_window") is not None:
            raise NotImplementedError("sliding_window is given without a mask that shows it")
    sinks = _first(given.get("s_aux"), given.get("sinks"), getattr(module, "sinks", None))
    options = Options(
        attn_mask_type="arbitrary" if hidden is not None else "causal" if causal else "no_mask",
        softmax_scale=given.get("scaling"),
        softcap=given.get("softcap"),
        softmax_type="vanilla" if sinks is None else "learnable",
        dropout_p=float(given.get("dropout") or 0.0) if module.training else 0.0,
    )
    tensors = TensorArguments(
        *map(heads_second, (q, k, v)),
        attention_mask=hidden,
        bias=bias,
        softmax_offset=None if sinks is None else sinks.detach().reshape(-1).float(),
    )
    return Translation(
        meaning=meaning_of(tensors, options),
        operands={"query": q, "key": k, "value": v},
        run=rerun(original, arguments),
        gradients=_gradients,
        outputs=lambda result: (result[0] if isinstance(result, tuple) else result, None),
    )


def _named(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, **kwargs opened. The first four are positional, whatever they are called."""
    found = dict(arguments)
    for name in ("kwargs", "_kwargs", "options"):
        if isinstance(found.get(name), dict):
            found |= found.pop(name)
    return found


def _mask(mask: Any, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(attention_mask, bias) of an additive or boolean mask, cut to the keys that there are."""
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        shown = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise NotImplementedError(f"attention_mask is {shown}, a tensor of four dims is understood")
    hidden, bias = pairs(mask[..., : k.shape[2]])
    if bias is not None and bias.dtype not in (q.dtype, torch.float32):
        bias = bias.float()
    return hidden, bias


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _gradients(found: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {f"d{n[0]}": heads_second(x) for n, x in found.items() if x is not None}


def _eager_targets() -> list[Target]:
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and module is not None:
            function = vars(module).get("eager_attention_forward")
            if callable(function):
                found.append(Target(module, "eager_attention_forward", shared=False))
    return found


def _registered_targets() -> list[Target]:
    """What was registered by somebody else than transformers, under whatever name."""
    module = sys.modules.get("transformers.modeling_utils")
    interface = None if module is None else vars(module).get("AttentionInterface")
    mapping = getattr(interface, "_global_mapping", None)
    if not isinstance(mapping, dict):
        return []
    return [
        Target(mapping, name, shared=False)
        for name, function in mapping.items()
        if callable(function) and not str(function.__module__).startswith("transformers.")
    ]


EAGER = Entry("transformers.eager_attention_forward", _eager_targets, _translate_eager)
REGISTERED = Entry("transformers.AttentionInterface", _registered_targets, _translate_registered)
