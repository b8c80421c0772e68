"""Functions for tokens: torch.nn.attention.varlen.varlen_attn, and parallel_attn of flash-linear-attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradtruth.arguments import Options, TensorArguments
from gradtruth.verify.interception.call import Translation, meaning_of
from gradtruth.verify.interception.entry import Entry, bound, loaded, only, rerun

__all__ = ["FLA", "VARLEN"]

_VARLEN = (
    "query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "return_aux", "scale",
    "window_size", "enable_gqa", "is_causal", "num_splits",
)  # fmt: skip
_FLA = ("q", "k", "v", "scale", "window_size", "cu_seqlens", "sink_bias", "chunk_indices")


def _translate_varlen(
    original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Translation:
    arguments = bound(original, args, kwargs)
    given = arguments.arguments
    only(given, _VARLEN, {})
    names = ("query", "key", "value")
    left, right = given.get("window_size") or (-1, 0 if given.get("is_causal") else -1)
    open_ = (left, right) == (-1, -1)
    cu_q = given["cu_seq_q"]
    meaning = meaning_of(
        TensorArguments(
            *(given[name] for name in names),
            cu_seqlens_q=cu_q,
            cu_seqlens_kv=cu_q if given["cu_seq_k"] is None else given["cu_seq_k"],
        ),
        Options(
            qkv_format="thd",
            attn_mask_type="padding",
            window_size=None if open_ else (int(left), int(right)),
            # Its causal masks and windows end at the last key.
            bottom_right_diagonal=None if open_ else True,
            max_seqlen_q=int(given["max_q"]),
            max_seqlen_kv=int(given["max_k"]),
            softmax_scale=given.get("scale"),
            deterministic=False,
        ),
    )
    return Translation(
        meaning=meaning,
        operands={name: given[name] for name in names},
        run=rerun(original, arguments),
        gradients=lambda found: {f"d{n[0]}": x for n, x in found.items() if x is not None},
        outputs=_first,
    )


def _translate_fla(
    original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Translation:
    arguments = bound(original, args, kwargs)
    given = arguments.arguments
    only(given, _FLA, {"head_first": (False,)})
    cu, window, sink = given.get("cu_seqlens"), given.get("window_size"), given.get("sink_bias")
    thd = cu is not None

    def view(x: Tensor) -> Tensor:
        """[1, tokens, H, D] as [tokens, H, D]."""
        return x[0] if thd else x

    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), cu.to(torch.int32) if thd else None)
    tensors = TensorArguments(
        *(view(given[name]) for name in "qkv"),
        softmax_offset=None if sink is None else sink.detach().float(),
        **lengths,
    )
    options = Options(
        qkv_format="thd" if thd else "bshd",
        attn_mask_type="padding_causal" if thd else "causal",
        window_size=None if window is None else (int(window) - 1, -1),
        softmax_scale=given.get("scale"),
        softmax_type="vanilla" if sink is None else "learnable",
        deterministic=False,
    )

    def gradients(found: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        named = {f"d{n}": x for n, x in found.items() if x is not None}
        dsink = named.pop("dsink_bias", None)
        views = {name: view(x) for name, x in named.items()}
        return views if dsink is None else views | {"dsoftmax_offset": dsink.float()}

    return Translation(
        meaning=meaning_of(tensors, options),
        operands={n: given[n] for n in (*"qkv", "sink_bias") if isinstance(given.get(n), Tensor)},
        run=rerun(original, arguments),
        gradients=gradients,
        outputs=_first,
        out=view,
    )


def _first(result: Any) -> tuple[Tensor, None]:
    """out; the lse that some return beside it takes part in no gradient."""
    return (result if isinstance(result, Tensor) else result[0]), None


VARLEN = Entry(
    "torch.nn.attention.varlen.varlen_attn",
    lambda: loaded("torch.nn.attention.varlen", "varlen_attn"),
    _translate_varlen,
)
FLA = Entry(
    "fla.ops.attn.parallel.parallel_attn",
    lambda: loaded("fla.ops.attn.parallel", "parallel_attn"),
    _translate_fla,
)
