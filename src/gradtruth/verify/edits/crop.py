"""Shorter sequences: the first or the last tokens of every one.

What stays is a problem of its own. Where the diagonal runs from decides whether its results are those of the whole:

- Queries: the first ones under a top-left diagonal, the last ones under a bottom-right one, and any where there is
  neither a band nor ALiBi, see the keys that they saw. Their out, lse and dq stay; dk and dv lack the terms of the
  others. Else the diagonal moves by the number of tokens left out: other keys are visible.
- Keys: results stay only where the keys left out were visible to no query. The last keys under a bottom-right
  diagonal, and the first under a top-left one, keep their distance to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.edits.edited import forbid_dropout, forbid_tiles
from gradtruth.verify.edits.places import (
    Side,
    Span,
    around,
    bias_rows,
    cumulated,
    dense_side,
    moved,
    spans,
    thd_side,
)
from gradtruth.verify.truth.scoring import places

__all__ = ["Keep", "crop", "crop_keys", "crop_queries", "lengths_of"]

Keep = Literal["first", "last"]


def crop_queries(case: Case, lengths: int | Sequence[int], keep: Keep = "first") -> Case:
    """Fewer queries per sequence; see ``crop``."""
    return crop(case, queries=lengths, keep=keep)


def crop_keys(case: Case, lengths: int | Sequence[int], keep: Keep = "first") -> Case:
    """Fewer keys per sequence; see ``crop``."""
    return crop(case, keys=lengths, keep=keep)


def crop(
    case: Case,
    *,
    queries: int | Sequence[int] | None = None,
    keys: int | Sequence[int] | None = None,
    keep: Keep = "first",
) -> Case:
    """Shorter sequences. Storage and bounds shrink by as much as the longest sequence does.

    So padding, gaps, tails and the room of a loose ``max_seqlen`` stay as large as they were. A padding mask's
    hidden places count, and fall away where they come to stand at an end.

    Args:
        case: with dropout only the first tokens can be kept: its keep mask goes by their numbers.
        queries, keys: the new length of every sequence, or at most this many of each; None is all.
        keep: which tokens.

    Raises:
        InvalidProblem: a length above the old one; other lengths than one where tensors are full; dropout with the
            last tokens; a tile.
    """
    forbid_tiles(case)
    if keep == "last":
        forbid_dropout(case, "the numbers of queries and keys")
    sides = {}
    for side, given in (("q", queries), ("kv", keys)):
        if given is not None:
            old = [span.length for span in spans(case, side, places(case.problem, case.inputs))]
            sides[side] = _side(case, side, _lengths(side, given, old), keep)
    which = " and ".join(
        f"{name} {given if isinstance(given, int) else list(given)}"
        for name, given in (("queries", queries), ("keys", keys))
        if given is not None
    )
    return moved(case, sides, f"the {keep} of {which}")


def lengths_of(case: Case) -> tuple[list[int], list[int]]:
    """Lengths of the sequences: queries, keys."""
    whole = places(case.problem, case.inputs)
    return [place.length_q for place in whole], [place.length_kv for place in whole]


def _lengths(side: str, given: int | Sequence[int], old: list[int]) -> list[int]:
    new = [min(given, length) for length in old] if isinstance(given, int) else list(given)
    fits = len(new) == len(old) and all(0 <= n <= m for n, m in zip(new, old, strict=True))
    if not fits:
        name = "queries" if side == "q" else "keys"
        raise InvalidProblem(f"{name} is {given}, expected lengths of at most {old}")
    return new


def _side(case: Case, side: str, new: list[int], keep: Keep) -> Side:
    problem = case.problem
    old = spans(case, side, places(problem, case.inputs))
    longest = max((span.length for span in old), default=0)
    shorter = longest - max(new, default=0)
    given = problem.max_seqlen_q if side == "q" else problem.max_seqlen_kv
    bound = None if given is None else max(0, given - shorter)
    if problem.layout == "thd":
        chosen = [_kept(span, length, keep) for span, length in zip(old, new, strict=True)]
        rows = bias_rows(case, side)
        return thd_side(
            case.device,
            chosen,
            side,
            longest=None if rows is None else rows - shorter,
            bound=bound,
            **around(case, side),
        )
    if problem.spec.lengths == "padding_mask":
        return _masked(case, side, old, new, keep, bound)
    if problem.spec.lengths == "full" and len(set(new)) > 1:
        raise InvalidProblem(f"lengths is {new}, expected equal ones of full tensors")
    return _filled(case, side, old, new, keep, bound)


def _kept(span: Span, length: int, keep: Keep) -> Span:
    left_out = span.length - length if keep == "last" else 0
    return Span(span.start + left_out, length, left_out, span.gap, span.gap_start)


def _filled(
    case: Case, side: str, old: list[Span], new: list[int], keep: Keep, bound: int | None
) -> Side:
    """Dense rows that begin with their sequence: what is left out is the padding of the others' rows."""
    problem, device = case.problem, case.device
    count = problem.seqlen_q if side == "q" else problem.seqlen_kv
    longest = max((span.length for span in old), default=0)
    size = count - longest + max(new, default=0) if old else count
    left_out = [span.length - n if keep == "last" else 0 for span, n in zip(old, new, strict=True)]
    first = torch.tensor(left_out, dtype=torch.long, device=device).view(-1, 1)
    at = first + torch.arange(size, device=device)
    rows = count * torch.arange(len(new), device=device).view(-1, 1)
    index = rows + (at % count if count else at)
    lengths: dict[str, Tensor | None] = {}
    if problem.spec.lengths == "cu_seqlens":
        lengths[f"cu_seqlens_{side}"] = cumulated(new, device)
    return dense_side(index, lengths, count, bound)


def _masked(
    case: Case, side: str, old: list[Span], new: list[int], keep: Keep, bound: int | None
) -> Side:
    """Dense rows with a padding mask: sequences stay where they are, storage is cut at both ends for all alike."""
    problem, device = case.problem, case.device
    count = problem.seqlen_q if side == "q" else problem.seqlen_kv
    mask = getattr(case.inputs, f"padding_mask_{side}")
    kept = [_kept(span, length, keep) for span, length in zip(old, new, strict=True)]
    before, after = _used(old, count), _used(kept, count)
    columns = torch.arange(
        after[0] - before[0], after[1] + count - before[1], dtype=torch.long, device=device
    )
    rows = torch.arange(problem.batch, device=device).view(-1, 1)
    hidden = torch.ones((problem.batch, count), dtype=torch.bool, device=device)
    for n, span in enumerate(kept):
        part = slice(span.start, span.start + span.length)
        hidden[n, part] = False if mask is None else mask[n, part]
    hidden = hidden[:, columns].contiguous()
    whole = mask is None and not bool(hidden.any())
    return dense_side(
        rows * count + columns, {f"padding_mask_{side}": None if whole else hidden}, count, bound
    )


def _used(found: list[Span], count: int) -> tuple[int, int]:
    """First and one past the last storage place that any sequence uses."""
    some = [span for span in found if span.length]
    if not some:
        return 0, 0
    return min(span.start for span in some), max(span.start + span.length for span in some)
