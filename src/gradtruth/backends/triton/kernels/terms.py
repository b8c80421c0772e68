"""From q . k to the final scores, and the dropout mask: elementwise, for a tile in either orientation."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """tanh(x) and its derivative, both to two ulp.

    The derivative is 4 e / (1 + e)^2 with e = exp(-2 |x|), for 1 - tanh^2 cancels where tanh saturates; tanh is an
    odd polynomial under 0.625, else (1 - e) / (1 + e). Source: Cephes, single/tanhf.c (S. Moshier).
    """
    square = x * x
    near = -5.70498872745e-3
    near = near * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * x + x
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    slope = 4.0 * e / ((1.0 + e) * (1.0 + e))
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far)), slope


@triton.jit
def read_term(base, i, j, stride_i, stride_j, size_i, size_j, q_valid, k_valid):
    """Elements of bias or attention_mask; 0 where not valid or outside of it."""
    # Rows and columns by themselves first: a condition on pairs costs as many instructions as there are pairs.
    inside = (q_valid & (i >= 0) & (i < size_i)) & (k_valid & (j >= 0) & (j < size_j))
    at = base + i.to(tl.int64) * stride_i + j.to(tl.int64) * stride_j
    return tl.load(at, mask=inside, other=0)


@triton.jit
def scores(
    s, i, j, q_valid, k_valid, band, bias, mask, alibi, scale, softcap,
    MASKED: tl.constexpr, PLAIN: tl.constexpr, BIAS: tl.constexpr, ARBITRARY: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The final scores of a tile.

    Args:
        s: q . k, fp32, [M, N] or [N, M].
        i, j: query and key within the sequence, broadcastable to s.
        q_valid, k_valid: whether query and key belong to the sequence, shaped as i and j.
        band: diagonal, left, right.
        bias, mask: pointer to the sequence's and head's first element, strides, sizes, index_q, index_kv.
        alibi: the slope.
        BIAS: 0 none, 1 before the scale, 2 after it.

    Returns:
        The scores times log2(e), or q . k untouched when PLAIN (the caller multiplies), -inf where hidden; the
        derivative of the soft cap; and which pairs are visible.
    """
    diagonal, left, right = band
    visible = q_valid & k_valid
    slope = 1.0
    if MASKED:
        visible = visible & (j <= i + (diagonal + right)) & (j >= i + (diagonal - left))
        if ARBITRARY:
            base, stride_i, stride_j, size_i, size_j, index_q, index_kv = mask
            hidden = read_term(
                base,
                i + index_q,
                j + index_kv,
                stride_i,
                stride_j,
                size_i,
                size_j,
                q_valid,
                k_valid,
            )
            visible = visible & (hidden == 0)
    x = s
    if not PLAIN:
        added = 0.0
        if BIAS != 0:
            base, stride_i, stride_j, size_i, size_j, index_q, index_kv = bias
            added = read_term(
                base,
                i + index_q,
                j + index_kv,
                stride_i,
                stride_j,
                size_i,
                size_j,
                q_valid,
                k_valid,
            ).to(tl.float32)
        if BIAS == 1:
            x += added
        x *= scale
        if SOFTCAP:
            capped, slope = tanh(x / softcap)
            x = capped * softcap
        if BIAS == 2:
            visible = visible & (added > float("-inf"))
            x += added
        if ALIBI:
            x -= alibi * tl.abs(i + diagonal - j).to(tl.float32)
        x *= LOG2E
    if MASKED:
        x = tl.where(visible, x, float("-inf"))
    return x, slope, visible


@triton.jit
def kept(drop, offs_m, offs_n, start_n, QUADS: tl.constexpr):
    """Which weights dropout keeps, [M, N]: the mask of core.dropout.

    One Philox block serves four keys. QUADS: a tile starts at a multiple of four keys, so each is computed once.
    """
    seed, threshold, sequence, head, origin_q, origin_kv = drop
    bound = threshold.to(tl.uint32, bitcast=True)
    i = (offs_m + origin_q)[:, None]
    if QUADS:
        quads = (start_n + origin_kv) // 4 + tl.arange(0, offs_n.shape[0] // 4)
        zero = tl.zeros([offs_m.shape[0], offs_n.shape[0] // 4], tl.int32)
        a, b, c, d = tl.philox(seed, quads[None, :] + zero, i + zero, head + zero, sequence + zero)
        return tl.interleave(tl.interleave(a, c), tl.interleave(b, d)) >= bound
    else:
        j = (offs_n + origin_kv)[None, :]
        zero = tl.zeros([offs_m.shape[0], offs_n.shape[0]], tl.int32)
        a, b, c, d = tl.philox(seed, (j >> 2) + zero, i + zero, head + zero, sequence + zero)
        lane = j & 3
        word = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
        return word >= bound
