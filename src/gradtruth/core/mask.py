"""Mask names and band masks.

A mask is the intersection of up to four parts: the sequence lengths (padding), a band around the
diagonal (causal and sliding window), and an arbitrary tensor. This file holds the names and the band;
where a sequence lies is in ``extents``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gradtruth.errors import InvalidProblem

__all__ = [
    "BAND_LIMIT",
    "MASK_TYPES",
    "Alignment",
    "Band",
    "Extent",
    "MaskType",
    "band_of",
    "parse_mask_type",
]

Alignment = Literal["top_left", "bottom_right"]
Extent = Literal["none", "some", "all"]

# No sequence is this long, so a wider window is unlimited; i + diagonal + right stays inside int32.
BAND_LIMIT = 2**30


@dataclass(frozen=True, slots=True)
class MaskType:
    """A mask name taken apart. ``alignment`` is None where the name does not fix it."""

    padding: bool = False
    causal: bool = False
    arbitrary: bool = False
    alignment: Alignment | None = None


_PLAIN = {
    "no_mask": MaskType(),
    "padding": MaskType(padding=True),
    "causal": MaskType(causal=True, alignment="top_left"),
    "padding_causal": MaskType(padding=True, causal=True, alignment="top_left"),
    "causal_bottom_right": MaskType(causal=True, alignment="bottom_right"),
    "padding_causal_bottom_right": MaskType(padding=True, causal=True, alignment="bottom_right"),
}
_ALIASES = {"causal_padding": "padding_causal", "arbitrary,no_mask": "arbitrary"}
MASK_TYPES: dict[str, MaskType] = {
    **_PLAIN,
    "arbitrary": MaskType(arbitrary=True),
    **{
        f"arbitrary,{name}": MaskType(m.padding, m.causal, arbitrary=True, alignment=m.alignment)
        for name, m in _PLAIN.items()
        if name != "no_mask"
    },
}


def parse_mask_type(name: str) -> MaskType:
    """Take a mask name apart.

    Args:
        name: one of ``MASK_TYPES``. TransformerEngine's spellings are understood too: "," and "_" both
            separate "padding" and "causal", and "causal_padding" is "padding_causal". Spaces may stand
            around a comma. "arbitrary,no_mask" is "arbitrary".

    Raises:
        InvalidProblem: the name is unknown.
    """
    found = MASK_TYPES.get(name) if isinstance(name, str) else None
    if found is not None:
        return found
    if isinstance(name, str):
        parts = [part.strip() for part in name.split(",")]
        alone = parts[0] != "arbitrary" or len(parts) == 1
        head = _joined(parts) if alone else f"arbitrary,{_joined(parts[1:])}"
        found = MASK_TYPES.get(_ALIASES.get(head, head))
    if found is None:
        known = ", ".join(repr(n) for n in MASK_TYPES)
        raise InvalidProblem(f"attn_mask_type is {name!r}, expected one of {known}")
    return found


def _joined(parts: list[str]) -> str:
    name = "_".join(parts)
    return _ALIASES.get(name, name)


@dataclass(frozen=True, slots=True)
class Band:
    """Key j is visible to query i when ``i + diagonal - left <= j <= i + diagonal + right``.

    None is unlimited. The diagonal is data (per sequence) and passed in: 0 for top-left alignment,
    lk - lq for bottom-right. Closed under tiling: a tile that starts at (q0, k0) is the same band
    with ``diagonal + q0 - k0``.
    """

    left: int | None = None
    right: int | None = None

    @property
    def open(self) -> bool:
        """True when the band hides nothing."""
        return self.left is None and self.right is None

    def visible(self, i: Any, j: Any, diagonal: Any = 0) -> Any:
        """Whether j is visible to i: a bool for ints, a bool tensor for tensors. None when the band is open."""
        if self.open:
            return None
        centre = i + diagonal
        if self.left is None:
            return j <= centre + self.right
        if self.right is None:
            return j >= centre - self.left
        return (j >= centre - self.left) & (j <= centre + self.right)

    def key_range(self, i0: int, i1: int, length_kv: int, diagonal: int = 0) -> tuple[int, int]:
        """The half-open range of keys that some query in [i0, i1) may see; empty ranges are (k, k)."""
        if i0 >= i1:
            return 0, 0
        low = 0 if self.left is None else max(0, i0 + diagonal - self.left)
        high = length_kv if self.right is None else min(length_kv, i1 + diagonal + self.right)
        low = min(low, length_kv)
        return low, max(low, high)

    def query_range(self, j0: int, j1: int, length_q: int, diagonal: int = 0) -> tuple[int, int]:
        """The half-open range of queries that may see some key in [j0, j1); empty ranges are (i, i)."""
        if j0 >= j1:
            return 0, 0
        low = 0 if self.right is None else max(0, j0 - diagonal - self.right)
        high = length_q if self.left is None else min(length_q, j1 - diagonal + self.left)
        low = min(low, length_q)
        return low, max(low, high)

    def extent(self, length_q: int, length_kv: int, diagonal: int = 0) -> Extent:
        """How much of a length_q x length_kv tile the band shows, in O(1)."""
        if length_q <= 0 or length_kv <= 0:
            return "none"
        first, last = diagonal, length_q - 1 + diagonal
        if self.right is not None and last + self.right < 0:
            return "none"
        if self.left is not None and first - self.left > length_kv - 1:
            return "none"
        shows_left = self.left is None or last - self.left <= 0
        shows_right = self.right is None or first + self.right >= length_kv - 1
        if shows_left and shows_right:
            return "all"
        return "some"


def band_of(mask: MaskType, window: tuple[int, int]) -> Band:
    """The band of a causal flag intersected with a public window (left, right), where -1 is unlimited.

    Raises:
        InvalidProblem: an end of the window is under -1.
    """
    if min(window) < -1:
        raise InvalidProblem(f"window_size is {window!r}, expected two ints of at least -1")
    left, right = (None if w == -1 or w >= BAND_LIMIT else w for w in window)
    return Band(left, 0 if mask.causal else right)
