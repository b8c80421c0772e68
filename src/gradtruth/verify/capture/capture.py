"""Capture: the context manager that saves attention calls as case files."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gradtruth.errors import InvalidProblem
from gradtruth.verify.capture.budget import Budget
from gradtruth.verify.capture.explicit import ENTRY, Explicit
from gradtruth.verify.capture.folder import Folder
from gradtruth.verify.capture.imports import Imports
from gradtruth.verify.capture.pending import Pending
from gradtruth.verify.capture.refusals import recomputed_for_checkpoint, refusal
from gradtruth.verify.capture.saver import Saver
from gradtruth.verify.capture.selection import Place, Selection
from gradtruth.verify.capture.steps import Steps
from gradtruth.verify.capture.tally import NO_BACKWARD, Tally
from gradtruth.verify.interception import Answer, Call, Interception, Listener, Unseen
from gradtruth.verify.interception.call import Meaning

__all__ = ["Capture", "Where", "capture"]

_CHANGED = "an input was written to between forward and backward"
_LOGGER = logging.getLogger("gradtruth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where calls are looked for, and as whose they are saved.

    Attributes:
        root: only calls made by modules of this model; None is every call.
        functions: "module:function" of further functions, called in the words of ``gradtruth.attention``.
        this_rank: of this process; None asks ``torch.distributed``.
        provenance: names to texts or ints, saved in every case.
    """

    root: torch.nn.Module | None = None
    functions: Sequence[str] = ()
    this_rank: int | None = None
    provenance: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rank = self.this_rank
        if rank is not None and (type(rank) is not int or rank < 0):
            raise InvalidProblem(f"this_rank is {rank!r}, expected a non-negative int or None")
        for name, value in self.provenance.items():
            if not isinstance(name, str) or type(value) not in (str, int):
                raise InvalidProblem(
                    f"provenance has {name!r}: {value!r}, expected names to texts or ints"
                )

    def rank(self) -> int | None:
        """The rank of this process, None where no process group says."""
        if self.this_rank is not None:
            return self.this_rank
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank()
        return None


class Capture:
    """A capture: between ``__enter__`` and ``__exit__`` calls are seen. Made by ``capture``.

    Args:
        saver: writes cases; None where nothing is written and calls are only counted.
        selection: which calls.
        where: in which model, as which rank.
        forward_only: calls without a backward are saved too, with a dout that was made.

    Attributes:
        tally: what was seen and left out.
        quiet: do not log the summary at the end (logger "gradtruth"; a warning where anything was left out).
    """

    def __init__(
        self,
        saver: Saver | None,
        selection: Selection,
        where: Where,
        *,
        forward_only: bool = False,
    ) -> None:
        self.tally = Tally()
        self.quiet = False
        self._saver, self._selection, self._where = saver, selection, where
        self._forward_only = forward_only
        self._lock = threading.RLock()
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._pending = Pending(self._arrived, keep=forward_only)
        self._interception = _Counting(self._on_call, where.root, self._on_unseen, where.functions)
        self._explicit = Explicit(self._on_explicit, where.root)
        self._imports = Imports(self._interception.open)
        self._steps = Steps(self._on_step)

    def __enter__(self) -> Capture:
        self._interception.open()
        self._explicit.open()
        self._imports.open()
        self._steps.open()
        self._on_step(0)
        return self

    def __exit__(self, *_error: object) -> None:
        self._steps.close()
        self._imports.close()
        self._explicit.close()
        self._interception.close()
        with self._lock:
            for place, call in self._pending.close():
                self._abandoned(place, call)
        if self._saver is not None:
            self._saver.finish(self._where.rank(), self.tally)
        if self.quiet:
            return
        left_out = self.tally.dropped or self.tally.skipped
        _LOGGER.log(logging.WARNING if left_out else logging.INFO, "capture: %s", self.summary())

    @property
    def files(self) -> list[Path]:
        """The files that were written, in that order."""
        return [] if self._saver is None else list(self._saver.files)

    @property
    def step_number(self) -> int:
        """Steps that have ended."""
        return self._steps.number

    def step(self) -> None:
        """A step ends here. Once this was called, optimizers are not looked at any more."""
        self._steps.mark()

    def summary(self) -> str:
        """What was saved and what was not and why, in a few lines."""
        if self._saver is None:
            return self.tally.summary()
        return self.tally.summary(str(self._saver.folder.path), self._saver.budget)

    # ---------------------------------------------------------------- what happens

    def _on_step(self, number: int) -> None:
        with self._lock:
            self._numbers.clear()
            self._drain()
        self._interception.switch(self._selection.takes_step(number))

    def _on_unseen(self, found: Unseen) -> None:
        with self._lock:
            self.tally.skip(f"{found.entry} is not understood: {found.reason}")

    def _on_call(self, call: Call) -> Listener | Answer | None:
        if call.recomputed and recomputed_for_checkpoint():
            return None  # its first run gets the gradient
        with self._lock:
            self._drain()
            kind = "recomputed" if call.recomputed else "first"
            if not self._selection.takes_entry(call.entry):
                self.tally.other_entries[call.entry] += 1
                return Answer.INSIDE
            place = self._placed(call.layer, call.entry, kind)
            self.tally.see(place, call.problem.label(), differentiable=call.differentiable)
            if not self._wanted(place, call.meaning):
                return None
            if call.recomputed and self.tally.skipped[NO_BACKWARD]:
                # Reentrant checkpointing: of the first run, without gradients, it was said too early.
                self.tally.skipped[NO_BACKWARD] -= 1
            if call.differentiable:
                return self._pending.await_(place, call)
            self._abandoned(place, call)
            return None

    def _on_explicit(self, layer: str, meaning: Meaning, dout: Tensor, dlse: Tensor | None) -> None:
        if not self._interception.on:
            return
        with self._lock:
            if not self._selection.takes_entry(ENTRY):
                self.tally.other_entries[ENTRY] += 1
                return
            place = self._placed(layer, ENTRY, "backward")
            self.tally.see(place, meaning.problem.label(), differentiable=True)
            if self._wanted(place, meaning):
                self._save(place, meaning, dout, dlse)

    def _arrived(self, place: Place, call: Call, dout: Tensor | None, dlse: Tensor | None) -> None:
        with self._lock:
            if not call.intact():
                self.tally.skip(_CHANGED)
            else:
                self._save(place, call.meaning, dout, dlse)

    def _drain(self) -> None:
        for place, call in self._pending.abandoned():
            self._abandoned(place, call)

    def _abandoned(self, place: Place, call: Call | None) -> None:
        """No backward comes for this call."""
        if not self._forward_only or call is None:
            self.tally.skip(NO_BACKWARD)
        elif not call.intact():
            self.tally.skip(_CHANGED)
        else:
            self._save(place, call.meaning, None, None)

    def _placed(self, layer: str, entry: str, kind: str) -> Place:
        number = self._numbers[layer, kind]
        self._numbers[layer, kind] += 1
        return Place(
            layer=layer,
            index=self.tally.index(layer),
            step=self._steps.number,
            call=number,
            rank=self._where.rank(),
            entry=entry,
        )

    def _wanted(self, place: Place, meaning: Meaning) -> bool:
        if not self._selection.takes(place):
            self.tally.unselected += 1
            return False
        reason = refusal(meaning)
        if reason is not None:
            self.tally.skip(reason)
        return reason is None and self._saver is not None

    def _save(
        self, place: Place, meaning: Meaning, dout: Tensor | None, dlse: Tensor | None
    ) -> None:
        if self._saver is not None:
            self._saver.save(place, meaning, (dout, dlse), self.tally)


