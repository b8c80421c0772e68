"""Where a case comes from: facts about the machine, and whatever its maker adds."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from gradtruth.backends.peers.versions import loaded_cudnn, peer_versions

__all__ = ["Provenance", "installed_version", "machine_facts"]

Provenance = Mapping[str, str | int]


def machine_facts(device: torch.device | str = "cpu") -> dict[str, str | int]:
    """Names and versions of what computes on this device.

    Args:
        device: where the tensors were made; a CUDA device adds its name, capability and CUDA version.

    Returns:
        Names to texts or numbers, with the version of every peer that is installed.
    """
    where = torch.device(device)
    facts: dict[str, str | int] = {
        "device": str(where),
        "platform": platform.platform(),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "gradtruth": installed_version("gradtruth"),
    }
    if where.type == "cuda":
        major, minor = torch.cuda.get_device_capability(where)
        facts["gpu"] = torch.cuda.get_device_name(where)
        facts["capability"] = f"{major}.{minor}"
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = loaded_cudnn() or 0
        facts["triton"] = installed_version("triton")
    return facts | {name: text for name, text in peer_versions().items() if name not in facts}


def installed_version(package: str) -> str:
    """The version of an installed package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    """The CPU's name; Linux tells it only in /proc/cpuinfo."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
