"""Full precision: matrix products of fp32 operands that are as accurate as the Spec demands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from gradtruth.core.problem import Problem

__all__ = ["full_precision"]


@contextmanager
def full_precision(problem: Problem, device: torch.device) -> Iterator[None]:
    """Inside, a product of fp32 tensors has fp32 accuracy, or TF32 where ``spec.allow_tf32`` says so.

    Two settings of the process could lower it. Autocast is switched off (it belongs to the thread).
    PyTorch's switch for fp32 products is global, so it is written, and restored, only where it stands lower
    than the Spec allows; through the public functions that never happens on a GPU, because they read the Spec
    from the switch. Where the Spec allows TF32 the switch is left alone: it decides.
    """
    allowed = ("ieee", "none", "tf32") if problem.spec.allow_tf32 else ("ieee", "none")
    kind = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    matmul = kind.matmul  # type: ignore[attr-defined]
    with ExitStack() as stack:
        kind = device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        standing = matmul.fp32_precision
        if standing not in allowed:
            stack.callback(setattr, matmul, "fp32_precision", standing)
            matmul.fp32_precision = "ieee"
        yield
