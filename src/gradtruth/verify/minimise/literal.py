"""Tensors as Python expressions: closed forms, short literals, packed bytes."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from gradtruth.errors import InvalidProblem
from gradtruth.verify.edits.values import pattern
from gradtruth.verify.same_bits import as_integers, same_bits

__all__ = ["HELPERS", "expression", "helpers_of"]

_LITERAL = 96  # elements
_PACKED = 8192  # characters
_ALIGNMENT = 16  # bytes

HELPERS: dict[str, str] = {
    "ramp": "def ramp(factor, *shape): "
    "return ((torch.arange(math.prod(shape)) * factor % 17 - 8) / 4).view(shape)",
    "packed": "def packed(text, dtype, *shape): "
    "return torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(text))), dtype=dtype)"
    ".view(shape).to(torch.get_default_device())",
}
"""Functions that expressions may call."""

_MODULES = {"ramp": ("math",), "packed": ("base64", "zlib")}


def helpers_of(text: str) -> tuple[list[str], list[str], list[str]]:
    """Modules, import lines and definitions that expressions in a text need besides torch."""
    called = [name for name in HELPERS if f"{name}(" in text]
    numbers = [name for name in ("inf", "nan") if _names(text, name)]
    lines = [f"from math import {', '.join(numbers)}"] if numbers else []
    modules = sorted({module for name in called for module in _MODULES[name]})
    return modules, lines, [HELPERS[name] for name in called]


def expression(tensor: Tensor) -> str:
    """An expression of torch and ``HELPERS`` that makes the tensor on the CPU: its bits and its strides.

    Raises:
        InvalidProblem: it would be longer than a script should be.
    """
    tensor = tensor.detach()
    if (tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0) or not tensor.numel():
        return _dense(tensor.cpu())
    early = tensor.data_ptr() % _ALIGNMENT // tensor.element_size()
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.as_strided(tensor, (reach,), (1,), tensor.storage_offset()).cpu()
    base = torch.cat([memory.new_zeros(early), memory])
    return f"{_dense(base)}.as_strided({tuple(tensor.shape)}, {tensor.stride()}, {early})"


def _dense(tensor: Tensor) -> str:
    shape = tuple(tensor.shape)
    sizes = "".join(f", {n}" for n in shape)
    if tensor.dim() == 0:
        return f"torch.tensor({tensor.item()!r}{_dtype(tensor)})"
    if not tensor.numel() or not as_integers(tensor).any():
        return f"torch.zeros({sizes[2:] if len(shape) > 1 else shape}{_dtype(tensor)})"
    if same_bits(tensor, tensor.reshape(-1)[:1].expand(shape)):
        return f"torch.full({shape}, {tensor.reshape(-1)[0].item()!r}{_dtype(tensor)})"
    if tensor.is_floating_point():
        for factor in range(3, 14):
            if same_bits(tensor, pattern(shape, factor).to(tensor.dtype)):
                return f"ramp({factor}{sizes}){_cast(tensor)}"
    # A list keeps no bits of NaN but that it is one.
    if tensor.numel() <= _LITERAL and same_bits(
        tensor, torch.tensor(tensor.tolist(), dtype=tensor.dtype)
    ):
        numbers = str(tensor.tolist()).replace(" ", "")
        return f"torch.tensor({numbers}{_dtype(tensor)})"
    raw = as_integers(tensor).contiguous().numpy().tobytes()
    text = base64.b85encode(zlib.compress(raw, 9)).decode()
    if len(text) > _PACKED:
        raise InvalidProblem(
            f"a tensor of shape {list(shape)} is {len(text)} characters, expected at most {_PACKED}"
        )
    return f"packed({text!r}, {tensor.dtype}{sizes})"


def _dtype(tensor: Tensor) -> str:
    default = {torch.float32, torch.bool} if tensor.dim() else {torch.int64}
    return (
        "" if tensor.dtype in default and tensor.dtype != torch.bool else f", dtype={tensor.dtype}"
    )


def _cast(tensor: Tensor) -> str:
    return "" if tensor.dtype == torch.float32 else f".to({tensor.dtype})"


def _names(text: str, name: str) -> bool:
    """The number stands in a list or call, outside of a packed text."""
    marks: Iterable[str] = ("[", ",", "(", "-", " ")
    return any(f"{mark}{name}{end}" in text for mark in marks for end in (",", "]", ")"))
