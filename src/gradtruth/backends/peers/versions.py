"""The versions of what computes: for reports, because a finding holds for a version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

__all__ = ["loaded_cudnn", "peer_versions"]

_DISTRIBUTIONS = {
    "triton": ("triton", "pytorch-triton"),
    "flash-attn": ("flash-attn",),
    "flash-attn-3": ("flash-attn-3", "flash_attn_3"),
    "flash-attn-4": ("flash-attn-4",),
    "nvidia-cutlass-dsl": ("nvidia-cutlass-dsl",),
    "quack-kernels": ("quack-kernels",),
    "transformer-engine": ("transformer-engine", "transformer-engine-torch"),
    "cudnn-frontend": ("nvidia-cudnn-frontend",),
    "xformers": ("xformers",),
    "flash-linear-attention": ("flash-linear-attention", "fla-core"),
}


def peer_versions() -> dict[str, str]:
    """Name -> version of every peer that is installed, torch first; nothing is imported but torch.

    cuDNN is the one that torch has loaded; a second one of the system may serve other peers.
    """
    found = {"torch": str(torch.__version__)}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    cudnn = loaded_cudnn()
    if cudnn is not None:
        found["cudnn"] = _dotted(cudnn)
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found[name] = version(distribution)
            except PackageNotFoundError:
                continue
            break
    return found


def loaded_cudnn() -> int | None:
    """The version of the cuDNN that torch has loaded, 91900 for 9.19.0; None without one.

    ``torch.backends.cudnn.version`` raises where that is older than the one torch was built with: just where a
    report must name it.
    """
    library = getattr(torch._C, "_cudnn", None)
    if library is None:
        return None
    major, minor, patch = library.getRuntimeVersion()
    return major * (10000 if major >= 9 else 1000) + minor * 100 + patch


def _dotted(number: int) -> str:
    """91900 -> "9.19.0"; before 9 one digit less: 8907 -> "8.9.7"."""
    major, rest = divmod(number, 10000) if number >= 90000 else divmod(number, 1000)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"
