"""Launching: a kernel that was compiled for such arguments before is launched without Triton's binder."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradtruth.core.recent import Recent

__all__ = ["Kernel"]

_CACHE_SIZE = 4096
_OPTIONS = ("num_warps", "num_stages")  # Triton's own: no arguments of a function


class Kernel:
    """A Triton function, and what it was compiled to for the arguments seen so far.

    Triton's own launch looks at each of some 80 arguments anew; that takes longer than everything else in a call.
    What it would find out follows from the key: device, dtypes, addresses modulo 16, strides, and constants.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled: Recent[tuple[dict[str, Any], Any, tuple[Any, ...]]] = Recent(_CACHE_SIZE)

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
        key = (
            tensors[0].device.index,
            id(constants),
            strides,
            tuple([(x.dtype, x.data_ptr() % 16) for x in tensors]),
        )
        found = self._compiled.get(key)
        if found is not None and found[0] is constants:
            found[1][(programs, 1, 1)](*tensors, *strides, *numbers, *found[2])
            return
        compiled = self._function[(programs,)](*tensors, *strides, *numbers, **constants)
        if compiled is not None:  # the interpreter compiles nothing
            values = tuple(v for name, v in constants.items() if name not in _OPTIONS)
            self._compiled.put(key, (constants, compiled, values))
