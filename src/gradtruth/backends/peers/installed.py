"""Whether a library is there, without importing it where that would be in vain."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec

from gradtruth.core.support import Reason, ReasonCode

__all__ = ["cuda_reasons", "importable", "library_on_cuda", "not_installed"]


def not_installed(module: str, project: str) -> list[Reason]:
    """A reason when the package that holds a module is not there. Only the outermost package is looked for.

    Args:
        module: dotted name.
        project: what to install, as package indexes name it.
    """
    package = module.partition(".")[0]
    if package in sys.modules or find_spec(package) is not None:
        return []
    return [Reason(ReasonCode.NOT_INSTALLED, f"{project} is not installed: no module {package!r}")]


def importable(module: str, project: str, names: Iterable[str] = ()) -> list[Reason]:
    """A reason when a module cannot be imported, or lacks a name that is needed. Imports it.

    Args:
        module: dotted name.
        project: what to install, as package indexes name it.
        names: attributes that the module must have.
    """
    found = not_installed(module, project)
    if found:
        return found
    try:
        loaded = import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        # A library that was built for another torch fails in any of these ways.
        text = f"{project} cannot be imported: {type(error).__name__}: {error}"
        return [Reason(ReasonCode.NOT_INSTALLED, text)]
    return [
        Reason(ReasonCode.VERSION, f"the installed {project} has no {module}.{name}")
        for name in names
        if not hasattr(loaded, name)
    ]


def cuda_reasons(device_type: str, capability: tuple[int, int]) -> list[Reason]:
    """A reason when a device is no CUDA device, or the present one is too old.

    Args:
        device_type: "cpu", "cuda" ...
        capability: the least compute capability.
    """
    import torch

    if device_type != "cuda":
        return [Reason(ReasonCode.DEVICE, f"device is {device_type}, a CUDA device is needed")]
    if not torch.cuda.is_available():
        return [Reason(ReasonCode.DEVICE, "no CUDA device is present, one is needed")]
    have = torch.cuda.get_device_capability()
    if have >= capability:
        return []
    shown = [".".join(map(str, c)) for c in (have, capability)]
    return [Reason(ReasonCode.DEVICE, f"compute capability is {shown[0]}, {shown[1]} is needed")]


def library_on_cuda(
    device_type: str,
    capability: tuple[int, int],
    module: str,
    project: str,
    names: Iterable[str] = (),
) -> list[Reason]:
    """Reasons of a library that runs on CUDA devices only; it is imported only where there is one.

    Args:
        device_type, capability: as for ``cuda_reasons``.
        module, project, names: as for ``importable``.
    """
    absent = cuda_reasons(device_type, capability)
    return (
        [*absent, *not_installed(module, project)] if absent else importable(module, project, names)
    )
