"""Sequences: a problem as independent sequences, and blocks of them, for backends written in plain torch.

Where the host knows the lengths (on the CPU, and everywhere when sequences are full), a sequence is exactly
as long as it is, its places are slices, and a block of queries takes only the keys that its band shows.
Elsewhere nothing is read: a sequence is as long as it may be, and all that does not belong is masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradtruth.core.extents import Extents, resolve
from gradtruth.core.mask import Band
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Inputs

__all__ = ["Block", "Sequence", "Side", "known_on_host", "sequences"]

Integer = int | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """M consecutive queries or keys of one sequence.

    Attributes:
        row: storage row of the sequence, an index into dim 0 of the canonical [B', S, H, D].
        places: where in the storage row: a slice, or int64 [M] on the device, each place once.
        at: int64 [M], index within the sequence: i or j. Consecutive.
        first: at[0] where the host knows it.
        valid: bool [M], False where a place is outside the sequence or hidden; None when all are valid.
        index: what at = 0 is in bias and attention_mask; an int, or int32 scalar on the device.
        origin: what at = 0 is globally; keys dropout.
    """

    row: int
    places: slice | Tensor
    at: Tensor
    first: int | None
    valid: Tensor | None
    index: Integer
    origin: Integer

    def __len__(self) -> int:
        return self.at.shape[0]

    def cut(self, start: int, stop: int) -> Side:
        """The places [start, stop) of these."""
        if start == 0 and stop == len(self):
            return self
        part = slice(start, stop)
        places = self.places
        return replace(
            self,
            places=slice(places.start + start, places.start + stop)
            if isinstance(places, slice)
            else places[part],
            at=self.at[part],
            first=None if self.first is None else self.first + start,
            valid=None if self.valid is None else self.valid[part],
        )

    def take(self, stored: Tensor) -> Tensor:
        """Read [M, ...] of a canonical [B', S, ...]; 0 where not valid, whatever lies there."""
        found = stored[self.row, self.places]
        if self.valid is None:
            return found
        return found.masked_fill(~_column(self.valid, found), 0)

    def put(self, stored: Tensor, value: Tensor) -> None:
        """Write [M, ...] into a canonical [B', S, ...], rounding once; what is not valid keeps its content."""
        target = stored[self.row]
        if self.valid is not None:
            old = target[self.places]
            value = torch.where(_column(self.valid, old), value.to(old.dtype), old)
        if isinstance(self.places, slice):
            target[self.places].copy_(value)
        else:
            target.index_copy_(0, self.places, value.to(target.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some queries of a sequence and all the keys that they may see.

    Attributes:
        queries, keys: the places.
        key_slice: where the keys are among the keys of the sequence.
        banded: False when the band shows every key of the block to every query of it.
        diagonal: as in ``Extents``, for the indices ``queries.at`` and ``keys.at``.
        number: which sequence of the problem, an index into bias, attention_mask and alibi_slopes.
        sequence, head: global number of the sequence and of its first head; key dropout.
    """

    queries: Side
    keys: Side
    key_slice: slice
    banded: bool
    diagonal: Integer
    number: int
    sequence: Integer
    head: Integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One sequence of a problem: all its queries and keys; see ``Block`` for the rest."""

    q: Side
    kv: Side
    diagonal: Integer
    number: int
    sequence: Integer
    head: Integer

    def blocks(self, band: Band, rows: int) -> Iterator[Block]:
        """Every query once, in order, at most ``rows`` at a time."""
        for start in range(0, len(self.q), rows):
            stop = min(start + rows, len(self.q))
            low, high, banded = 0, len(self.kv), not band.open
            if banded and isinstance(self.diagonal, int) and self.kv.first is not None:
                low, high = band.key_range(start, stop, high, self.diagonal)
                banded = band.extent(stop - start, high - low, self.diagonal + start - low) != "all"
            yield self._block(
                self.q.cut(start, stop), self.kv.cut(low, high), slice(low, high), banded
            )

    def whole(self, band: Band) -> Block:
        """All queries with all keys."""
        return self._block(self.q, self.kv, slice(None), not band.open)

    def _block(self, queries: Side, keys: Side, key_slice: slice, banded: bool) -> Block:  # noqa: FBT001
        return Block(
            queries=queries,
            keys=keys,
            key_slice=key_slice,
            banded=banded,
            diagonal=self.diagonal,
            number=self.number,
            sequence=self.sequence,
            head=self.head,
        )


def known_on_host(problem: Problem, device: torch.device) -> bool:
    """Whether the host can know where sequences lie without waiting for a device."""
    return device.type == "cpu" or problem.spec.lengths == "full"


def sequences(problem: Problem, inputs: Inputs) -> Iterator[Sequence]:
    """The sequences of a problem, in order.

    On the CPU lengths and padding masks are read; on another device nothing is.
    """
    if known_on_host(problem, inputs.q.device):
        extents: Extents | list[list[int]] = _read(problem, inputs)
    else:
        extents = resolve(problem, inputs)
    for number in range(problem.batch):
        found = _numbers(extents, number)
        yield Sequence(
            q=_side(problem, inputs, found, "q", number),
            kv=_side(problem, inputs, found, "kv", number),
            diagonal=found["diagonal"],
            number=number,
            sequence=found["sequence"],
            head=found["head"],
        )


def _read(problem: Problem, inputs: Inputs) -> list[list[int]]:
    if inputs.q.device.type != "cpu":
        # Full sequences follow from sizes alone, and one element on the host, expanded, has these.
        one = torch.empty(1, device="cpu")
        inputs = Inputs(q=one.expand(inputs.q.shape), k=one.expand(inputs.k.shape), v=one)
    return resolve(problem, inputs).pack().tolist()


_FIELDS = tuple(Extents.__dataclass_fields__)


def _numbers(extents: Extents | list[list[int]], number: int) -> dict[str, Integer]:
    if isinstance(extents, Extents):
        return {name: getattr(extents, name)[number] for name in _FIELDS}
    return {name: values[number] for name, values in zip(_FIELDS, extents, strict=True)}


def _side(
    problem: Problem, inputs: Inputs, found: dict[str, Integer], name: str, number: int
) -> Side:
    storage = problem.seqlen_q if name == "q" else problem.seqlen_kv
    hides = problem.spec.lengths in ("padding_mask", "extents") and problem.layout != "thd"
    mask = getattr(inputs, f"padding_mask_{name}") if hides else None
    start, length, device = found[f"start_{name}"], found[f"length_{name}"], inputs.q.device
    first, valid = None, None
    if isinstance(start, int) and isinstance(length, int):
        places: slice | Tensor = slice(start, start + length)
        at, first = torch.arange(length, device=device), 0
    else:
        bound = problem.max_seqlen_q if name == "q" else problem.max_seqlen_kv
        span = storage if bound is None else min(bound, storage)
        # Places stay distinct and inside the storage: a span that starts too late is moved to the left,
        # and what precedes the sequence then has negative indices.
        at = torch.arange(span, device=device)
        if span < storage:
            taken = at + torch.as_tensor(start).clamp(max=storage - span)
            places, at = taken, taken - start
        else:
            places, at = slice(0, storage), at - start
        valid = (at >= 0) & (at < length)
    if mask is not None:
        valid = _seen(mask[number, places], valid)
    return Side(
        row=0 if problem.layout == "thd" else number,
        places=places,
        at=at,
        first=first,
        valid=valid,
        index=found[f"index_{name}"],
        origin=found[f"origin_{name}"],
    )


def _seen(hidden: Tensor, valid: Tensor | None) -> Tensor | None:
    """What is valid and not hidden; None, where the host may look, when that is everything."""
    if valid is None and not hidden.any():
        return None
    return ~hidden if valid is None else valid & ~hidden


def _column(valid: Tensor, like: Tensor) -> Tensor:
    return valid.view(-1, *(1,) * (like.dim() - 1))
