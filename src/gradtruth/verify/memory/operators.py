"""What operators allocate: tensors that torch makes empty hold a known byte, or have known bytes on both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["EmptyFilled", "Fresh", "Guarding"]

_EMPTY = frozenset(
    {
        "empty",
        "new_empty",
        "empty_like",
        "empty_strided",
        "new_empty_strided",
        "empty_permuted",
    }
)
_FRESH = _EMPTY | {
    "zeros",
    "new_zeros",
    "zeros_like",
    "ones",
    "new_ones",
    "ones_like",
    "full",
    "new_full",
    "full_like",
}
_BAND = 512  # bytes on either side; what CUDA's allocator aligns to
_CANARY = 0xA5


class _Mode(TorchDispatchMode):
    """A mode beside which torch.compile goes on compiling, and its kernels run as they do without."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this a compiled function falls back to eager, and its frame stays so."""
        return True


class EmptyFilled(_Mode):
    """Fills what ``torch.empty`` and its like return.

    Args:
        byte: that it holds.
        before: called before each operator.
    """

    def __init__(self, byte: int, before: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._byte, self._before = byte, before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; fill its result where it is one of the empty ones."""
        del types
        if self._before is not None:
            self._before()
        found = func(*args, **(kwargs or {}))
        if _name(func) in _EMPTY and isinstance(found, Tensor):
            _bytes(found).fill_(self._byte)
        return found


class Fresh:
    """A tensor that an operator made, with known bytes on both sides.

    Attributes:
        view: the tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        size = _bytes(tensor).numel()
        room = -(-size // _BAND) * _BAND + 2 * _BAND
        self._size = size
        self._buffer = torch.full((room,), _CANARY, dtype=torch.uint8, device=tensor.device)
        typed = self._buffer.view(tensor.dtype)
        offset = _BAND // tensor.element_size()
        self.view = typed.as_strided(tensor.shape, tensor.stride(), offset).copy_(tensor)

    def written(self) -> int:
        """How many bytes beside the tensor changed."""
        changed = self._buffer != _CANARY
        changed[_BAND : _BAND + self._size] = False
        return int(changed.sum())


class Guarding(_Mode):
    """Puts known bytes around every tensor that an operator makes without reading another.

    What is allocated inside a fused operator is out of its reach.

    Attributes:
        made: the tensors, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Fresh] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; put its result between bands where it is a fresh one."""
        del types
        found = func(*args, **(kwargs or {}))
        if _name(func) not in _FRESH or not _guardable(found):
            return found
        self.made.append(Fresh(found))
        return self.made[-1].view

    def written(self, results: Mapping[str, Tensor]) -> list[tuple[str | None, int, tuple]]:
        """Tensors beside which something was written: (name, bytes, shape); None is not one of the results."""
        found = []
        for fresh in self.made:
            count = fresh.written()
            if count:
                address = fresh.view.data_ptr()
                same = (name for name, x in results.items() if x.data_ptr() == address)
                found.append((next(same, None), count, tuple(fresh.view.shape)))
        return found


def _name(func: Any) -> str:
    return func.overloadpacket.__name__


def _guardable(found: Any) -> bool:
    """A plain tensor with elements: one without is made to be given its size later."""
    return (
        type(found) is Tensor
        and found.layout is torch.strided
        and found.device.type in ("cpu", "cuda")
        and found.numel() > 0
        and _BAND % found.element_size() == 0
    )


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes of its storage."""
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout is not torch.strided:
        return torch.empty(0, dtype=torch.uint8)
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage())
