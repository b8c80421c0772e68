"""Sequences of a case as a case of their own, and their results put where the whole has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.edits.edited import forbid_dropout, forbid_tiles
from gradtruth.verify.edits.places import (
    SIDES,
    Side,
    around,
    bias_rows,
    cumulated,
    dense_side,
    moved,
    spans,
    thd_side,
)
from gradtruth.verify.truth.scoring import Place, places

__all__ = ["place_sequences", "sequences"]

_QUERY_SIDE = ("out", "dq", "lse")
_KEY_SIDE = ("dk", "dv")


def sequences(case: Case, indices: Sequence[int], *, keep_gaps: bool = False) -> Case:
    """Some sequences of a batch, in any order and as often as named, as a batch of their own.

    Dense sequences keep their storage rows; thd sequences are packed one after the other.

    Args:
        case: with dropout, whose keep mask goes by the number of a sequence, only the first ones can be taken.
        indices: which sequences, each in [0, B).
        keep_gaps: thd slots keep the gaps behind their sequences, and the tensor its places before the first and
            behind the last slot. By default they are dropped.

    Raises:
        InvalidProblem: an index outside the batch, other sequences than the first of a problem with dropout, or a
            tile.
    """
    forbid_tiles(case)
    problem, device = case.problem, case.device
    if not all(0 <= n < problem.batch for n in indices):
        raise InvalidProblem(
            f"indices is {list(indices)}, expected numbers in [0, {problem.batch})"
        )
    if list(indices) != list(range(len(indices))):
        forbid_dropout(case, "the number of a sequence")
    thd = problem.layout == "thd"
    sides = {}
    whole = places(problem, case.inputs)
    for name in SIDES:
        bound = problem.max_seqlen_q if name == "q" else problem.max_seqlen_kv
        if not thd:
            sides[name] = _rows(case, name, indices, bound)
            continue
        every = spans(case, name, whole)
        chosen = [every[n] if keep_gaps else replace(every[n], gap=0) for n in indices]
        outside = around(case, name) if keep_gaps else {}
        sides[name] = thd_side(
            device, chosen, name, longest=bias_rows(case, name), bound=bound, **outside
        )
    return moved(case, sides, f"sequences {list(indices)}", chosen=indices)


def place_sequences(
    case: Case,
    indices: Sequence[int],
    results: Mapping[str, Tensor],
    into: dict[str, Tensor],
    part: Case | None = None,
) -> None:
    """Write results of ``sequences(case, indices)`` to where the whole has them.

    Args:
        case: the whole.
        indices: as given to ``sequences``.
        results: out, lse, dq, dk, dv by name, others are passed over.
        into: tensors of the whole's form; written.
        part: what ``sequences`` returned; needed only where it kept gaps.
    """
    layout, thd = case.problem.spec.layout, case.problem.layout == "thd"
    whole = places(case.problem, case.inputs)
    own = (
        _packed([whole[n] for n in indices]) if part is None else places(part.problem, part.inputs)
    )
    for name, tensor in results.items():
        if name not in into or name not in (*_QUERY_SIDE, *_KEY_SIDE):
            continue
        view = canonical_lse if name == "lse" else canonical
        source, target = view(tensor, layout), view(into[name], layout)
        if name == "lse":
            source, target = source.transpose(1, 2), target.transpose(1, 2)
        for at, n in enumerate(indices):
            if not thd:
                target[n] = source[at]
            elif name in _KEY_SIDE:
                target[0, whole[n].keys] = source[0, own[at].keys]
            else:
                target[0, whole[n].queries] = source[0, own[at].queries]


def _packed(whole: list[Place]) -> list[Place]:
    """The places of sequences that follow each other without a gap."""
    found, q, kv = [], 0, 0
    for place in whole:
        found.append(place._replace(start_q=q, start_kv=kv))
        q, kv = q + place.length_q, kv + place.length_kv
    return found


def _rows(case: Case, side: str, indices: Sequence[int], bound: int | None) -> Side:
    """Storage rows of a dense batch."""
    problem, inputs = case.problem, case.inputs
    count = problem.seqlen_q if side == "q" else problem.seqlen_kv
    rows = torch.tensor(list(indices), dtype=torch.long, device=case.device).view(-1, 1)
    index = rows * count + torch.arange(count, device=case.device)
    lengths: dict[str, Tensor | None] = {}
    mask, cu = getattr(inputs, f"padding_mask_{side}"), getattr(inputs, f"cu_seqlens_{side}")
    if mask is not None:
        lengths[f"padding_mask_{side}"] = mask[rows[:, 0]]
    if cu is not None:
        own = (cu[1:] - cu[:-1])[rows[:, 0]]
        lengths[f"cu_seqlens_{side}"] = cumulated(own.tolist(), case.device)
    return dense_side(index, lengths, count, bound)
