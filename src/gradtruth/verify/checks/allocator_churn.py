"""allocator_churn: frees and allocations of other sizes and dtypes between calls change nothing."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import torch

from gradtruth.core.tensors import Forward
from gradtruth.verify.checks.again import again
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Run, Subject
from gradtruth.verify.checks.verdicts import unanswered
from gradtruth.verify.trial import run_backward, run_forward

__all__ = ["ALLOCATOR_CHURN"]

_CHURNS = (
    (math.nan, torch.float32),
    (math.nan, torch.bfloat16),
    (3.0e4, torch.float32),
    (3.0e4, torch.bfloat16),
)


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """One fp32 to bf16 free and allocation between two backwards corrupted the second; empty_cache hid it.

    NVIDIA/TransformerEngine#2448. Blocks of the sizes of all tensors are filled with NaN or large numbers and freed,
    before a call and between its halves; then a GPU's allocator gives everything back (empty_cache).
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    for fill, dtype in _CHURNS:
        what = f"the first run, after freed {str(dtype).removeprefix('torch.')} of {fill:g}"
        found = list(again(subject, _churned(subject, fill, dtype), what))
        yield from found
        if found:
            return
    if subject.case.device.type == "cuda":
        _release(subject.case.device)
        yield from again(subject, subject.run(), "the first run, after the allocator was emptied")


def _churned(subject: Subject, fill: float, dtype: torch.dtype) -> Run:
    """A run with a churn before it and another between its halves."""
    case, backend = subject.case, subject.backend
    _churn(subject, fill, dtype)
    forward = run_forward(case, backend)
    _churn(subject, fill, dtype)
    given = forward.returned
    backward = run_backward(case, backend, given) if isinstance(given, Forward) else None
    return Run(forward, backward)


def _churn(subject: Subject, fill: float, dtype: torch.dtype) -> None:
    """Allocate, fill and free blocks of the sizes of inputs and results, and of a few times as much."""
    device = subject.case.device
    sizes = {tensor.numel() for tensor in subject.case.tensors().values()}
    sizes |= {tensor.numel() for tensor in subject.first.tensors.values()}
    blocks = [
        torch.full((size * times,), fill, dtype=dtype, device=device)
        for size in sizes
        for times in (1, 2, 4)
    ]
    del blocks
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _release(device: torch.device) -> None:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


ALLOCATOR_CHURN = Check("allocator_churn", _run)