class _Counting(Interception):
    """Tells of every call that could not be looked at, not only of the first of a kind."""

    def unseen(self, found: Unseen) -> None:
        if self._on_unseen is not None:
            self._on_unseen(found)


def capture(  # noqa: PLR0913 - the public boundary, where each is a keyword of its own
    folder: str | os.PathLike[str] | None,
    *,
    layer: str | int | Iterable[str | int] | None = None,
    step: str | int | Iterable[int] | None = None,
    call: str | int | Iterable[int] | None = None,
    rank: str | int | Iterable[int] | None = None,
    entry: str | Iterable[str] | None = None,
    max_bytes: str | int = "1GiB",
    max_cases: int = 100,
    forward_only: bool = False,
    prefix: str = "",
    root: torch.nn.Module | None = None,
    functions: Sequence[str] = (),
    this_rank: int | None = None,
    provenance: Mapping[str, str | int] | None = None,
) -> Capture:
    """Save the attention calls that are made in a ``with`` block as case files.

    A case is written in the backward that brings the gradient of its output. index.jsonl in the folder has one
    line for each case, summary.jsonl one for each capture. Code that torch.compile made is not seen.

    Args:
        folder: where files go; it is made. None writes nothing: ``tally`` then says what there is to capture.
        layer: names of modules, patterns ("*.layers.3.*"), or indices in the order of first calls ("0-3").
        step: numbers and ranges ("0,10-20,100-:50"). A step ends when the optimizer stepped, or with
            ``Capture.step()``.
        call: the same for the number of a call among those of its layer in its step.
        rank: the same for ranks of torch.distributed; a process without a group counts as rank 0.
        entry: patterns of entry points ("*scaled_dot_product_attention", "flash_attn.*").
        max_bytes: of all files of this capture in this process together: "500MB", "2GiB" or an int.
        max_cases: files of this capture in this process.
        forward_only: save calls without a backward too; their dout is noise in closed form, and they say so.
        prefix: head of the files' names.
        root: only calls made by modules of this model.
        functions: "module:function" of further functions, called in the words of ``gradtruth.attention``.
        this_rank: the rank of this process, where torch.distributed does not know it.
        provenance: names to texts or ints, saved in every case.

    Returns:
        A context manager; in the block it has ``files``, ``step()`` and ``summary()``.

    Raises:
        InvalidProblem: an argument is none of these.
        OSError: the folder can be neither found nor made.
    """
    selection = Selection.of(layer=layer, step=step, call=call, rank=rank, entry=entry)
    where = Where(root=root, functions=functions, this_rank=this_rank, provenance=provenance or {})
    budget = Budget(max_bytes, max_cases)
    saver = None
    if folder is not None:
        saver = Saver(Folder(folder, prefix), budget, where.provenance)
    return Capture(saver, selection, where, forward_only=forward_only)
