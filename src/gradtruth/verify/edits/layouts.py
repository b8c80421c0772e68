"""The same batch in other storage: packed or padded, without gaps, tails and padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.edits.edited import edited, forbid_tiles
from gradtruth.verify.edits.places import (
    SIDES,
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

__all__ = [
    "as_dense",
    "as_thd",
    "less_outside",
    "transposed",
    "without_gaps",
    "without_padding",
    "without_tail",
]


def as_thd(case: Case) -> Case:
    """The sequences one after the other, without padding, gaps or a tail.

    A bias or mask is indexed within the sequence then; one that the sequences share gets a copy per sequence where
    they did not begin at the same storage place.

    Raises:
        InvalidProblem: a padding mask hides places between tokens, which thd cannot say; a tile.
    """
    forbid_tiles(case)
    _forbid_holes(case)
    problem = case.problem
    whole, sides = places(problem, case.inputs), {}
    for name in SIDES:
        chosen = [replace(span, gap=0) for span in spans(case, name, whole)]
        thd = problem.layout == "thd"
        if not thd:  # bias and mask go with storage places there
            chosen = [replace(span, first=span.start) for span in chosen]
        count = problem.seqlen_q if name == "q" else problem.seqlen_kv
        rows = None if thd else [n * count for n in range(problem.batch)]
        sides[name] = thd_side(case.device, chosen, name, rows=rows)
    return moved(case, sides, "as thd", layout="thd", lengths="cu_seqlens")


def as_dense(
    case: Case, layout: Literal["bshd", "sbhd"] = "bshd", padding: tuple[int, int] = (0, 0)
) -> Case:
    """The sequences each in a storage row of its own, at its beginning.

    Tensors are full where all sequences are as long as the storage, else cu_seqlens tell the lengths.

    Args:
        case: of any layout.
        layout: the new one.
        padding: places more than the longest query and key sequence have.

    Raises:
        InvalidProblem: a padding mask hides places between tokens; negative padding; a tile.
    """
    forbid_tiles(case)
    _forbid_holes(case)
    if min(padding) < 0:
        raise InvalidProblem(f"padding is {padding}, expected two numbers of at least 0")
    problem, device = case.problem, case.device
    whole, sides, full = places(problem, case.inputs), {}, True
    for name, more in zip(SIDES, padding, strict=True):
        found = spans(case, name, whole)
        size = max([span.length for span in found], default=0) + more
        count = problem.seqlen_q if name == "q" else problem.seqlen_kv
        index = torch.full((len(found), size), -1, dtype=torch.long, device=device)
        within = index.clone()
        for n, span in enumerate(found):
            at = torch.arange(span.length, device=device)
            thd = problem.layout == "thd"
            index[n, : span.length] = at + span.start + (0 if thd else n * count)
            within[n, : span.length] = at + (0 if thd else span.start)
        within = _beyond(within)
        full = full and all(span.length == size for span in found)
        lengths = _no_lengths(name)
        lengths[f"cu_seqlens_{name}"] = cumulated([span.length for span in found], device)
        sides[name] = Side(index, within, lengths)
    if full:
        sides = {name: replace(side, lengths=_no_lengths(name)) for name, side in sides.items()}
    return moved(
        case, sides, f"as {layout}", layout=layout, lengths="full" if full else "cu_seqlens"
    )


def transposed(case: Case) -> Case:
    """bshd as sbhd and the other way round, with the padding and the holes that there are.

    Raises:
        InvalidProblem: thd.
    """
    layout = case.problem.spec.layout
    if layout == "thd":
        raise InvalidProblem("layout is 'thd', expected a dense one")
    tensors = {
        name: tensor.transpose(0, 1).contiguous()
        for name, tensor in case.tensors().items()
        if name in ("q", "k", "v", "dout")
    }
    other = "sbhd" if layout == "bshd" else "bshd"
    return edited(case, tensors, f"as {other}", layout=other)


def without_gaps(case: Case) -> Case:
    """thd without places between sequences, and before the first; the tail stays.

    Raises:
        InvalidProblem: there are none, or it is not thd.
    """
    return _repacked(case, "gaps", keep_gaps=False)


def without_tail(case: Case) -> Case:
    """thd without places behind the last slot.

    Raises:
        InvalidProblem: there are none, or it is not thd.
    """
    return _repacked(case, "a tail", keep_gaps=True)


def _repacked(case: Case, what: str, *, keep_gaps: bool) -> Case:
    """thd slots packed anew: with the gaps and what lies before them, or with the tail."""
    kept = "lead" if keep_gaps else "tail"
    sides = {
        name: thd_side(
            case.device,
            chosen if keep_gaps else [replace(span, gap=0) for span in chosen],
            name,
            **{kept: around(case, name).get(kept, range(0))},
            longest=bias_rows(case, name),
            bound=_bound(case, name),
        )
        for name, chosen in _slots(case, what).items()
    }
    return _smaller(case, moved(case, sides, f"without {what}"), what)


def less_outside(case: Case, most: int) -> Case:
    """At most so many storage places outside sequences in a row: gaps, tail and head of thd, padding at either end.

    Raises:
        InvalidProblem: there are nowhere more, or full tensors, or a tile.
    """
    forbid_tiles(case)
    problem = case.problem
    if most < 0 or problem.spec.lengths == "full":
        raise InvalidProblem(f"most is {most}, expected at least 0 of a case with places outside")
    whole, sides = places(problem, case.inputs), {}
    for name in SIDES:
        found = spans(case, name, whole)
        if problem.layout != "thd":
            sides[name] = _trimmed(case, name, found, most)
            continue
        outside = around(case, name)
        sides[name] = thd_side(
            case.device,
            [replace(span, gap=min(span.gap, most)) for span in found],
            name,
            lead=outside.get("lead", range(0))[:most],
            tail=outside["tail"][:most],
            longest=bias_rows(case, name),
            bound=_bound(case, name),
        )
    return _smaller(case, moved(case, sides, f"at most {most} places outside"), "more outside")


def without_padding(case: Case) -> Case:
    """Dense storage cut down to what some sequence uses; full tensors where all use all of it.

    Raises:
        InvalidProblem: nothing can be cut; thd; a tile.
    """
    forbid_tiles(case)
    problem = case.problem
    if problem.spec.lengths not in ("cu_seqlens", "padding_mask") or problem.layout == "thd":
        raise InvalidProblem("the case has no padding, expected a padded dense one")
    whole, sides, full = places(problem, case.inputs), {}, True
    for name in SIDES:
        found = spans(case, name, whole)
        sides[name] = _trimmed(case, name, found)
        size = sides[name].index.shape[1]
        full = full and all(span.length == size for span in found)
    if full and not _has_holes(case):
        sides = {name: replace(side, lengths=_no_lengths(name)) for name, side in sides.items()}
        return moved(case, sides, "without padding", lengths="full")
    return _smaller(case, moved(case, sides, "without padding"), "padding to spare")


def _trimmed(case: Case, side: str, found: list[Span], spare: int = 0) -> Side:
    """A dense side without the columns that no sequence uses, but for so many at either end."""
    problem, device = case.problem, case.device
    count = problem.seqlen_q if side == "q" else problem.seqlen_kv
    some = [span for span in found if span.length]
    first = min((span.start for span in some), default=0)
    last = max((span.start + span.length for span in some), default=0)
    columns = torch.arange(max(0, first - spare), min(count, last + spare), device=device)
    rows = torch.arange(problem.batch, device=device).view(-1, 1) * count
    mask = getattr(case.inputs, f"padding_mask_{side}")
    lengths: dict[str, Tensor | None] = {}
    if mask is not None:
        lengths[f"padding_mask_{side}"] = mask[:, columns].contiguous()
    bound = _bound(case, side)
    return dense_side(rows + columns, lengths, count, bound)


def _beyond(within: Tensor) -> Tensor:
    """Rows of bias beyond a sequence: those of the longest one, so that sequences that begin alike share them."""
    top = within.amax(0, keepdim=True) if len(within) else within
    begins = bool((within[:, :1] == within[:1, :1]).all()) if within.numel() else False
    return torch.where(within < 0, top, within) if begins else within


def _slots(case: Case, what: str) -> dict[str, list[Span]]:
    forbid_tiles(case)
    if case.problem.layout != "thd":
        raise InvalidProblem(f"layout is {case.problem.layout!r}, which has no {what}")
    whole = places(case.problem, case.inputs)
    return {name: spans(case, name, whole) for name in SIDES}


def _smaller(old: Case, new: Case, what: str) -> Case:
    before, after = old.problem, new.problem
    if (before.seqlen_q, before.seqlen_kv) == (after.seqlen_q, after.seqlen_kv):
        raise InvalidProblem(f"the case has no {what}")
    return new


def _bound(case: Case, side: str) -> int | None:
    return case.problem.max_seqlen_q if side == "q" else case.problem.max_seqlen_kv


def _no_lengths(side: str) -> dict[str, Tensor | None]:
    return dict.fromkeys(
        (f"cu_seqlens_{side}", f"cu_seqlens_{side}_padded", f"padding_mask_{side}")
    )


def _has_holes(case: Case) -> bool:
    """A padding mask hides places between tokens of a sequence."""
    whole = places(case.problem, case.inputs)
    for name in SIDES:
        mask = getattr(case.inputs, f"padding_mask_{name}")
        if mask is None:
            continue
        for n, span in enumerate(spans(case, name, whole)):
            if bool(mask[n, span.start : span.start + span.length].any()):
                return True
    return False


def _forbid_holes(case: Case) -> None:
    if case.problem.spec.lengths == "padding_mask" and _has_holes(case):
        raise InvalidProblem(
            "a padding mask hides places between tokens, expected sequences without holes"
        )
