"""The option --device."""

from __future__ import annotations

import torch

from gradtruth.errors import InvalidProblem

__all__ = ["device_of"]


def device_of(name: str) -> torch.device:
    """The device of this name.

    Raises:
        InvalidProblem: neither cpu nor cuda, or this machine has no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidProblem(f"--device is {name!r}, expected cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidProblem(f"--device is {name!r}, expected cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        # torch keeps the index in 8 bits: a large one comes back negative.
        if not 0 <= (device.index or 0) < count:
            raise InvalidProblem(f"--device is {name!r}, but this machine has {count} CUDA devices")
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu")
