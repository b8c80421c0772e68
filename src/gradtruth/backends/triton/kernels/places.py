"""Where a program works: its sequence, and the blocks of the other side that its tile sees."""

from __future__ import annotations

import triton
import triton.language as tl

# Rows of the packed extents, int32 [11, batch], see core.extents.
START_Q = tl.constexpr(0)
LENGTH_Q = tl.constexpr(1)
START_KV = tl.constexpr(2)
LENGTH_KV = tl.constexpr(3)
DIAGONAL = tl.constexpr(4)
INDEX_Q = tl.constexpr(5)
INDEX_KV = tl.constexpr(6)
ORIGIN_Q = tl.constexpr(7)
ORIGIN_KV = tl.constexpr(8)
SEQUENCE = tl.constexpr(9)
HEAD = tl.constexpr(10)


@triton.jit
def locate(Where, batch, n, length_q, length_kv, diagonal, RAGGED: tl.constexpr):
    """The eleven integers of sequence n. Without extents every sequence fills its storage."""
    zero = n * 0
    if RAGGED:
        here = Where + n
        return (
            tl.load(here + START_Q * batch),
            tl.load(here + LENGTH_Q * batch),
            tl.load(here + START_KV * batch),
            tl.load(here + LENGTH_KV * batch),
            tl.load(here + DIAGONAL * batch),
            tl.load(here + INDEX_Q * batch),
            tl.load(here + INDEX_KV * batch),
            tl.load(here + ORIGIN_Q * batch),
            tl.load(here + ORIGIN_KV * batch),
            tl.load(here + SEQUENCE * batch),
            tl.load(here + HEAD * batch),
        )
    else:
        return (
            zero,
            zero + length_q,
            zero,
            zero + length_kv,
            zero + diagonal,
            zero,
            zero,
            zero,
            zero,
            n,
            zero,
        )


@triton.jit
def sequence_of(Ends, batch, tile):
    """The first n with Ends[n] > tile, where Ends counts the tiles of all sequences up to n."""
    low = tile * 0
    high = low + batch - 1
    while low < high:
        middle = (low + high) // 2
        past = tl.load(Ends + middle) > tile
        low = tl.where(past, low, middle + 1)
        high = tl.where(past, middle, high)
    return low


@triton.jit
def tile_of(Ends, Order, batch, pid, tiles, rows, PACKED: tl.constexpr):
    """Sequence, head and tile of a program; the last tile of a sequence comes first. sequence -1: nothing to do.

    A causal mask gives the last queries most work (for keys the kernel turns the order around). Ends counts tiles
    of sequences in the order of Order, the longest first.
    """
    at = pid % tiles
    rest = pid // tiles
    if PACKED:
        head = rest
        slot = sequence_of(Ends, batch, at)
        last = tl.load(Ends + slot) - 1
        before = tl.load(Ends + slot - 1, mask=slot > 0, other=0)
        tile = last - at
        sequence = tl.where(at <= last, tl.load(Order + slot), -1)
        count = last + 1 - before
    else:
        head = rest % rows
        sequence = rest // rows
        tile = tiles - 1 - at
        count = tiles
    return sequence, head, tile, count


@triton.jit
def visible_blocks(
    first, last, length, diagonal, left, right, BLOCK: tl.constexpr, SPLIT: tl.constexpr
):
    """Blocks of the other side that rows first..last see, as low <= inner_low <= inner_high <= high.

    Row i sees j when i + diagonal - left <= j <= i + diagonal + right and 0 <= j < length. In [inner_low,
    inner_high), whole blocks, every row sees every j; without SPLIT that range is empty. All but high are
    multiples of BLOCK. Keys see queries by the same rule with -diagonal, and left and right exchanged.
    """
    low = tl.maximum(first + diagonal - left, 0) // BLOCK * BLOCK
    high = tl.minimum(last + diagonal + right + 1, length)
    high = tl.where(last < first, low, tl.maximum(high, low))
    inner_low = low
    inner_high = low
    if SPLIT:
        begin = tl.cdiv(tl.maximum(last + diagonal - left, 0), BLOCK) * BLOCK
        end = tl.maximum(tl.minimum(first + diagonal + right + 1, length), 0) // BLOCK * BLOCK
        some = (begin < end) & (last >= first)
        inner_low = tl.where(some, begin, low)
        inner_high = tl.where(some, end, low)
    return low, inner_low, inner_high, high


@triton.jit
def share_of(blocks, part, chunk):
    """The blocks of one part: those that start in [part * chunk, (part + 1) * chunk), chunk whole blocks.

    Where a part begins depends on the chunk alone, not on how many parts or sequences there are.
    """
    low, inner_low, inner_high, high = blocks
    begin = part * chunk
    low = tl.maximum(low, begin)
    high = tl.maximum(tl.minimum(high, begin + chunk), low)
    inner_low = tl.maximum(inner_low, low)
    inner_high = tl.minimum(inner_high, begin + chunk)
    some = inner_low < inner_high
    return low, tl.where(some, inner_low, low), tl.where(some, inner_high, low), high


@triton.jit
def block_at(number, low, before, inner_high, BLOCK: tl.constexpr):
    """Start of the masked block ``number``: ``before`` of them start at low, the others at inner_high."""
    return tl.where(number < before, low + number * BLOCK, inner_high + (number - before) * BLOCK)


@triton.jit
def load_rows(
    base, rows, row_stride, dims, dim_stride, valid, DIM: tl.constexpr, MASKED: tl.constexpr
):
    """Rows [M, BLOCK_D] of a tensor, 0 where not valid and past DIM, whatever lies there."""
    at = base + rows[:, None] * row_stride + dims[None, :] * dim_stride
    if MASKED:
        return tl.load(at, mask=valid[:, None] & (dims[None, :] < DIM), other=0.0)
    elif dims.shape[0] != DIM:
        return tl.load(at, mask=dims[None, :] < DIM, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b^T for rows a [M, K] and b [N, K], fp32.

    Tensor cores cut partial sums off, so long sums come out too small: for fp32 inputs two halves of a long one
    are summed apart and added, which rounds.
    """
    K: tl.constexpr = a.shape[1]
    if PRECISION == "tf32x3" and K > 128:
        a_even, a_odd = tl.split(tl.reshape(a, [a.shape[0], K // 2, 2]))
        b_even, b_odd = tl.split(tl.reshape(b, [b.shape[0], K // 2, 2]))
        even = tl.dot(a_even, tl.trans(b_even), input_precision=PRECISION)
        return even + tl.dot(a_odd, tl.trans(b_odd), input_precision=PRECISION)
    else:
        return tl.dot(a, tl.trans(b), input_precision=PRECISION)
