"""Whether an error has ended this process's use of a GPU."""

from __future__ import annotations

import torch

__all__ = ["lost"]


def lost(device: torch.device) -> bool:
    """Whether every call on this device fails from now on, as after an illegal or misaligned access of a kernel.

    CUDA keeps such an error for the rest of the process, so what fails later is no fault of its own.
    """
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
