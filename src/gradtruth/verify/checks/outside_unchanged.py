"""outside_unchanged: nothing beside the tensors is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.core.tensors import Inputs
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import unanswered
from gradtruth.verify.findings import Kind
from gradtruth.verify.memory.operators import Guarding
from gradtruth.verify.trial import Given, as_called, wanted_of

__all__ = ["OUTSIDE_UNCHANGED"]

_BAND = 512  # elements on either side; keeps 16-byte alignment for every dtype


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """A padded tile of a head dim that fills none was stored without a column bound, over its neighbour.

    Dao-AILab/flash-attention#2698. Every input, dout, and out and lse as given to the backward are views inside buffers
    with known values around and between their elements; so are results and scratch that PyTorch operators make.
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    guarding = Guarding()
    try:
        guarded, results = _guarded_call(subject, guarding)
    except Exception:  # noqa: BLE001 - not every operator runs under a dispatch mode
        guarding = Guarding()
        guarded, results = _guarded_call(subject, nullcontext())
    for name, guard in guarded.items():
        written = guard.written()
        if written:
            text = f"{written} elements beside {name} were written"
            yield Judged(tensor=name, kind=Kind.WRITTEN, detail=(text,))
    for name, written, shape in guarding.written(results):
        what = name or f"a fresh tensor {list(shape)}"
        text = f"{written} bytes beside {what} were written"
        yield Judged(tensor=name, kind=Kind.WRITTEN, detail=(text,))


def _guarded_call(
    subject: Subject, guarding: AbstractContextManager[object]
) -> tuple[dict[str, _Guarded], dict[str, Tensor]]:
    """Both halves on guarded tensors: the guards, and the results."""
    case, backend = subject.case, subject.backend
    given = as_called(case, case.tensors())
    guarded = {name: _Guarded(tensor) for name, tensor in _named(given).items()}
    views = {name: guard.view for name, guard in guarded.items()}
    dout, dlse = views.pop("dout"), views.pop("dlse", None)
    inputs = Inputs(**views)
    with torch.no_grad():
        with guarding:
            forward = backend.forward(case.problem, inputs)
        guarded["out"], guarded["lse"] = _Guarded(forward.out), _Guarded(forward.lse)
        saved = replace(forward, out=guarded["out"].view, lse=guarded["lse"].view)
        with guarding:
            grads = backend.backward(case.problem, inputs, saved, dout, dlse, wanted_of(case))
    results = {"out": forward.out, "lse": forward.lse, **dict(grads.items())}
    return guarded, results


def _named(given: Given) -> dict[str, Tensor]:
    found = {**dict(given.inputs.items()), "dout": given.dout}
    return found if given.dlse is None else found | {"dlse": given.dlse}


class _Guarded:
    """A copy with the same strides inside a buffer whose other elements are known."""

    def __init__(self, tensor: Tensor) -> None:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
        fill = True if tensor.dtype == torch.bool else 77
        like = {"dtype": tensor.dtype, "device": tensor.device}
        # Aligned as the tensor is.
        start = _BAND + tensor.data_ptr() % 16 // tensor.element_size()
        self._buffer = torch.full((span + 2 * _BAND,), fill, **like)
        self.view = self._buffer.as_strided(tensor.shape, tensor.stride(), start)
        self._own = torch.zeros_like(self._buffer, dtype=torch.bool)
        own = self._own.as_strided(tensor.shape, tensor.stride(), start)
        if tensor.numel():
            _once(own).fill_(1)
            _once(self.view).copy_(_once(tensor))
        self._before = self._buffer.clone()

    def written(self) -> int:
        """How many elements outside the view changed."""
        changed = self._buffer.view(torch.uint8) != self._before.view(torch.uint8)
        changed = changed.view(-1, self._buffer.element_size()).any(-1)
        return int((changed & ~self._own).sum())


def _once(tensor: Tensor) -> Tensor:
    """Every element of memory once: expanded dims have size 1."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


OUTSIDE_UNCHANGED = Check("outside_unchanged", _run)
