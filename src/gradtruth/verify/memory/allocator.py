"""A CUDA memory pool whose free memory holds one byte, on an allocator compiled with the system's C compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

__all__ = ["FillingPool", "compile_allocator", "filling_pool"]

_SOURCE = "allocator.c"


class FillingPool:
    """A pool whose segments are filled when they are made, and whose freed blocks are filled when asked for.

    Attributes:
        pool: for ``torch.cuda.use_mem_pool``.
    """

    def __init__(self, library: str, byte: int) -> None:
        self._handle, self._byte = ctypes.CDLL(library), byte
        self._handle.gradtruth_fill.argtypes = (
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_size_t,
            ctypes.c_void_p,
        )
        self._freed = -1
        self._handle.gradtruth_byte(byte)
        self.pool = torch.cuda.MemPool(_allocator(library))

    def refill(self, device: torch.device) -> None:
        """Fill every block of the pool that is free, where any was freed since the last time.

        The host waits for nothing: a free block is used next by its own stream, and is filled in that stream's order.
        """
        # Counted when the last stream that uses a block is done with it.
        freed = torch.cuda.memory_stats_as_nested_dict(device)["active"]["all"]["freed"]
        if freed == self._freed:
            return
        self._freed = freed
        for segment in self.pool.snapshot():
            address, stream = segment["address"], segment["stream"]
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    size = block["size"]
                    error = self._handle.gradtruth_fill(address, self._byte, size, stream)
                    if error:
                        raise RuntimeError(f"cudaMemsetAsync of a free block returned {error}")
                address += block["size"]


def filling_pool(byte: int) -> FillingPool | str:
    """A fresh pool that fills with a byte, 0 to 255; where none can be made, why."""
    runtime = _cuda_runtime()
    if runtime is None:
        return "no CUDA runtime library is loaded"
    library, reason = compile_allocator()
    if library is None:
        return reason
    if ctypes.CDLL(library).gradtruth_open(runtime.encode()):
        return f"{runtime} has no cudaMalloc"
    return FillingPool(library, byte)


@cache
def compile_allocator() -> tuple[str | None, str]:
    """Path of the compiled allocator, once per process, or None and why there is none."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang", "g++"))), None)
    if compiler is None:
        return None, "no C compiler is found"
    folder = Path(_folder().name)
    source, target = folder / _SOURCE, folder / "allocator.so"
    source.write_text((files("gradtruth.verify.memory") / _SOURCE).read_text())
    command = [compiler, "-x", "c", "-O1", "-shared", "-fPIC", str(source), "-o", str(target)]
    done = subprocess.run([*command, "-ldl"], capture_output=True, text=True, check=False)
    if done.returncode:
        return None, f"{compiler} says {done.stderr.strip()[:200]}"
    return str(target), ""


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends, a forked one too."""
    made = tempfile.TemporaryDirectory(prefix="gradtruth-")
    Finalize(None, made.cleanup, exitpriority=0)
    return made


@cache
def _allocator(library: str) -> Any:
    made = torch.cuda.memory.CUDAPluggableAllocator(library, "gradtruth_alloc", "gradtruth_free")
    return made.allocator()


def _cuda_runtime() -> str | None:
    """The CUDA runtime that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((line[line.index("/") :] for line in lines if "libcudart" in line), None)
