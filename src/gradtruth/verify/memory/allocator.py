"""A CUDA memory pool whose segments are filled with one byte, on an allocator compiled with the system's C compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

__all__ = ["filling_pool"]


def filling_pool(byte: int) -> torch.cuda.MemPool | str:
    """A fresh pool; where none can be made, why."""
    library, reason = _library()
    if library is None:
        return reason
    ctypes.CDLL(library).gradtruth_byte(byte)
    return torch.cuda.MemPool(_allocator(library))


@cache
def _allocator(library: str) -> Any:
    made = torch.cuda.memory.CUDAPluggableAllocator(library, "gradtruth_alloc", "gradtruth_free")
    return made.allocator()


@cache
def _library() -> tuple[str | None, str]:
    """Path of the compiled allocator, or why there is none."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    runtime = _cuda_runtime()
    if compiler is None or runtime is None:
        missing = "C compiler" if compiler is None else "CUDA runtime library"
        return None, f"no {missing} is found"
    folder = Path(tempfile.mkdtemp(prefix="gradtruth-"))
    source, target = folder / "allocator.c", folder / "allocator.so"
    source.write_text((files("gradtruth.verify.memory") / "allocator.c").read_text())
    command = [compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(target), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None, f"{compiler} says {done.stderr.strip()[:200]}"
    if ctypes.CDLL(str(target)).gradtruth_open(runtime.encode()):
        return None, f"{runtime} has no cudaMalloc"
    return str(target), ""


def _cuda_runtime() -> str | None:
    """The CUDA runtime that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if "libcudart" in line), None)
