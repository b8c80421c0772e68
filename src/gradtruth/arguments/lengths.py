"""Checks of how sequence lengths are given: cu_seqlens, padding masks, max_seqlen."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from gradtruth.arguments.given import Options, Sizes, TensorArguments
from gradtruth.arguments.tensors import check_bool
from gradtruth.core.mask import MaskType
from gradtruth.core.spec import Lengths
from gradtruth.errors import InvalidProblem

__all__ = ["check_lengths", "check_max_seqlens"]


def check_lengths(
    options: Options, mask: MaskType, tensors: TensorArguments, sizes: Sizes
) -> Lengths:
    """Which of the forms of lengths is given; contradictions raise."""
    thd = options.qkv_format == "thd"
    name = options.attn_mask_type
    if thd and not mask.padding:
        raise InvalidProblem(
            f"attn_mask_type is {name!r} with qkv_format 'thd', expected a padding mask: {_with_padding(mask)!r}"
        )
    given = [side for side in ("q", "kv") if getattr(tensors, f"cu_seqlens_{side}") is not None]
    _check_padded(tensors, thd=thd)
    if not mask.padding:
        if given:
            raise InvalidProblem(
                f"cu_seqlens_{given[0]} is given with attn_mask_type {name!r}, which has no sequence lengths; "
                f"expected attn_mask_type {_with_padding(mask)!r}, or no cu_seqlens"
            )
        return "full"
    if not given:
        return _check_padding_masks(options, mask, tensors, sizes)
    if len(given) == 1:
        lacking = "kv" if given == ["q"] else "q"
        raise InvalidProblem(
            f"cu_seqlens_{lacking} is None, expected int32 [B + 1] beside cu_seqlens_{given[0]}"
        )
    if tensors.attention_mask is not None and not mask.arbitrary:
        raise InvalidProblem(
            f"attention_mask and cu_seqlens are both given with attn_mask_type {name!r}; expected one of them, "
            f"or attn_mask_type {'arbitrary,' + name!r} for a mask of pairs beside the lengths"
        )
    for side in ("q", "kv"):
        for suffix in ("", "_padded"):
            _check_cu_seqlens(
                f"cu_seqlens_{side}{suffix}",
                getattr(tensors, f"cu_seqlens_{side}{suffix}"),
                tensors,
                sizes,
            )
    return "cu_seqlens"


def _with_padding(mask: MaskType) -> str:
    name = "padding"
    if mask.causal:
        name += "_causal" + ("_bottom_right" if mask.alignment == "bottom_right" else "")
    return f"arbitrary,{name}" if mask.arbitrary else name


def _check_padded(tensors: TensorArguments, *, thd: bool) -> None:
    for side in ("q", "kv"):
        if getattr(tensors, f"cu_seqlens_{side}_padded") is None:
            continue
        if not thd:
            raise InvalidProblem(
                f"cu_seqlens_{side}_padded is given, expected it only with qkv_format 'thd'"
            )
        if getattr(tensors, f"cu_seqlens_{side}") is None:
            raise InvalidProblem(
                f"cu_seqlens_{side} is None, expected int32 [B + 1] beside cu_seqlens_{side}_padded"
            )


def _check_cu_seqlens(name: str, given: object, tensors: TensorArguments, sizes: Sizes) -> None:
    if given is None and name.endswith("_padded"):
        return
    if not isinstance(given, Tensor):
        raise InvalidProblem(
            f"{name} is {type(given).__name__}, expected an int32 tensor [B + 1] of cumulated lengths on "
            f"{tensors.query.device}"
        )
    cu = cast("Tensor", given)
    if cu.dtype != torch.int32:
        raise InvalidProblem(f"{name} has dtype {cu.dtype}, expected torch.int32")
    if cu.dim() != 1 or cu.shape[0] != sizes.batch + 1:
        raise InvalidProblem(
            f"{name} has shape {list(cu.shape)}, expected [{sizes.batch + 1}] (batch + 1)"
        )
    if cu.device != tensors.query.device:
        raise InvalidProblem(
            f"{name} is on {cu.device}, expected query's device, {tensors.query.device}"
        )


def _check_padding_masks(
    options: Options, mask: MaskType, tensors: TensorArguments, sizes: Sizes
) -> Lengths:
    name = options.attn_mask_type
    if options.qkv_format == "thd" or mask.arbitrary:
        raise InvalidProblem(
            f"cu_seqlens_q and cu_seqlens_kv are None with attn_mask_type {name!r} and qkv_format "
            f"{options.qkv_format!r}, expected int32 [B + 1] each"
        )
    given = tensors.attention_mask
    if given is None:
        raise InvalidProblem(
            f"attn_mask_type is {name!r} but there are no lengths; expected cu_seqlens_q and cu_seqlens_kv, or a "
            "boolean attention_mask [B, 1, 1, S] (True = padding), or a pair of them for query and key"
        )
    if isinstance(given, tuple | list):
        if len(given) != 2:
            raise InvalidProblem(
                f"attention_mask has {len(given)} parts, expected two: for query and for key"
            )
        sides = [
            ("attention_mask[0]", given[0], sizes.seqlen_q),
            ("attention_mask[1]", given[1], sizes.seqlen_kv),
        ]
    else:
        if sizes.seqlen_q != sizes.seqlen_kv:
            raise InvalidProblem(
                f"attention_mask is one tensor with {sizes.seqlen_q} queries and {sizes.seqlen_kv} keys, expected a "
                "pair: (mask of the query [B, 1, 1, S], mask of the key [B, 1, 1, T])"
            )
        sides = [("attention_mask", given, sizes.seqlen_q)]
    for label, part, length in sides:
        check_bool(label, part, tensors)
        if tuple(part.shape) not in ((sizes.batch, 1, 1, length), (sizes.batch, length)):
            raise InvalidProblem(
                f"{label} has shape {list(part.shape)}, expected [{sizes.batch}, 1, 1, {length}] or "
                f"[{sizes.batch}, {length}] for attn_mask_type {name!r}"
            )
    return "padding_mask"


def check_max_seqlens(options: Options, lengths: Lengths, sizes: Sizes) -> None:
    """Bounds on lengths: ints, and no smaller than what is certain."""
    for side, places in (("q", sizes.seqlen_q), ("kv", sizes.seqlen_kv)):
        name = f"max_seqlen_{side}"
        bound = getattr(options, name)
        if bound is None:
            continue
        if isinstance(bound, bool) or not isinstance(bound, int | torch.SymInt):
            raise InvalidProblem(f"{name} is {bound!r}, expected an int or None")
        if bound < 0:
            raise InvalidProblem(f"{name} is {bound}, expected a non-negative int or None")
        if lengths == "full" and bound < places:
            raise InvalidProblem(
                f"{name} is {bound}, expected at least the sequence length, {places}"
            )
