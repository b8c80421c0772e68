"""Calls that cannot be captured, and why."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtruth.verify.interception.call import Meaning

__all__ = ["recomputed_for_checkpoint", "refusal"]


def refusal(meaning: Meaning) -> str | None:
    """Why this call cannot be saved; None where it can."""
    if not meaning.known_dropout:
        return (
            f"dropout_p is {meaning.problem.spec.dropout_p:g}, and which weights were dropped is not known; "
            "set it to 0 to capture"
        )
    for name, tensor in meaning.inputs.items():
        reason = _unreadable(name, tensor)
        if reason is not None:
            return reason
    if meaning.inputs.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph was being captured"
    return None


def _unreadable(name: str, tensor: Tensor) -> str | None:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"{name} is a {type(tensor).__name__}, a plain tensor is needed"
    if tensor.is_meta:
        return f"{name} is on the meta device and has no values"
    return None


def recomputed_for_checkpoint() -> bool:
    """Inside a recomputation of non-reentrant checkpointing, whose outputs get no gradient themselves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003 # type: ignore[attr-defined]
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")
