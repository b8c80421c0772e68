"""Options of a problem taken away, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.edits.crop import crop, lengths_of
from gradtruth.verify.edits.edited import edited
from gradtruth.verify.edits.layouts import (
    as_dense,
    transposed,
    without_gaps,
    without_padding,
    without_tail,
)
from gradtruth.verify.edits.values import quiet

__all__ = ["OPTIONS", "options_of", "without"]


def without(case: Case, option: str) -> Case:
    """The case without an option: another problem, on the same tokens.

    Args:
        case: one that has it.
        option: one of ``OPTIONS``.

    Raises:
        InvalidProblem: an unknown option, or the case does not have it.
    """
    if option not in OPTIONS:
        raise InvalidProblem(f"option is {option!r}, expected one of {', '.join(OPTIONS)}")
    if option not in options_of(case):
        raise InvalidProblem(f"option is {option!r}, the case has {', '.join(options_of(case))}")
    return OPTIONS[option](case)


def options_of(case: Case) -> list[str]:
    """The options that ``without`` may take away."""
    return [name for name in OPTIONS if _HAS[name](case)]


def _dropout(case: Case) -> Case:
    return edited(case, {"dropout_seed": None}, "without dropout", dropout_p=0.0)


def _bias(case: Case) -> Case:
    return edited(case, {"bias": None}, "without bias", bias="none")


def _mask(case: Case) -> Case:
    return edited(case, {"attention_mask": None}, "without a mask tensor", arbitrary=False)


def _alibi(case: Case) -> Case:
    return edited(case, {"alibi_slopes": None}, "without ALiBi", alibi=False)


def _window(case: Case) -> Case:
    right = 0 if case.problem.spec.right == 0 else None
    return edited(case, {}, "without a window", left=None, right=right)


def _causal(case: Case) -> Case:
    return edited(case, {}, "not causal", right=None)


def _bottom_right(case: Case) -> Case:
    return edited(case, {}, "top-left", alignment="top_left")


def _softcap(case: Case) -> Case:
    return edited(case, {}, "without a softcap", softcap=None)


def _sink(case: Case) -> Case:
    return edited(case, {"softmax_offset": None}, "without a sink", softmax="vanilla")


def _dlse(case: Case) -> Case:
    return edited(case, {"dlse": None}, "without a gradient of lse", lse_grad=False)


def _max_logit(case: Case) -> Case:
    return edited(case, {}, "without max_logit", max_logit=False)


def _max_seqlen(case: Case) -> Case:
    """A bound that shortens sequences is put into their lengths."""
    queries, keys = lengths_of(case)
    short = case if case.problem.spec.lengths == "full" else crop(case, queries=queries, keys=keys)
    made = edited(short, {}, "without max_seqlen", max_seqlen=(None, None))
    return replace(made, history=(*case.history, made.history[-1]))


def _scale(case: Case) -> Case:
    return edited(case, {}, "the default scale", scale=None)


def _batch_invariant(case: Case) -> Case:
    return edited(case, {}, "not batch-invariant", batch_invariant=False)


def _tf32(case: Case) -> Case:
    return edited(case, {}, "without TF32", allow_tf32=False)


def _layout(case: Case) -> Case:
    return as_dense(case) if _thd(case) else transposed(case)


def _is_padded(case: Case) -> bool:
    spec = case.problem.spec
    return spec.layout != "thd" and spec.lengths in ("cu_seqlens", "padding_mask")


def _has_outside(case: Case) -> bool:
    if case.problem.spec.lengths in ("full", "extents"):
        return False
    try:
        quiet(case)
    except InvalidProblem:
        return False
    return True


def _thd(case: Case) -> bool:
    return case.problem.layout == "thd"


OPTIONS: dict[str, Callable[[Case], Case]] = {
    "dropout": _dropout,
    "bias": _bias,
    "mask": _mask,
    "alibi": _alibi,
    "softcap": _softcap,
    "sink": _sink,
    "dlse": _dlse,
    "max_logit": _max_logit,
    "window": _window,
    "causal": _causal,
    "bottom_right": _bottom_right,
    "layout": _layout,
    "tail": without_tail,
    "gaps": without_gaps,
    "padding": without_padding,
    "max_seqlen": _max_seqlen,
    "batch_invariant": _batch_invariant,
    "tf32": _tf32,
    "poison": quiet,
    "scale": _scale,
}
"""Every option, the most complicated first."""

_HAS: dict[str, Callable[[Case], bool]] = {
    "dropout": lambda c: c.problem.spec.dropout_p > 0,
    "bias": lambda c: c.inputs.bias is not None,
    "mask": lambda c: c.problem.spec.arbitrary,
    "alibi": lambda c: c.problem.spec.alibi,
    "softcap": lambda c: c.problem.spec.softcap is not None,
    "sink": lambda c: c.problem.spec.sink,
    "dlse": lambda c: c.problem.spec.lse_grad,
    "max_logit": lambda c: c.problem.spec.max_logit,
    "window": lambda c: c.problem.spec.left is not None or c.problem.spec.right not in (None, 0),
    "causal": lambda c: c.problem.spec.right == 0,
    "bottom_right": lambda c: c.problem.spec.alignment == "bottom_right",
    "layout": lambda c: c.problem.layout != "bshd" and c.problem.spec.lengths != "extents",
    "tail": lambda c: _thd(c) and _changes(c, without_tail),
    "gaps": lambda c: _thd(c) and _changes(c, without_gaps),
    "padding": lambda c: _is_padded(c) and _changes(c, without_padding),
    "max_seqlen": lambda c: (c.problem.max_seqlen_q, c.problem.max_seqlen_kv) != (None, None),
    "batch_invariant": lambda c: c.problem.spec.batch_invariant,
    "tf32": lambda c: c.problem.spec.allow_tf32,
    "poison": _has_outside,
    "scale": lambda c: c.problem.spec.scale is not None,
}


def _changes(case: Case, edit: Callable[[Case], Case]) -> bool:
    try:
        edit(case)
    except InvalidProblem:
        return False
    return True
