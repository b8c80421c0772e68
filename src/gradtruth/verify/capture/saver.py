"""Saver: a call and its gradient become a file, within the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradtruth.core.spec import Spec
from gradtruth.verify.capture.budget import Budget
from gradtruth.verify.capture.folder import SUMMARY, Folder
from gradtruth.verify.capture.selection import Place
from gradtruth.verify.capture.tally import Tally
from gradtruth.verify.cases import storage
from gradtruth.verify.cases.case import Case
from gradtruth.verify.cases.provenance import machine_facts
from gradtruth.verify.interception.call import Meaning
from gradtruth.verify.suite.noise import noise, stream

__all__ = ["Saver"]

_SEED = 0
_CAPTURED = "captured"
_ZEROS = "zeros: only lse got a gradient"
_MADE = f"made: noise of seed {_SEED}, no backward came"


class Saver:
    """Writes cases. What goes wrong is counted; the program that is watched goes on.

    Args:
        folder: where to.
        budget: how much.
        provenance: what every case says of itself.

    Attributes:
        files: that were written.
    """

    def __init__(self, folder: Folder, budget: Budget, provenance: Mapping[str, str | int]) -> None:
        self.folder, self.budget = folder, budget
        self.files: list[Path] = []
        self._provenance = provenance
        self._facts: dict[str, dict[str, str | int]] = {}

    def save(
        self,
        place: Place,
        meaning: Meaning,
        gradients: tuple[Tensor | None, Tensor | None],
        tally: Tally,
    ) -> None:
        """Write one case, or count why not.

        Args:
            place: where the call was made.
            meaning: what it computes.
            gradients: dout and dlse; both None where no backward came.
            tally: where to count.
        """
        try:
            with torch.no_grad():
                limit = self._write(place, meaning, *gradients)
        except (ValueError, RuntimeError, NotImplementedError, OSError, MemoryError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            tally.skip(f"it could not be saved: {text[:200]}")
            return
        if limit is not None:
            tally.dropped[limit] += 1

    def finish(self, rank: int | None, tally: Tally) -> None:
        """Leave a line about the whole capture."""
        line = {"rank": rank, "cases": self.budget.cases, "bytes": self.budget.bytes}
        try:
            self.folder.append(SUMMARY, line | tally.facts())
        except OSError as error:
            tally.skip(f"{SUMMARY} could not be written: {error.strerror}")

    def _write(
        self, place: Place, meaning: Meaning, dout: Tensor | None, dlse: Tensor | None
    ) -> str | None:
        """The limit that stands against it, or None when it is written."""
        limit = self.budget.against(0)
        if limit is not None:
            return limit
        how = _MADE if dout is None and dlse is None else _ZEROS if dout is None else _CAPTURED
        if dout is None:
            dout = _made(meaning) if dlse is None else _zeros(meaning)
        spec = meaning.problem.spec
        if dlse is not None and not spec.lse_grad:
            spec = replace(spec, lse_grad=True)
        tensors = dict(meaning.inputs.items()) | {"dout": dout}
        limit = self.budget.against(storage.footprint(tensors))
        if limit is not None:
            return limit
        case = self._case(place, meaning, spec, (dout, dlse), how)
        data = case.to_bytes()
        limit = self.budget.against(len(data))
        if limit is not None:
            return limit
        identity = Case.from_bytes(data).id  # a file that cannot be read is not written
        path = self.folder.write(self.folder.name(place), data)
        self.budget.spend(len(data))
        self.files.append(path)
        facts: dict[str, Any] = {"dout": how, "bytes": len(data), "id": identity}
        self.folder.record(path, place, case, facts)
        return None

    def _case(
        self,
        place: Place,
        meaning: Meaning,
        spec: Spec,
        gradients: tuple[Tensor, Tensor | None],
        how: str,
    ) -> Case:
        device = str(meaning.inputs.q.device)
        if device not in self._facts:
            self._facts[device] = machine_facts(device)
        origin: dict[str, str | int] = {
            "captured_from": place.entry,
            "layer": place.layer,
            "step": place.step,
            "call": place.call,
            "dout": how,
        }
        if place.rank is not None:
            origin["rank"] = place.rank
        problem = meaning.problem
        return Case.of(
            spec,
            meaning.inputs,
            *gradients,
            max_seqlen=(problem.max_seqlen_q, problem.max_seqlen_kv),
            provenance={**self._facts[device], **self._provenance, **origin},
        )


def _made(meaning: Meaning) -> Tensor:
    """Noise like out, the same for the same shape everywhere."""
    q, width = meaning.inputs.q, meaning.problem.head_dim_v
    values = noise(stream("dout", _SEED), *q.shape[:-1], width, device=q.device)
    return values.to(q.dtype)


def _zeros(meaning: Meaning) -> Tensor:
    q, width = meaning.inputs.q, meaning.problem.head_dim_v
    return q.new_zeros(()).expand(*q.shape[:-1], width)
