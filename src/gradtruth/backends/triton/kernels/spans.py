"""What a mask tensor leaves: for every row (or column) the first and the last place that is not masked out."""

from __future__ import annotations

import triton
import triton.language as tl

FAR = tl.constexpr(2**30)  # past every place


@triton.jit(do_not_specialize=["own", "other", "heads", "tiles"])
def spans(
    Mask, Spans, mask_sb, mask_sh, mask_so, mask_st, own, other, heads, tiles,
    BLOCK_OWN: tl.constexpr, BLOCK_OTHER: tl.constexpr, BROADCAST: tl.constexpr,
):  # fmt: skip
    """Spans, int32 [B', H', own, 2]: first and last; FAR and -1 where all is masked out.

    own, other: rows and columns for the spans of rows, columns and rows for those of columns. BROADCAST: the mask has
    size 1 along other.
    """
    pid = tl.program_id(0)
    tile = pid % tiles
    h = (pid // tiles) % heads
    n = pid // tiles // heads
    place = tile * BLOCK_OWN + tl.arange(0, BLOCK_OWN)
    line = Mask + n.to(tl.int64) * mask_sb + h.to(tl.int64) * mask_sh
    line = line + place.to(tl.int64) * mask_so
    first = tl.full([BLOCK_OWN], FAR, tl.int32)
    last = tl.full([BLOCK_OWN], -1, tl.int32)
    for begin in range(0, other, BLOCK_OTHER):
        there = begin + tl.arange(0, BLOCK_OTHER)
        inside = (place < own)[:, None] & (there < other)[None, :]
        at = line[:, None] + there.to(tl.int64)[None, :] * mask_st
        seen = tl.load(at, mask=inside, other=1) == 0
        first = tl.minimum(first, tl.min(tl.where(seen, there[None, :], FAR), 1))
        last = tl.maximum(last, tl.max(tl.where(seen, there[None, :], -1), 1))
    if BROADCAST:
        last = tl.where(last < 0, last, FAR)
    to = Spans + ((n * heads + h).to(tl.int64) * own + place) * 2
    tl.store(to, first, mask=place < own)
    tl.store(to + 1, last, mask=place < own)


@triton.jit
def spanned(Spans, stride, place, valid, size, index, low, high, BLOCK: tl.constexpr):
    """Blocks [low, high) of the other side without those at either end that the mask hides from a whole tile.

    Args:
        Spans, stride: of the sequence and head; from place to place.
        place: of the rows of the tile, in the mask.
        valid: which of them belong to the sequence.
        size: of the mask along them; places past it are not masked.
        index: where the other side's sequence starts in the mask.
    """
    inside = valid & (place >= 0) & (place < size)
    at = Spans + place.to(tl.int64) * stride
    free = valid & ~inside
    first = tl.load(at, mask=inside, other=FAR)
    last = tl.load(at + 1, mask=inside, other=-1)
    begin = tl.min(tl.where(free, 0, first), 0) - index
    end = tl.max(tl.where(free, FAR, last), 0) - index + 1
    low = tl.maximum(low, tl.maximum(begin, 0) // BLOCK * BLOCK)
    return low, tl.maximum(tl.minimum(high, end), low)
