"""The container of a case: safetensors with 1-d tensors and exactly one metadata key, read with suspicion."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gradtruth.errors import CaseFormatError

__all__ = ["parse", "read_file", "unwrap", "wrap"]

_KEY = "gradtruth.case"
_MAX_HEADER = 1 << 20
_LENGTH = 8
_ITEM = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8, "BOOL": 1}


def wrap(bases: Mapping[str, Tensor], document: str) -> bytes:
    """The bytes of a file that holds the bases and the document. The same content gives the same bytes.

    With more than one metadata key safetensors writes them in another order every time.
    """
    on_host = {name: base.cpu() for name, base in bases.items()}
    return save(on_host, metadata={_KEY: document})


def unwrap(data: bytes) -> tuple[dict[str, Tensor], str]:
    """Bases and document of a file's bytes.

    Every length is checked against the number of bytes at hand before anything is allocated.

    Raises:
        CaseFormatError: truncated, trailing bytes, a header that is not JSON of the right form, dtypes that no
            case holds, tensors that overlap, leave holes or are not 1-d, or bools other than 0 and 1.
    """
    entries, document = _scan(data)
    try:
        bases = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CaseFormatError(f"safetensors does not read it: {error}") from error
    for name in entries:
        base = bases[name]
        if base.dtype == torch.bool and base.numel() and int(base.view(torch.uint8).max()) > 1:
            raise CaseFormatError(f"tensor {name!r} holds bools other than 0 and 1")
    # Fresh memory: what safetensors returns is aligned as the file happens to be.
    return {name: bases[name].clone() for name in entries}, document


def parse(text: str, what: str) -> Any:
    """JSON without duplicate names and without NaN.

    Raises:
        CaseFormatError: it is not that.
    """
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except CaseFormatError as error:
        raise CaseFormatError(f"{what}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CaseFormatError(f"{what} is not JSON: {error}") from error


def read_file(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a regular file.

    Raises:
        OSError: it cannot be opened.
        CaseFormatError: it is a folder, a device or a pipe.
    """
    found = Path(path)
    if found.exists() and not found.is_file():
        raise CaseFormatError("not a regular file")
    with found.open("rb") as file:
        head = file.read(_LENGTH)
        _header_size(head, os.fstat(file.fileno()).st_size)
        return head + file.read()


def _header_size(data: bytes, total: int) -> int:
    if len(data) < _LENGTH:
        raise CaseFormatError(f"{len(data)} bytes, expected a safetensors file")
    size = int.from_bytes(data[:_LENGTH], "little")
    if size > min(_MAX_HEADER, total - _LENGTH):
        raise CaseFormatError(
            f"the header says {size} bytes, expected at most {min(_MAX_HEADER, total - _LENGTH)}: "
            "truncated, or not a safetensors file"
        )
    return size


def _scan(data: bytes) -> tuple[dict[str, Any], str]:
    """Entries of the header by tensor name, and the document."""
    size = _header_size(data, len(data))
    try:
        text = data[_LENGTH : _LENGTH + size].decode("utf-8")
    except UnicodeDecodeError as error:
        raise CaseFormatError(f"the header is not UTF-8: {error}") from error
    header = parse(text, "the header")
    if not isinstance(header, dict):
        raise CaseFormatError(f"the header is a {type(header).__name__}, expected a JSON object")
    metadata = header.pop("__metadata__", None)
    if (
        not isinstance(metadata, dict)
        or list(metadata) != [_KEY]
        or not isinstance(metadata[_KEY], str)
    ):
        raise CaseFormatError(
            f"the metadata is not exactly one text {_KEY!r}: not a gradtruth case"
        )
    places = sorted(_place(name, entry) for name, entry in header.items())
    at = 0
    for first, last, name in places:
        if first != at:
            raise CaseFormatError(f"tensor {name!r} starts at byte {first}, expected {at}")
        at = last
    held = len(data) - _LENGTH - size
    if at != held:
        raise CaseFormatError(
            f"the tensors take {at} bytes, the file holds {held}: truncated or damaged"
        )
    return header, metadata[_KEY]


def _place(name: str, entry: Any) -> tuple[int, int, str]:
    """First and last byte of a tensor."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CaseFormatError(
            f"tensor {name!r} is {_short(entry)}, expected dtype, shape and data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM:
        raise CaseFormatError(
            f"tensor {name!r} has dtype {_short(dtype)}, expected one of {', '.join(_ITEM)}"
        )
    if not _naturals(shape, 1):
        raise CaseFormatError(f"tensor {name!r} has shape {_short(shape)}, expected one dim")
    if not _naturals(offsets, 2) or offsets[1] - offsets[0] != shape[0] * _ITEM[dtype]:
        raise CaseFormatError(
            f"tensor {name!r} has offsets {_short(offsets)}, expected {shape[0]} {dtype} elements"
        )
    return offsets[0], offsets[1], name


def _naturals(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(type(n) is int and n >= 0 for n in value)
    )


def _distinct(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise CaseFormatError(f"the name {_short(name)} stands twice in one object")
        found[name] = value
    return found


def _no_constant(text: str) -> float:
    raise CaseFormatError(f"the number {text} is not allowed")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
