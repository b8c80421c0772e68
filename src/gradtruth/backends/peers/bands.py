"""Reasons against masks, for kernels that know a causal mask or a window from one corner only.

Where every sequence has as many keys as queries the two corners' diagonals are one. For full tensors the sizes say
so; ragged ones are taken when the sizes allow it, and the lengths are looked at before the kernel runs.
"""

from __future__ import annotations

from typing import Literal

from gradtruth.backends.peers.compact import Compact
from gradtruth.core.mask import Alignment
from gradtruth.core.problem import Problem
from gradtruth.core.support import Reason, ReasonCode

__all__ = ["Bands", "band_reasons", "common_reasons", "content_reasons", "is_full", "widths"]

Bands = Literal["causal", "causal windows", "windows"]
"""What a kernel can: only causal; causal and windows that end at the diagonal; any window."""


def is_full(problem: Problem) -> bool:
    """True when every sequence fills its storage."""
    bounds = (
        (problem.max_seqlen_q, problem.seqlen_q),
        (problem.max_seqlen_kv, problem.seqlen_kv),
    )
    clamped = any(bound is not None and bound < places for bound, places in bounds)
    return not problem.spec.ragged and not clamped


def widths(problem: Problem) -> tuple[int, int]:
    """The band as a public window (left, right), -1 for unlimited."""
    left, right = problem.spec.left, problem.spec.right
    return -1 if left is None else left, -1 if right is None else right


def common_reasons(problem: Problem, name: str) -> list[Reason]:
    """Reasons of all kernels that take tokens and lengths: tiles, mask tensors, scales that are not positive.

    Args:
        problem: what is to be computed.
        name: of the function, for the texts.
    """
    found = []
    if problem.spec.lengths == "extents":
        text = f"the problem is a tile, whose diagonals are data, and {name} takes none"
        found.append(Reason(ReasonCode.LENGTHS, text))
    if problem.spec.arbitrary:
        text = f"attention_mask is {list(problem.mask_shape or ())}, and {name} takes none"
        found.append(Reason(ReasonCode.MASK, text))
    if problem.scale <= 0:
        text = f"softmax_scale is {problem.scale:g}, it must be positive: kernels hide by -inf before they scale"
        found.append(Reason(ReasonCode.SOFTMAX, text))
    return found


def band_reasons(problem: Problem, native: Alignment | None, bands: Bands) -> list[Reason]:
    """Against windows that a kernel does not know, and diagonals that start at the other corner.

    Args:
        problem: what is to be computed.
        native: the corner of the kernel's diagonal; None where that depends on which kernel runs.
        bands: what the kernel can.
    """
    spec, found = problem.spec, []
    left, right = widths(problem)
    known = {"causal": spec.left is None and spec.right == 0, "causal windows": spec.right == 0}
    if not spec.band.open and not known.get(bands, True):
        text = f"window is ({left}, {right}), only {bands.replace('causal windows', '(w, 0)')} is taken"
        found.append(Reason(ReasonCode.WINDOW, text))
    if _has_diagonal(problem) and spec.alignment != native and not _may_be_square(problem):
        text = (
            f"the diagonal of {spec.mask_label()} is {spec.alignment} with {problem.seqlen_q} queries and "
            f"{problem.seqlen_kv} keys, {_only(native)}"
        )
        found.append(Reason(ReasonCode.MASK, text))
    return found


def content_reasons(tokens: Compact, native: Alignment | None) -> list[Reason]:
    """What only the lengths can tell: sequences whose corners differ, and holes that shift the diagonal.

    Args:
        tokens: of a problem against whose metadata nothing speaks.
        native: the corner of the kernel's diagonal.
    """
    problem = tokens.problem
    if not _has_diagonal(problem):
        return []
    if tokens.holes:
        text = "places inside a sequence are hidden, and they count for the diagonal"
        return [Reason(ReasonCode.LENGTHS, text)]
    if problem.spec.alignment == native:
        return []
    for n, (queries, keys) in enumerate(zip(tokens.lengths_q, tokens.lengths_kv, strict=True)):
        if queries != keys:
            text = (
                f"the diagonal is {problem.spec.alignment} and sequence {n} has {queries} queries and {keys} keys, "
                f"{_only(native)}"
            )
            return [Reason(ReasonCode.MASK, text)]
    return []


def _only(native: Alignment | None) -> str:
    if native is None:
        return "they must be equally many"
    return f"only {native} is taken where they differ"


def _has_diagonal(problem: Problem) -> bool:
    return not problem.spec.band.open or problem.spec.alibi


def _may_be_square(problem: Problem) -> bool:
    """Whether every sequence can have as many keys as queries."""
    bounds = []
    for bound, places in (
        (problem.max_seqlen_q, problem.seqlen_q),
        (problem.max_seqlen_kv, problem.seqlen_kv),
    ):
        bounds.append(places if bound is None else min(bound, places))
    return bounds[0] == bounds[1]
