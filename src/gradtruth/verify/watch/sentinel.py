"""watch: a sentinel on the attention of a model that trains."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from gradtruth.errors import InvalidProblem
from gradtruth.verify.capture.budget import Budget
from gradtruth.verify.capture.capture import Where
from gradtruth.verify.capture.folder import Folder
from gradtruth.verify.capture.imports import Imports
from gradtruth.verify.capture.refusals import recomputed_for_checkpoint, refusal
from gradtruth.verify.capture.selection import Place
from gradtruth.verify.interception import Answer, Call, Interception, Listener, Unseen
from gradtruth.verify.watch.examination import Effort, Wrong, examine
from gradtruth.verify.watch.finding import Finding, WrongAttention, WrongAttentionWarning
from gradtruth.verify.watch.listener import Heard
from gradtruth.verify.watch.record import Record
from gradtruth.verify.watch.saved import Saved
from gradtruth.verify.watch.steps import Steps
from gradtruth.verify.watch.turns import Turns

__all__ = ["Watch", "watch"]

OnFinding = Literal["warn", "raise"] | Callable[[Finding], None]

_COARSE = ("transformers.eager_attention_forward",)
_CHANGED = "an input was written to between forward and backward"
_LOGGER = logging.getLogger("gradtruth")


class Watch:
    """Watches from when it is made until ``close``. Made by ``watch``.

    Args:
        where: in which model, as which rank.
        every: steps between two that are watched.
        effort: how much is looked at.
        on_finding: what happens with a finding.
        saved: writes cases; None writes none.
        turns: which calls are looked at.
        seed: of what is drawn.

    Attributes:
        record: what was seen, and what was not reached and why.
    """

    def __init__(
        self,
        where: Where,
        every: int,
        effort: Effort,
        on_finding: OnFinding,
        saved: Saved | None,
        turns: Turns,
        seed: int,
    ) -> None:
        self.record = Record()
        if saved is not None:
            self.record.unsaved = saved.tally
        self._where, self._effort, self._seed = where, effort, seed
        self._on_finding, self._saved, self._turns = on_finding, saved, turns
        self._lock = threading.RLock()
        self._numbers: Counter[tuple[str, bool]] = Counter()
        self._warned: set[tuple[str, str]] = set()
        self._interception = Interception(
            self._on_call, where.root, self._on_unseen, where.functions
        )
        self._imports = Imports(self._interception.open)
        self._interception.open()
        self._imports.open()
        self._closed = False
        self._steps = Steps(where.root, every, self._switch)
        if where.root is not None:
            self.record.compiled = _compiled(where.root)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def findings(self) -> list[Finding]:
        """What was found, in that order; the first 1,000."""
        return list(self.record.findings)

    @property
    def step_number(self) -> int:
        """Number of the step that runs; -1 before the first."""
        return self._steps.number

    @property
    def steps_watched(self) -> int:
        """How many steps were watched."""
        return self._steps.watched

    def step(self) -> None:
        """A step ends here. Once this was called, forwards do not count as steps any more."""
        self._steps.mark()

    def summary(self) -> str:
        """What was looked at, what was found, and what was not reached and why, in a few lines."""
        return self.record.summary(self._steps.number + 1, self._steps.watched)

    def close(self) -> None:
        """Watch no more, and log the summary (logger "gradtruth"). Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        self._steps.close()
        self._imports.close()
        self._interception.close()
        level = logging.WARNING if self.record.alarming(self._steps.watched) else logging.INFO
        _LOGGER.log(level, "watch: %s", self.summary())

    # ---------------------------------------------------------------- what happens

    def _switch(self, on: bool) -> None:  # noqa: FBT001 - its only argument
        if on:
            self._numbers.clear()
            self._turns.begin()
        self._interception.switch(on)

    def _on_unseen(self, found: Unseen) -> None:
        with self._lock:
            self.record.pass_over(f"{found.entry} is not understood: {found.reason}")

    def _on_call(self, call: Call) -> Listener | Answer | None:
        if not call.differentiable or (call.recomputed and recomputed_for_checkpoint()):
            return None  # of a call that is made twice, the one that gets the gradient
        with self._lock:
            number = self._numbers[call.layer, call.recomputed]
            self._numbers[call.layer, call.recomputed] += 1
            reason = refusal(call.meaning) if call.known_dropout else None
            if reason is not None:
                self.record.pass_over(reason)
                return None
            if not self._turns.due(self._where.rank() or 0):
                self.record.waiting += 1
                return None
            place = Place(
                layer=call.layer,
                index=0,
                step=self._steps.number,
                call=number,
                rank=self._where.rank(),
                entry=call.entry,
            )
            return Heard(place, call, self._arrived)

    def _arrived(
        self,
        heard: Heard,
        dout: Tensor | None,
        dlse: Tensor | None,
        grads: Mapping[str, Tensor],
    ) -> None:
        """The gradients of a call are there: it is looked at, here in the backward."""
        call, place = heard.call, heard.place
        if not call.intact():
            with self._lock:
                self.record.pass_over(_CHANGED)
            return
        try:
            with torch.no_grad(), torch.autocast(call.inputs.q.device.type, enabled=False):
                found = self._examined(heard, dout, dlse, grads)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            text = " ".join(str(error).split())
            with self._lock:
                self.record.pass_over(f"{type(error).__name__}: {text[:200]}")
            return
        self._tell(place, call, found, (dout, dlse))

    def _examined(
        self,
        heard: Heard,
        dout: Tensor | None,
        dlse: Tensor | None,
        grads: Mapping[str, Tensor],
    ) -> tuple[Wrong, ...]:
        call, place = heard.call, heard.place
        tensors = {name: x for name, x in grads.items() if name in ("dq", "dk", "dv")}
        results = {"out": heard.out, "lse": heard.lse}
        if heard.intact():
            tensors |= {name: x for name, x in results.items() if x is not None}
        if dout is None:
            q = call.inputs.q
            dout = q.new_zeros(()).expand(*q.shape[:-1], call.problem.head_dim_v)
        seed = f"{self._seed}/{place.rank}/{place.step}/{place.layer}/{place.call}"
        coarse = call.entry in _COARSE
        answer = examine(call.meaning, tensors, (dout, dlse), self._effort, seed, coarse=coarse)
        with self._lock:
            self.record.see(place, call, answer)
            if not heard.intact():
                self.record.pass_over(
                    "out was written to after the call: out and lse are not looked at"
                )
        return answer.wrong

    def _tell(
        self,
        place: Place,
        call: Call,
        wrong: tuple[Wrong, ...],
        upstream: tuple[Tensor | None, Tensor | None],
    ) -> None:
        if not wrong:
            return
        with self._lock:
            found = [_finding(place, call, each) for each in wrong]
            path = None
            if self._saved is not None and call.known_dropout:
                path = self._saved.save(place, call, upstream, found)
            found = [each.with_case(path) for each in found]
            for each in found:
                self.record.find(each)
        for each in found:
            self._react(each)

    def _react(self, found: Finding) -> None:
        if self._on_finding == "raise":
            raise WrongAttention(found)
        if callable(self._on_finding):
            self._on_finding(found)
            return
        with self._lock:
            key = (found.layer, found.tensor)
            new = key not in self._warned
            self._warned.add(key)
        if new:
            warnings.warn(str(found), WrongAttentionWarning, stacklevel=2)


