"""The forward: one program per tile of queries and query head, walking over the keys that the tile sees."""

from __future__ import annotations

import triton
import triton.language as tl

from gradtruth.backends.triton.kernels.places import (
    block_at,
    load_rows,
    locate,
    product,
    share_of,
    tile_of,
    visible_blocks,
)
from gradtruth.backends.triton.kernels.spans import spanned
from gradtruth.backends.triton.kernels.terms import LN2, LOG2E, kept, scores


@triton.jit
def _over_keys(
    acc, l_i, m_i, q, blocks, offs_m, q_valid, k_base, v_base, hidden_k, length_kv,
    k_ss, k_sd, v_ss, v_sd, hidden_s, band, bias, mask, alibi, drop, scale, factor, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, PLAIN: tl.constexpr, BIAS: tl.constexpr, ARBITRARY: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, QUADS: tl.constexpr,
    HOLES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks of keys added to a running softmax: acc [M, Dv], l_i and m_i [M] (m_i in units of log2)."""
    low, before, inner_high, count = blocks
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    in_tile = tl.arange(0, BLOCK_N)
    if WIDE:
        steps = in_tile.to(tl.int64)
    else:
        steps = in_tile
    for number in range(0, count):
        start_n = block_at(number, low, before, inner_high, BLOCK_N)
        offs_n = start_n + in_tile
        k_valid = offs_n < length_kv
        if HOLES >= 2:
            k_valid = k_valid & (
                tl.load(hidden_k + offs_n.to(tl.int64) * hidden_s, mask=k_valid, other=1) == 0
            )
        place = start_n.to(tl.int64)
        k = load_rows(k_base + place * k_ss, steps, k_ss, offs_d, k_sd, k_valid, D, MASKED)
        s = product(q, k, PRECISION)
        x, _, _ = scores(
            s, offs_m[:, None], offs_n[None, :], q_valid[:, None], k_valid[None, :],
            band, bias, mask, alibi, scale, softcap,
            MASKED, PLAIN, BIAS, ARBITRARY, ALIBI, SOFTCAP,
        )  # fmt: skip
        if PLAIN:
            m_new = tl.maximum(m_i, tl.max(x, 1) * factor)
        else:
            m_new = tl.maximum(m_i, tl.max(x, 1))
        # A row that has seen nothing yet: exp2(-inf - 0) is 0, exp2(-inf + inf) would not be.
        base = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        if PLAIN:
            p = tl.exp2(x * factor - base[:, None])
        else:
            p = tl.exp2(x - base[:, None])
        alpha = tl.exp2(m_i - base)
        l_i = l_i * alpha + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(kept(drop, offs_m, offs_n, start_n, QUADS), p, 0.0)
        acc = acc * alpha[:, None]
        v = load_rows(v_base + place * v_ss, steps, v_ss, offs_dv, v_sd, k_valid, DV, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m_i = m_new
    return acc, l_i, m_i


# Not specialised on: sizes, and strides that follow from lengths and whose alignment is worth nothing.
_FREE = [
    "batch", "heads", "group_size", "tiles", "storage_q", "length_q", "length_kv", "diagonal",
    "left", "right", "threshold", "bias_i", "bias_j", "mask_i", "mask_j", "programs", "chunk",
    "lse_sb", "lse_sh", "lse_sp", "span_sb", "span_sh",
]  # fmt: skip


@triton.jit(do_not_specialize=_FREE)
def forward(
    Q, K, V, Out, Lse, Where, Ends, Order, Bias, Mask, Spans, HiddenQ, HiddenK, Slopes, Sink, Seed, Top,
    q_sb, q_ss, q_sh, q_sd, k_sb, k_ss, k_sh, k_sd, v_sb, v_ss, v_sh, v_sd,
    o_sb, o_ss, o_sh, lse_sb, lse_sh, lse_ss, o_sp, lse_sp,
    bias_sb, bias_sh, bias_si, bias_sj, mask_sb, mask_sh, mask_si, mask_sj, span_sb, span_sh, span_s,
    hidden_q_sb, hidden_q_ss, hidden_k_sb, hidden_k_ss, slopes_sb, slopes_sh,
    bias_i, bias_j, mask_i, mask_j, batch, heads, group_size, tiles, storage_q,
    length_q, length_kv, diagonal, left, right,
    scale, factor, softcap, threshold, inverse_keep, programs, chunk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    PLAIN: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, ARBITRARY: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, QUADS: tl.constexpr,
    PRECISION: tl.constexpr, HOLES: tl.constexpr, WIDE: tl.constexpr, SINK: tl.constexpr, TOP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """With PARTS the keys are shared out: part p writes its own softmax to Out + p * o_sp and Lse + p * lse_sp."""
    pid = tl.program_id(0)
    part = pid * 0
    if PARTS:
        part = pid // programs
        pid = pid % programs
    n, h, tile, _ = tile_of(Ends, Order, batch, pid, tiles, heads, PACKED)
    if n < 0:
        return
    (
        start_q, length_q, start_kv, length_kv, diagonal, index_q, index_kv, origin_q, origin_kv, sequence, head,
    ) = locate(Where, batch, n, length_q, length_kv, diagonal, RAGGED)  # fmt: skip
    first_m = tile * BLOCK_M
    if RAGGED and not PACKED:
        # Tiles are counted from the start of the sequence and cover the storage before it too.
        first_m -= tl.cdiv(start_q, BLOCK_M) * BLOCK_M
    in_tile = tl.arange(0, BLOCK_M)
    offs_m = first_m + in_tile
    row = start_q + offs_m
    q_valid = (offs_m >= 0) & (offs_m < length_q)
    long_n = n.to(tl.int64)
    long_h = h.to(tl.int64)
    if HOLES % 2 == 1:
        hidden = tl.load(
            HiddenQ + long_n * hidden_q_sb + row.to(tl.int64) * hidden_q_ss, mask=q_valid, other=1
        )
        q_valid = q_valid & (hidden == 0)
    steps = in_tile
    if WIDE:
        steps = in_tile.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    place = (start_q + first_m).to(tl.int64)
    q = load_rows(
        Q + long_n * q_sb + long_h * q_sh + place * q_ss,
        steps,
        q_ss,
        offs_d,
        q_sd,
        q_valid,
        D,
        True,
    )
    group = long_h // group_size
    start = start_kv.to(tl.int64)
    k_base = K + long_n * k_sb + group * k_sh + start * k_ss
    v_base = V + long_n * v_sb + group * v_sh + start * v_ss
    hidden_k = HiddenK + long_n * hidden_k_sb + start * hidden_k_ss
    bias = (
        Bias + long_n * bias_sb + long_h * bias_sh,
        bias_si, bias_sj, bias_i, bias_j, index_q, index_kv,
    )  # fmt: skip
    mask = (
        Mask + long_n * mask_sb + long_h * mask_sh,
        mask_si, mask_sj, mask_i, mask_j, index_q, index_kv,
    )  # fmt: skip
    band = (diagonal, left, right)
    alibi = 0.0
    if ALIBI:
        alibi = tl.load(Slopes + n * slopes_sb + h * slopes_sh)
    drop = (0, 0, 0, 0, 0, 0)
    if DROPOUT:
        drop = (tl.load(Seed), threshold, sequence, head + h, origin_q, origin_kv)

    low, inner_low, inner_high, high = visible_blocks(
        tl.maximum(first_m, 0), tl.minimum(first_m + BLOCK_M, length_q) - 1,
        length_kv, diagonal, left, right, BLOCK_N, SPLIT,
    )  # fmt: skip
    if ARBITRARY:
        low, high = spanned(
            Spans + long_n * span_sb + long_h * span_sh, span_s, offs_m + index_q, q_valid, mask_i,
            index_kv, low, high, BLOCK_N,
        )  # fmt: skip
        inner_low = low
        inner_high = low
    if PARTS:
        low, inner_low, inner_high, high = share_of((low, inner_low, inner_high, high), part, chunk)
    before = (inner_low - low) // BLOCK_N
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if SPLIT:
        inner = (inner_high - inner_low) // BLOCK_N
        acc, l_i, m_i = _over_keys(
            acc, l_i, m_i, q, (inner_low, inner, inner_high, inner), offs_m, q_valid, k_base, v_base,
            hidden_k, length_kv, k_ss, k_sd, v_ss, v_sd, hidden_k_ss,
            band, bias, mask, alibi, drop, scale, factor, softcap,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, False, PLAIN, BIAS, ARBITRARY, ALIBI, SOFTCAP,
            DROPOUT, QUADS, HOLES, WIDE, PRECISION,
        )  # fmt: skip
    count = before + tl.cdiv(high - inner_high, BLOCK_N)
    acc, l_i, m_i = _over_keys(
        acc, l_i, m_i, q, (low, before, inner_high, count), offs_m, q_valid, k_base, v_base,
        hidden_k, length_kv, k_ss, k_sd, v_ss, v_sd, hidden_k_ss,
        band, bias, mask, alibi, drop, scale, factor, softcap,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, PLAIN, BIAS, ARBITRARY, ALIBI, SOFTCAP,
        DROPOUT, QUADS, HOLES, WIDE, PRECISION,
    )  # fmt: skip

    if TOP:
        largest = tl.max(tl.where(q_valid, m_i, float("-inf")), 0)
        line = pid % tiles + (0 if PACKED else n * tiles) + part * (programs // heads)
        tl.store(Top + h + line * heads, largest * LN2)
    if SINK != 0:
        logit = 0.0
        if SINK == 2:
            logit = tl.load(Sink + h) * LOG2E
        m_new = tl.maximum(m_i, logit)
        if PARTS:  # the sink belongs to the first part
            m_new = tl.where(part == 0, m_new, m_i)
            logit = tl.where(part == 0, logit, float("-inf"))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - base)
        l_i = l_i * alpha + tl.exp2(logit - base)
        acc = acc * alpha[:, None]
        m_i = m_new
    empty = l_i == 0.0
    lse = tl.where(empty, float("-inf"), m_i * LN2 + tl.log(tl.where(empty, 1.0, l_i)))
    out = acc * (inverse_keep / tl.where(empty, 1.0, l_i))[:, None]
    lse = tl.where(q_valid, lse, float("-inf"))
    out = tl.where(q_valid[:, None], out, 0.0)
    # thd: what lies outside every sequence was filled before.
    written = q_valid if PACKED else (row >= 0) & (row < storage_q)
    if PARTS:
        Out += part.to(tl.int64) * o_sp
        Lse += part.to(tl.int64) * lse_sp
    tl.store(Lse + long_n * lse_sb + long_h * lse_sh + row.to(tl.int64) * lse_ss, lse, mask=written)
    at = (
        Out
        + long_n * o_sb
        + long_h * o_sh
        + place * o_ss
        + steps[:, None] * o_ss
        + offs_dv[None, :]
    )
    tl.store(at, out.to(Out.dtype.element_ty), mask=written[:, None] & (offs_dv[None, :] < DV))
