"""outside_unchanged: nothing beside the tensors is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.core.tensors import Inputs
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import unanswered
from gradtruth.verify.findings import Kind
from gradtruth.verify.trial import wanted_of

__all__ = ["OUTSIDE_UNCHANGED"]

_BAND = 256  # elements on either side


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """A padded tile of a head dim that fills none was stored without a column bound, over its neighbour.

    Dao-AILab/flash-attention#2698. Every input, out and lse are views inside buffers with known values around them.
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    case, backend = subject.case, subject.backend
    guarded = {name: _Guarded(tensor) for name, tensor in case.tensors().items()}
    views = {name: guard.view for name, guard in guarded.items()}
    dout, dlse = views.pop("dout"), views.pop("dlse", None)
    inputs = Inputs(**views)
    with torch.no_grad():
        forward = backend.forward(case.problem, inputs)
        saved = {"out": _Guarded(forward.out), "lse": _Guarded(forward.lse)}
        given = replace(forward, out=saved["out"].view, lse=saved["lse"].view)
        backend.backward(case.problem, inputs, given, dout, dlse, wanted_of(case))
    for name, guard in (guarded | saved).items():
        written = guard.written()
        if written:
            text = f"{written} elements beside {name} were written"
            yield Judged(tensor=name, kind=Kind.WRITTEN, detail=(text,))


class _Guarded:
    """A tensor with the same strides inside a buffer whose other elements are known."""

    def __init__(self, tensor: Tensor) -> None:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
        size = span + 2 * _BAND
        fill = True if tensor.dtype == torch.bool else 77
        self.buffer = torch.full((size,), fill, dtype=tensor.dtype, device=tensor.device)
        self.view = self.buffer.as_strided(tensor.shape, tensor.stride(), _BAND)
        if tensor.numel():
            self.buffer[_BAND : _BAND + span] = tensor.as_strided(
                (span,), (1,), tensor.storage_offset()
            )
        self.before = self.buffer.clone()
        self.span = span

    def written(self) -> int:
        """How many elements outside the view changed."""
        changed = self.buffer != self.before
        changed &= ~(self.buffer.isnan() & self.before.isnan())
        changed[_BAND : _BAND + self.span] = False
        return int(changed.sum())


OUTSIDE_UNCHANGED = Check("outside_unchanged", _run)