def _finding(place: Place, call: Call, wrong: Wrong) -> Finding:
    return Finding(
        step=place.step,
        layer=place.layer,
        entry=place.entry,
        call=place.call,
        tensor=wrong.tensor,
        sequence=wrong.sequence,
        head=wrong.head,
        places=wrong.places,
        text=wrong.text,
        problem=call.problem.label(),
        rank=place.rank,
    )


def _compiled(root: nn.Module) -> tuple[str, ...]:
    """Names of the modules that torch.compile made or replaced."""
    return tuple(
        name or type(root).__name__
        for name, module in root.named_modules()
        if type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def watch(  # noqa: PLR0913 - the public boundary, where each is a keyword of its own
    model: nn.Module | None,
    every: int = 100,
    *,
    calls: int | None = 3,
    rows: int = 8,
    columns: int = 8,
    heads: int = 1,
    sequences: int = 8,
    on_finding: OnFinding = "warn",
    save: str | os.PathLike[str] | None = None,
    max_cases: int = 8,
    max_bytes: str | int = "1GiB",
    functions: Sequence[str] = (),
    seed: int = 0,
    this_rank: int | None = None,
) -> Watch:
    """Look at the attention of a model while it trains: laws in every head, exact probes in some.

    A step is a forward of ``model`` in training mode, or ends where ``Watch.step`` is called; the first is step 0.
    Steps 0, every, 2 * every ... are watched. In these the attention calls inside the model (ours,
    ``F.scaled_dot_product_attention``, TransformerEngine, flash-attn, transformers ...) are looked at when their
    gradients are there, ``calls`` of them in turns. In the others nothing happens and nothing waits for the device.
    The training computes the same bits as without. Code that torch.compile made is not reached.

    Args:
        model: whose attention; any module, an attention module itself too. None is every call of the process, and
            then steps end by ``Watch.step``.
        every: steps from one that is watched to the next.
        calls: that are looked at in each of these, in turns; in the first one all are, and with None always.
        rows: queries whose out, lse and dq are computed anew per (sequence, KV head).
        columns: keys whose dk and dv are.
        heads: (sequence, KV head) in which they are, per call; drawn anew each time.
        sequences: in whose every head the conservation laws are looked at, per call; drawn too.
        on_finding: "warn" warns once per layer and tensor, "raise" raises ``WrongAttention`` in the backward, a
            function is called with each ``Finding``.
        save: folder where wrong calls are written as case files, at once; one for each layer and set of tensors.
        max_cases, max_bytes: of these files.
        functions: "module:function" of further functions, called in the words of ``gradtruth.attention``.
        seed: of what is drawn; the global generators are left alone.
        this_rank: the rank of this process, where torch.distributed does not know it.

    Returns:
        What watches, from now until ``close`` or the end of its ``with`` block.

    Raises:
        InvalidProblem: an argument is none of these.
        OSError: the folder can be neither found nor made.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise InvalidProblem(
            f"model is a {type(model).__name__}, expected a torch.nn.Module or None"
        )
    if type(every) is not int or every < 1:
        raise InvalidProblem(f"every is {every!r}, expected a positive int")
    if not callable(on_finding) and on_finding not in ("warn", "raise"):
        raise InvalidProblem(
            f"on_finding is {on_finding!r}, expected 'warn', 'raise' or a function"
        )
    if type(seed) is not int:
        raise InvalidProblem(f"seed is {seed!r}, expected an int")
    effort = Effort(rows=rows, columns=columns, heads=heads, sequences=sequences)
    where = Where(root=model, functions=functions, this_rank=this_rank)
    budget = Budget(max_bytes, max_cases)
    saved = None if save is None else Saved(Folder(Path(save)), budget)
    return Watch(where, every, effort, on_finding, saved, Turns(calls), seed)
