"""Sequences of a case as a case of their own, and their results put where the whole has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse, stored
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.truth.scoring import Place, places

__all__ = ["place_sequences", "sequences"]

_QUERY_SIDE = ("out", "dq", "lse")
_KEY_SIDE = ("dk", "dv")


def sequences(case: Case, indices: Sequence[int]) -> Case:
    """Some sequences of a batch, in any order, as a batch of their own.

    Dense sequences keep their storage rows; thd sequences are packed without gaps or tail.

    Args:
        case: without dropout, whose keep mask goes by the number of a sequence.
        indices: which sequences, each in [0, B).

    Raises:
        InvalidProblem: an index outside the batch, or a problem with dropout.
    """
    problem = case.problem
    if not all(0 <= n < problem.batch for n in indices):
        raise InvalidProblem(
            f"indices is {list(indices)}, expected numbers in [0, {problem.batch})"
        )
    if 0.0 < problem.spec.dropout_p < 1.0 and list(indices) != list(range(len(indices))):
        raise InvalidProblem(
            f"indices is {list(indices)}, expected 0, 1, ... of a problem with dropout"
        )
    at = torch.tensor(list(indices), dtype=torch.long, device=case.device)
    taken = _packed(case, indices) if problem.layout == "thd" else _rows(case, at)
    inputs = case.inputs
    for name in ("bias", "attention_mask"):
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.shape[0] > 1:
            taken[name] = tensor[at]
    if inputs.alibi_slopes is not None and inputs.alibi_slopes.dim() == 2:
        taken["alibi_slopes"] = inputs.alibi_slopes[at]
    return _case(case, taken, f"sequences {list(indices)}")


def place_sequences(
    case: Case, indices: Sequence[int], results: Mapping[str, Tensor], into: dict[str, Tensor]
) -> None:
    """Write results of ``sequences(case, indices)`` to where the whole has them.

    Args:
        case: the whole.
        indices: as given to ``sequences``.
        results: out, lse, dq, dk, dv by name, others are passed over.
        into: tensors of the whole's form; written.
    """
    layout, thd = case.problem.spec.layout, case.problem.layout == "thd"
    whole = places(case.problem, case.inputs)
    packed = _starts([whole[n] for n in indices])
    for name, tensor in results.items():
        if name not in into or name not in (*_QUERY_SIDE, *_KEY_SIDE):
            continue
        view = canonical_lse if name == "lse" else canonical
        source, target = view(tensor, layout), view(into[name], layout)
        if name == "lse":
            source, target = source.transpose(1, 2), target.transpose(1, 2)
        for own, n in enumerate(indices):
            side = whole[n].keys if name in _KEY_SIDE else whole[n].queries
            if thd:
                start = packed[own][1 if name in _KEY_SIDE else 0]
                target[0, side] = source[0, start : start + side.stop - side.start]
            else:
                target[n] = source[own]


def _rows(case: Case, at: Tensor) -> dict[str, Tensor]:
    """Storage rows of a dense batch."""
    layout, inputs = case.problem.spec.layout, case.inputs

    def rows(tensor: Tensor) -> Tensor:
        return stored(canonical(tensor, layout)[at], layout).contiguous()

    taken = {name: rows(getattr(inputs, name)) for name in ("q", "k", "v")}
    taken["dout"] = rows(case.dout)
    if case.dlse is not None:
        taken["dlse"] = case.dlse[at]
    for side in ("q", "kv"):
        mask, cu = getattr(inputs, f"padding_mask_{side}"), getattr(inputs, f"cu_seqlens_{side}")
        if mask is not None:
            taken[f"padding_mask_{side}"] = mask[at]
        if cu is not None:
            lengths = cu[1:] - cu[:-1]
            taken[f"cu_seqlens_{side}"] = _cumulated(lengths[at])
    return taken


def _packed(case: Case, indices: Sequence[int]) -> dict[str, Tensor | None]:
    """Tokens of thd sequences, one after the other."""
    inputs, device = case.inputs, case.device
    whole = places(case.problem, inputs)
    taken: dict[str, Tensor | None] = {}
    for side, names in (("q", ("q",)), ("kv", ("k", "v"))):
        spans = [whole[n].queries if side == "q" else whole[n].keys for n in indices]
        rows = torch.cat(
            [torch.arange(span.start, span.stop, device=device) for span in spans]
            or [torch.arange(0, device=device)]
        )
        lengths = [span.stop - span.start for span in spans]
        taken[f"cu_seqlens_{side}"] = _cumulated(torch.tensor(lengths, device=device))
        taken[f"cu_seqlens_{side}_padded"] = None
        for name in names:
            taken[name] = getattr(inputs, name)[rows]
        if side == "q":
            taken["dout"] = case.dout[rows]
            if case.dlse is not None:
                taken["dlse"] = case.dlse[rows]
    return taken


def _starts(whole: list[Place]) -> list[tuple[int, int]]:
    """Where packed sequences begin: (query, key) each."""
    found, at = [], (0, 0)
    for place in whole:
        found.append(at)
        at = at[0] + place.length_q, at[1] + place.length_kv
    return found


def _cumulated(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def _case(case: Case, taken: Mapping[str, Tensor | None], step: str) -> Case:
    found = dict(taken)
    dout, dlse = found.pop("dout"), found.pop("dlse", None)
    problem = case.problem
    bounds = problem.max_seqlen_q, problem.max_seqlen_kv
    made = Case.of(
        replace(problem.spec, packing="separate"),
        replace(case.inputs, **found),
        case.dout if dout is None else dout,
        dlse,
        max_seqlen=bounds,
        provenance=case.provenance,
    )
    return replace(made, history=(*case.history, step))
