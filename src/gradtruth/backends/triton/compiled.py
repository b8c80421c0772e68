"""Launching: a kernel that was compiled for such arguments before is launched without Triton's binder."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from gradtruth.core.recent import Recent

__all__ = ["Kernel"]

_CACHE_SIZE = 4096
_DIRECT = ("3.6.",)  # versions of Triton whose launcher takes addresses as _Launch gives them
_OPTIONS = ("num_warps", "num_stages")  # Triton's own: no arguments of a function


class _Launch:
    """A compiled kernel with its constants.

    In the versions of Triton that are known here its launcher is called directly, with addresses: for a tensor it
    asks the driver what its address is, which for 17 tensors takes longer than the launch.
    """

    __slots__ = ("_compiled", "_function", "_metadata", "_run", "_values", "constants")

    def __init__(self, constants: dict[str, Any], compiled: Any, values: tuple[Any, ...]) -> None:
        import triton

        self.constants, self._compiled, self._values = constants, compiled, values
        self._run = None
        if triton.__version__.startswith(_DIRECT):
            self._run = compiled.run
            self._function, self._metadata = compiled.function, compiled.packed_metadata

    def launch(
        self,
        programs: int,
        device: int,
        pointers: list[int],
        tensors: tuple[Tensor, ...],
        strides: tuple[int, ...],
        numbers: tuple[int | float, ...],
    ) -> None:
        """Launch on the current stream of the device, which is the current one."""
        if self._run is None or _hooked():
            self._compiled[(programs, 1, 1)](*tensors, *strides, *numbers, *self._values)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        self._run(
            programs, 1, 1, stream, self._function, self._metadata, None, None, None,
            *pointers, *strides, *numbers, *self._values,
        )  # fmt: skip


def _hooked() -> bool:
    """A profiler of Triton's wants to see launches."""
    runtime = sys.modules["triton"].knobs.runtime
    return runtime.launch_enter_hook is not None or runtime.launch_exit_hook is not None


class Kernel:
    """A Triton function, and what it was compiled to for the arguments seen so far.

    Triton's own launch looks at each of some 80 arguments anew; that takes longer than everything else in a call.
    What it would find out follows from the key: device, dtypes, addresses modulo 16, strides, and constants.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled: Recent[_Launch] = Recent(_CACHE_SIZE)

    def __call__(
        self,
        programs: int,
        tensors: tuple[Tensor, ...],
        strides: tuple[int, ...],
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
    ) -> None:
        """Launch.

        Args:
            programs: the grid.
            tensors: come first among the arguments; all on one device.
            strides: come next; Triton specialises on them.
            numbers: come last; Triton does not specialise on them, so they are no part of the key.
            constants: by name, in the order of the function's arguments, then Triton's options. Not changed
                afterwards by the caller, who gives the same dict for the same constants.
        """
        pointers = [x.data_ptr() for x in tensors]
        device = tensors[0].device.index
        key = (
            device,
            id(constants),
            strides,
            tuple([x.dtype for x in tensors]),
            tuple([pointer & 15 for pointer in pointers]),
        )
        found = self._compiled.get(key)
        if found is not None and found.constants is constants:
            found.launch(programs, device, pointers, tensors, strides, numbers)
            return
        compiled = self._function[(programs,)](*tensors, *strides, *numbers, **constants)
        if compiled is not None:  # the interpreter compiles nothing
            values = tuple(v for name, v in constants.items() if name not in _OPTIONS)
            self._compiled.put(key, _Launch(constants, compiled, values))
