"""Budget: how many cases and bytes a capture may write."""

from __future__ import annotations

import re

from gradtruth.errors import InvalidProblem

__all__ = ["Budget", "bytes_of", "shown_bytes"]

_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SHOWN = ("B", "kB", "MB", "GB")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]*)")


def bytes_of(name: str, given: str | int) -> int:
    """Bytes of "500MB", "2GiB", "4g" or an int.

    Raises:
        InvalidProblem: none of these, or not positive.
    """
    count = given
    if isinstance(given, str):
        found = _SIZE.fullmatch(given.strip().lower())
        unit = None if found is None else _UNITS.get(found[2])
        count = 0 if found is None or unit is None else int(float(found[1]) * unit)
    if type(count) is not int or count < 1:
        raise InvalidProblem(f"{name} is {given!r}, expected a size like 500MB or 2GiB")
    return count


def shown_bytes(count: int) -> str:
    """1234567 as "1.2 MB"."""
    if count < 1000:
        return f"{count} B"
    power = 1 if count < 999_950 else 2 if count < 999_950_000 else 3
    return f"{count / 1000**power:.1f} {_SHOWN[power]}"


class Budget:
    """What may still be written.

    Args:
        max_bytes: of all files of this capture together.
        max_cases: files.

    Raises:
        InvalidProblem: a limit that is not positive.
    """

    def __init__(self, max_bytes: str | int, max_cases: int) -> None:
        self.max_bytes = bytes_of("max_bytes", max_bytes)
        if type(max_cases) is not int or max_cases < 1:
            raise InvalidProblem(f"max_cases is {max_cases!r}, expected a positive int")
        self.max_cases = max_cases
        self.bytes = 0
        self.cases = 0

    def against(self, size: int) -> str | None:
        """The limit that a further case of this size would pass, in words; None where it fits."""
        if self.cases >= self.max_cases:
            return f"max_cases is {self.max_cases}"
        if self.bytes + size > self.max_bytes:
            return f"max_bytes is {shown_bytes(self.max_bytes)}"
        return None

    def spend(self, size: int) -> None:
        """A case of this size was written."""
        self.cases += 1
        self.bytes += size
