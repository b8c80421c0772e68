"""Where every sequence lies, from cu_seqlens, in one launch: what core.extents.resolve does in some twenty."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _side(Cu, Offsets, stride, offsets_stride, n, inside, places, bound, PACKED: tl.constexpr):
    """Start and length of sequences n on one side, inside the storage whatever the content."""
    # int64: the difference of two hostile int32 values may overflow.
    first = tl.load(Cu + n * stride, mask=inside, other=0).to(tl.int64)
    length = tl.load(Cu + (n + 1) * stride, mask=inside, other=0).to(tl.int64) - first
    start = n * 0
    if PACKED:
        at = tl.load(Offsets + n * offsets_stride, mask=inside, other=0)
        end = tl.load(Offsets + (n + 1) * offsets_stride, mask=inside, other=0)
        start = tl.minimum(tl.maximum(at, 0), places)
        end = tl.minimum(tl.maximum(end, 0), places)
        length = tl.minimum(length, (end - start).to(tl.int64))
    length = tl.minimum(tl.maximum(length, 0), bound)
    return start, length.to(tl.int32)


@triton.jit
def _count(Ends, n, inside, length, block, carry):
    """Store how the tiles of all sequences add up; returns the sum so far."""
    tiles = tl.where(inside, (length + (block - 1)) // block, 0)
    tl.store(Ends + n, carry + tl.cumsum(tiles, 0), mask=inside)
    return carry + tl.sum(tiles, 0)


@triton.jit
def _rank(
    Cu, Offsets, stride, offsets_stride, n, inside, length, batch, places, bound, first, second,
    EndsFirst, EndsSecond, Order, PACKED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Order of the sequences by length, the longest first, and the ends of the tiles of two kernels in that order.

    A sequence's rank is how many go before it, so every sequence finds its own: nothing is sorted.
    """
    rank = n * 0
    end_first = (length + (first - 1)) // first
    end_second = (length + (second - 1)) // second
    for begin in range(0, batch, STEP):
        m = begin + tl.arange(0, STEP)
        _, other = _side(Cu, Offsets, stride, offsets_stride, m, m < batch, places, bound, PACKED)
        longer = (other[None, :] > length[:, None]) | (
            (other[None, :] == length[:, None]) & (m[None, :] < n[:, None])
        )
        before = (longer & (m[None, :] < batch)).to(tl.int32)
        rank += tl.sum(before, 1)
        end_first += tl.sum(before * ((other + (first - 1)) // first)[None, :], 1)
        end_second += tl.sum(before * ((other + (second - 1)) // second)[None, :], 1)
    tl.store(Order + rank, n, mask=inside)
    tl.store(EndsFirst + rank, end_first, mask=inside)
    tl.store(EndsSecond + rank, end_second, mask=inside)


_FREE = [
    "batch", "places_q", "places_kv", "bound_q", "bound_kv", "forward_m", "queries_m",
    "keys_n", "alone_n",
]  # fmt: skip


@triton.jit(do_not_specialize=_FREE)
def sequences(
    CuQ, CuKV, OffsetsQ, OffsetsKV, Where,
    cu_q_s, cu_kv_s, offsets_q_s, offsets_kv_s,
    batch, places_q, places_kv, bound_q, bound_kv, forward_m, queries_m, keys_n, alone_n,
    PACKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    RANKED: tl.constexpr,
):  # fmt: skip
    """Where, int32 [17, batch]: the packed extents, the ends of the tiles of four kernels, two orders of sequences.

    RANKED: the longest first, found in O(batch^2); else as they come.
    """
    forward_end = batch * 0
    queries_end = batch * 0
    keys_end = batch * 0
    alone_end = batch * 0
    for begin in range(0, batch, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        inside = n < batch
        start_q, length_q = _side(
            CuQ, OffsetsQ, cu_q_s, offsets_q_s, n, inside, places_q, bound_q, PACKED
        )
        start_kv, length_kv = _side(
            CuKV, OffsetsKV, cu_kv_s, offsets_kv_s, n, inside, places_kv, bound_kv, PACKED
        )
        here = Where + n
        zero = n * 0
        diagonal = zero
        if BOTTOM_RIGHT:
            diagonal = length_kv - length_q
        tl.store(here, start_q, mask=inside)
        tl.store(here + batch, length_q, mask=inside)
        tl.store(here + 2 * batch, start_kv, mask=inside)
        tl.store(here + 3 * batch, length_kv, mask=inside)
        tl.store(here + 4 * batch, diagonal, mask=inside)
        # Without padding masks, bias and attention_mask start where the sequence starts.
        for row in tl.static_range(5, 9):
            tl.store(here + row * batch, zero, mask=inside)
        tl.store(here + 9 * batch, n, mask=inside)
        tl.store(here + 10 * batch, zero, mask=inside)
        if RANKED:
            _rank(
                CuQ, OffsetsQ, cu_q_s, offsets_q_s, n, inside, length_q, batch, places_q, bound_q,
                forward_m, queries_m, Where + 11 * batch, Where + 12 * batch, Where + 15 * batch,
                PACKED, STEP,
            )  # fmt: skip
            _rank(
                CuKV, OffsetsKV, cu_kv_s, offsets_kv_s, n, inside, length_kv, batch, places_kv, bound_kv,
                keys_n, alone_n, Where + 13 * batch, Where + 14 * batch, Where + 16 * batch,
                PACKED, STEP,
            )  # fmt: skip
        else:
            tl.store(here + 15 * batch, n, mask=inside)
            tl.store(here + 16 * batch, n, mask=inside)
            forward_end = _count(Where + 11 * batch, n, inside, length_q, forward_m, forward_end)
            queries_end = _count(Where + 12 * batch, n, inside, length_q, queries_m, queries_end)
            keys_end = _count(Where + 13 * batch, n, inside, length_kv, keys_n, keys_end)
            alone_end = _count(Where + 14 * batch, n, inside, length_kv, alone_n, alone_end)
