"""Bases and views: tensors that share storage as the memory they share and where each lies in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtruth.errors import InvalidProblem

__all__ = ["View", "footprint", "join", "split"]

_ALIGNMENT = 16  # bytes; what StrideClass.aligned looks at
_MAX_HOLE = 1 << 16  # bytes; views further apart than this in one storage are kept apart
_MAX_NUMEL = 1 << 40
_MAX_DIM = 8


@dataclass(frozen=True, slots=True)
class View:
    """Where a tensor lies in a base.

    Attributes:
        base: name of the base.
        size, stride, offset: as in ``torch.as_strided``, in elements.
    """

    base: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """One past the last element of the base that the view touches; 0 when it has no elements."""
        if 0 in self.size:
            return 0
        return self.offset + _span(self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Region:
    """Elements [first, last) of a storage, touched by the named tensors."""

    names: tuple[str, ...]
    first: int
    last: int


def split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, View]]:
    """Take tensors apart into bases, each a fresh 1-d tensor, and views of them.

    Storage that tensors share is kept once, cut down to the part that they touch. What lies between their
    elements is kept as it is, so that a kernel that reads it still does. A base starts as many elements
    early as it takes for every view to keep its address modulo 16 bytes.

    Args:
        tensors: strided tensors on any device, of any strides.

    Returns:
        Bases on the tensors' device, named after their tensors ("q+k+v"), and a view per tensor.

    Raises:
        InvalidProblem: a tensor that is not strided.
    """
    bases: dict[str, Tensor] = {}
    views: dict[str, View] = {}
    for names in _storages(tensors):
        for region in _regions({name: tensors[name] for name in names}):
            base = "+".join(region.names)
            bases[base], shift = _copy(tensors[region.names[0]], region)
            for name in region.names:
                tensor = tensors[name]
                offset = int(tensor.storage_offset()) + shift if tensor.numel() else 0
                views[name] = View(base, tuple(tensor.shape), tensor.stride(), offset)
    return bases, views


def footprint(tensors: Mapping[str, Tensor]) -> int:
    """At most how many bytes the bases of ``split`` have. Nothing is copied.

    Raises:
        InvalidProblem: a tensor that is not strided.
    """
    return sum(
        (region.last - region.first) * tensors[region.names[0]].element_size() + _ALIGNMENT
        for names in _storages(tensors)
        for region in _regions({name: tensors[name] for name in names})
    )


def join(bases: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
    """Put the views back on their bases: the inverse of ``split``.

    Raises:
        InvalidProblem: a view of an absent base, of negative or huge numbers, or that leaves its base; a base
            that no view touches.
    """
    for name, view in views.items():
        _check(name, view, bases)
    unused = sorted(set(bases) - {view.base for view in views.values()})
    if unused:
        raise InvalidProblem(f"bases {unused} have no view, expected one of each")
    return {
        name: torch.as_strided(bases[view.base], view.size, view.stride, view.offset)
        for name, view in views.items()
    }


def _storages(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of the tensors per storage (and dtype)."""
    found: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_nested:
            raise InvalidProblem(f"{name} has layout {tensor.layout}, expected a strided tensor")
        address = tensor.untyped_storage().data_ptr() if tensor.numel() else name
        found.setdefault((tensor.device, address, tensor.dtype), []).append(name)
    return list(found.values())


def _regions(tensors: Mapping[str, Tensor]) -> list[_Region]:
    """The parts of one storage that its tensors touch, from low to high."""
    touched = sorted(_touched(name, tensor) for name, tensor in tensors.items())
    order = {name: at for at, name in enumerate(tensors)}
    regions: list[_Region] = []
    for first, last, name in touched:
        hole = _MAX_HOLE // tensors[name].element_size()
        if regions and first <= regions[-1].last + hole:
            before = regions.pop()
            names = tuple(sorted((*before.names, name), key=order.__getitem__))
            regions.append(_Region(names, before.first, max(before.last, last)))
        else:
            regions.append(_Region((name,), first, last))
    return regions


def _touched(name: str, tensor: Tensor) -> tuple[int, int, str]:
    if tensor.numel() == 0:
        return 0, 0, name
    first = int(tensor.storage_offset())
    return first, first + _span(tuple(tensor.shape), tensor.stride()), name


def _span(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def _copy(tensor: Tensor, region: _Region) -> tuple[Tensor, int]:
    """A copy of a region of the tensor's storage, and what to add to storage offsets to find them in it."""
    count = region.last - region.first
    if count == 0:
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device), 0
    raw = tensor.detach().as_strided((count,), (1,), region.first)
    early = raw.data_ptr() % _ALIGNMENT // tensor.element_size()
    base = torch.zeros(early + count, dtype=tensor.dtype, device=tensor.device)
    base[early:] = raw
    return base, early - region.first


def _check(name: str, view: View, bases: Mapping[str, Tensor]) -> None:
    if view.base not in bases:
        raise InvalidProblem(f"{name} is a view of {view.base!r}, expected one of {sorted(bases)}")
    if len(view.size) != len(view.stride) or len(view.size) > _MAX_DIM:
        raise InvalidProblem(
            f"{name} has size {list(view.size)} and stride {list(view.stride)}, "
            f"expected as many of each, at most {_MAX_DIM}"
        )
    numbers = (*view.size, *view.stride, view.offset)
    if any(n < 0 or n > _MAX_NUMEL for n in numbers) or math.prod(view.size) > _MAX_NUMEL:
        raise InvalidProblem(
            f"{name} has size {list(view.size)}, stride {list(view.stride)} and offset {view.offset}, "
            f"expected non-negative numbers and at most {_MAX_NUMEL} elements"
        )
    held = bases[view.base].numel()
    if view.end > held or (0 in view.size and view.offset > held):
        raise InvalidProblem(
            f"{name} reaches element {max(view.end, view.offset)} of base {view.base!r}, which has {held}"
        )
