"""A shelf: a folder of tensors that one process computes and others read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["Shelf"]


class Shelf:
    """Groups of tensors by name, one file each.

    Args:
        folder: that exists.
        fills: whether what is missing is put there. Only a process that runs no backend under examination should:
            what such a backend does to its process must not reach the others.
    """

    def __init__(self, folder: Path, *, fills: bool = False) -> None:
        self._folder, self._fills = folder, fills

    def kept(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of a name, on the CPU as they were put there; made where they are missing.

        Args:
            name: of the group.
            make: computes it.
        """
        path = self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.safetensors"
        if path.exists():
            return load_file(path)
        found = dict(make())
        if self._fills:
            unfinished = path.with_suffix(f".{os.getpid()}.tmp")
            save_file({key: tensor.contiguous() for key, tensor in found.items()}, unfinished)
            unfinished.replace(path)
        return found
