"""Checks that read values: cu_seqlens and padding masks. On a GPU each waits for the device: opt-in there."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from gradtruth.arguments.given import Options, TensorArguments
from gradtruth.core.mask import parse_mask_type
from gradtruth.errors import InvalidProblem

__all__ = ["check_contents"]


def check_contents(
    options: Options, tensors: TensorArguments, bounds: tuple[int | None, int | None]
) -> None:
    """Check cu_seqlens and padding masks against the tensors.

    Args:
        options: names the layout.
        tensors: metadata already checked.
        bounds: max_seqlen_q and max_seqlen_kv, None where there is none.

    Raises:
        InvalidProblem: not monotone, slots that overlap, past the tensor, or longer than max_seqlen.
    """
    for side, tensor, bound in (
        ("q", tensors.query, bounds[0]),
        ("kv", tensors.key if tensors.key is not None else tensors.query, bounds[1]),
    ):
        cu = getattr(tensors, f"cu_seqlens_{side}")
        if cu is not None:
            thd = options.qkv_format == "thd"
            places = tensor.shape[1 if options.qkv_format == "bshd" else 0]
            padded = getattr(tensors, f"cu_seqlens_{side}_padded")
            _check_side(f"cu_seqlens_{side}", cu, padded, places, bound, thd=thd)
    given = tensors.attention_mask
    if given is not None and not parse_mask_type(options.attn_mask_type).arbitrary:
        masks = given if isinstance(given, tuple | list) else (given, given)
        for side, mask, bound in zip(("q", "kv"), masks, bounds, strict=True):
            _check_mask(side, mask, bound)


def _check_mask(side: str, mask: Tensor, bound: int | None) -> None:
    """A padding mask has no sequence longer than max_seqlen."""
    if bound is None or mask.numel() == 0:
        return
    rows = mask.flatten(1)
    at = torch.arange(rows.shape[1], device=rows.device)
    first, last = at.masked_fill(rows, rows.shape[1]).amin(1), at.masked_fill(rows, -1).amax(1)
    longest = int((last - first + 1).max())
    if longest > bound:
        raise InvalidProblem(
            f"max_seqlen_{side} is {bound}, expected at least the longest sequence in attention_mask, {longest}"
        )


def _check_side(
    name: str, cu: Tensor, padded: Tensor | None, places: int, bound: int | None, *, thd: bool
) -> None:
    values = cu.tolist()
    lengths = _steps(name, values)
    slots = lengths
    if thd:
        offsets_name, offsets = (
            (name, values) if padded is None else (f"{name}_padded", padded.tolist())
        )
        slots = _steps(offsets_name, offsets)
        if offsets[-1] > places:
            raise InvalidProblem(
                f"{offsets_name} ends at {offsets[-1]}, expected at most the tensor's {places} tokens"
            )
    longest = max(lengths, default=0)
    if not thd and longest > places:
        raise InvalidProblem(
            f"{name} is {_short(values)}: a sequence of {longest}, expected at most {places} (the tensor's length)"
        )
    if bound is not None and longest > bound:
        side = name.rsplit("_", 1)[-1]
        raise InvalidProblem(
            f"max_seqlen_{side} is {bound}, expected at least the longest sequence in {name}, {longest}"
        )
    for n, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        if length > slot:
            raise InvalidProblem(
                f"{name}_padded gives sequence {n} {slot} places, expected at least its length in {name}, {length}"
            )


def _steps(name: str, values: list[int]) -> list[int]:
    steps = [b - a for a, b in pairwise(values)]
    if values[0] < 0 or any(step < 0 for step in steps):
        raise InvalidProblem(
            f"{name} is {_short(values)}, expected non-negative values that never decrease"
        )
    return steps


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 12 else f"{str(values[:12])[:-1]}, ...]"
