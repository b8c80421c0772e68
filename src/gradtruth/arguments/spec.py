"""From options and tensors to the string of a Spec, or a clear error.

Only metadata is read, so this code can be traced by torch.compile with dynamic shapes.
"""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any, cast

import torch

from gradtruth.arguments.given import BIAS_TYPES, FORMATS, Options, TensorArguments
from gradtruth.arguments.lengths import check_lengths, check_max_seqlens
from gradtruth.arguments.tensors import (
    check_bias,
    check_mask,
    check_qkv,
    check_seed,
    check_sink,
    check_slopes,
)
from gradtruth.core.mask import Alignment, MaskType, band_of, parse_mask_type
from gradtruth.core.spec import Layout, Lengths, Softmax, Spec
from gradtruth.core.strict import shown
from gradtruth.errors import InvalidProblem

__all__ = ["spec_of"]

_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def spec_of(options: Options, tensors: TensorArguments) -> str:
    """Check options and the tensors' metadata against each other and say what is to be computed.

    Returns:
        The canonical string of the Spec.

    Raises:
        InvalidProblem: a contradiction; names the argument, its value and what was expected.
    """
    if options.qkv_format not in FORMATS:
        raise InvalidProblem(
            f"qkv_format is {options.qkv_format!r}, expected one of 'bshd', 'sbhd', 'thd'"
        )
    mask = parse_mask_type(options.attn_mask_type)
    sizes = check_qkv(options, tensors)
    lengths = check_lengths(options, mask, tensors, sizes)
    check_max_seqlens(options, lengths, sizes)
    check_mask(options, mask, tensors, sizes)
    check_bias(options, tensors, sizes)
    check_slopes(tensors, sizes)
    check_sink(options, tensors, sizes)
    check_seed(tensors)
    sizeless = options._replace(
        max_seqlen_q=None,
        max_seqlen_kv=None,
        window_size=_constants(options.window_size),
        softmax_scale=_constant(options.softmax_scale),
        softcap=_constant(options.softcap),
        dropout_p=_constant(options.dropout_p),
    )
    has = (tensors.bias is not None, tensors.alibi_slopes is not None)
    return _encoded_spec(tuple(sizeless), lengths, has)


def _constant(value: Any) -> Any:
    """The number itself: torch.compile with dynamic=True makes symbols of ints and floats."""
    if isinstance(value, float):
        return value.__float__()
    if isinstance(value, int) and not isinstance(value, bool):
        # Not int(), which leaves the symbol one, and not __index__(), which breaks the graph.
        return operator.index(value)
    return value


def _constants(window: Any) -> Any:
    if isinstance(window, tuple | list):
        return tuple(_constant(end) for end in window)
    return window


@torch.compiler.assume_constant_result
def _encoded_spec(chosen: tuple, lengths: Lengths, has: tuple[bool, bool]) -> str:
    """The Spec's string, from constants alone, so that torch.compile sees a constant."""
    options = Options(*chosen)
    mask = parse_mask_type(options.attn_mask_type)
    band = band_of(mask, _window(options.window_size))
    has_bias, has_slopes = has
    return Spec(
        layout=cast("Layout", options.qkv_format),
        packing=options.packing,
        lengths=lengths,
        left=band.left,
        right=band.right,
        alignment=_alignment(options, mask, needed=not band.open or has_slopes),
        arbitrary=mask.arbitrary,
        scale=None
        if options.softmax_scale is None
        else _number("softmax_scale", options.softmax_scale),
        softcap=_positive("softcap", options.softcap),
        bias=BIAS_TYPES[options.bias_type] if has_bias else "none",
        alibi=has_slopes,
        softmax=cast("Softmax", options.softmax_type),
        dropout_p=_probability(options.dropout_p),
        max_logit=_flag("max_logit", options.max_logit),
        lse_grad=options.lse_grad,
        deterministic=_flag("deterministic", options.deterministic),
        batch_invariant=_flag("batch_invariant", options.batch_invariant),
        allow_tf32=options.allow_tf32,
    ).encode()


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidProblem(f"{name} is {value!r}, expected True or False")
    return value


def _number(name: str, value: object) -> float:
    try:
        number = (
            math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        )
    except OverflowError:
        number = math.inf
    if not abs(number) <= _LARGEST:
        raise InvalidProblem(f"{name} is {shown(value)}, expected a finite number, in fp32 too")
    return number


def _positive(name: str, value: object) -> float | None:
    if value is None:
        return None
    number = _number(name, value)
    if number < _SMALLEST:
        raise InvalidProblem(
            f"{name} is {value!r}, expected a positive number (in fp32 too) or None"
        )
    return number


def _probability(value: object) -> float:
    p = _number("dropout_p", value)
    if not 0.0 <= p <= 1.0:
        raise InvalidProblem(f"dropout_p is {value!r}, expected a number in [0, 1]")
    return p


def _window(window: object) -> tuple[int, int]:
    if window is None:
        return (-1, -1)
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise InvalidProblem(f"window_size is {window!r}, expected (left, right) or None")
    left, right = window
    for end in (left, right):
        if isinstance(end, bool) or not isinstance(end, int) or end < -1:
            raise InvalidProblem(
                f"window_size is {window!r}, expected two ints of at least -1 (-1 is unlimited)"
            )
    return left, right


def _alignment(options: Options, mask: MaskType, *, needed: bool) -> Alignment:
    asked = options.bottom_right_diagonal
    if asked is not None and not isinstance(asked, bool):
        raise InvalidProblem(f"bottom_right_diagonal is {asked!r}, expected True, False or None")
    if mask.alignment is not None:
        if asked is not None and asked != (mask.alignment == "bottom_right"):
            raise InvalidProblem(
                f"bottom_right_diagonal is {asked}, but attn_mask_type {options.attn_mask_type!r} is aligned "
                f"{mask.alignment.replace('_', '-')}; expected None or {not asked}"
            )
        return mask.alignment
    return "bottom_right" if needed and asked is not False else "top_left"
