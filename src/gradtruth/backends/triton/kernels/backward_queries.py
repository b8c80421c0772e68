"""dQ and the sink's share: one program per tile of queries and head, walking over the keys that it sees."""

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
from gradtruth.backends.triton.kernels.terms import LOG2E, kept, scores


@triton.jit
def _over_keys(
    dq, seen, q, do, level, delta, blocks, offs_m, q_valid, k_base, v_base, hidden_k, length_kv,
    k_ss, k_sd, v_ss, v_sd, hidden_s, band, bias, mask, alibi, drop, scale, factor, softcap, inverse_keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, PLAIN: tl.constexpr, BIAS: tl.constexpr, ARBITRARY: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, QUADS: tl.constexpr,
    HOLES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, WANT_DQ: tl.constexpr,
    SINK: tl.constexpr,
):  # fmt: skip
    """Blocks of keys added to dq [M, D]; seen [M] becomes 1 for rows that see a key."""
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
        if WANT_DQ:
            k = load_rows(k_base + place * k_ss, steps, k_ss, offs_d, k_sd, k_valid, D, MASKED)
            s = product(q, k, PRECISION)
        else:
            s = tl.zeros([offs_m.shape[0], BLOCK_N], tl.float32)
        x, slope, visible = scores(
            s, offs_m[:, None], offs_n[None, :], q_valid[:, None], k_valid[None, :],
            band, bias, mask, alibi, scale, softcap,
            MASKED, PLAIN, BIAS, ARBITRARY, ALIBI, SOFTCAP,
        )  # fmt: skip
        if SINK:
            if MASKED:
                seen = tl.maximum(seen, tl.max(visible.to(tl.int32), 1))
            else:
                seen = tl.maximum(seen, 1)
        if WANT_DQ:
            v = load_rows(v_base + place * v_ss, steps, v_ss, offs_dv, v_sd, k_valid, DV, MASKED)
            if PLAIN:
                p = tl.exp2(x * factor - level[:, None])
            else:
                p = tl.exp2(x - level[:, None])
            dp = product(do, v, PRECISION)
            if DROPOUT:
                dp = tl.where(kept(drop, offs_m, offs_n, start_n, QUADS), dp * inverse_keep, 0.0)
            ds = p * (dp - delta[:, None])
            if SOFTCAP:
                ds *= slope
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, seen


# Not specialised on: sizes, and strides that follow from lengths and whose alignment is worth nothing.
_FREE = [
    "batch", "heads", "group_size", "tiles", "storage_q", "length_q", "length_kv", "diagonal",
    "left", "right", "threshold", "bias_i", "bias_j", "mask_i", "mask_j", "programs", "chunk",
    "span_sb", "span_sh",
]  # fmt: skip


@triton.jit(do_not_specialize=_FREE)
def backward_queries(
    Q, K, V, Dout, Level, Delta, DQ, Share, Where, Ends, Order, Bias, Mask, Spans, HiddenQ, HiddenK, Slopes, Sink, Seed,
    q_sb, q_ss, q_sh, q_sd, k_sb, k_ss, k_sh, k_sd, v_sb, v_ss, v_sh, v_sd, do_sb, do_ss, do_sh, do_sd,
    dq_sb, dq_ss, dq_sh, dq_sp,
    bias_sb, bias_sh, bias_si, bias_sj, mask_sb, mask_sh, mask_si, mask_sj, span_sb, span_sh, span_s,
    hidden_q_sb, hidden_q_ss, hidden_k_sb, hidden_k_ss, slopes_sb, slopes_sh,
    bias_i, bias_j, mask_i, mask_j, batch, heads, group_size, tiles, storage_q,
    length_q, length_kv, diagonal, left, right,
    scale, factor, softcap, threshold, inverse_keep, programs, chunk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    PLAIN: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, ARBITRARY: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, QUADS: tl.constexpr,
    PRECISION: tl.constexpr, HOLES: tl.constexpr, WIDE: tl.constexpr, SINK: tl.constexpr, WANT_DQ: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """With PARTS (never with SINK) the keys are shared out: part p writes its sum to DQ + p * dq_sp."""
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
    do = load_rows(
        Dout + long_n * do_sb + long_h * do_sh + place * do_ss,
        steps, do_ss, offs_dv, do_sd, q_valid, DV, True,
    )  # fmt: skip
    # Level and Delta are [B', H, S]; thd has one storage row.
    base = ((0 if PACKED else long_n) * heads + long_h) * storage_q + row
    level = tl.load(Level + base, mask=q_valid, other=float("inf"))
    delta = tl.load(Delta + base, mask=q_valid, other=0.0)
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
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    seen = tl.zeros([BLOCK_M], tl.int32)
    if SPLIT:
        inner = (inner_high - inner_low) // BLOCK_N
        dq, seen = _over_keys(
            dq, seen, q, do, level, delta, (inner_low, inner, inner_high, inner), offs_m, q_valid,
            k_base, v_base, hidden_k, length_kv, k_ss, k_sd, v_ss, v_sd, hidden_k_ss,
            band, bias, mask, alibi, drop, scale, factor, softcap, inverse_keep,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, False, PLAIN, BIAS, ARBITRARY, ALIBI, SOFTCAP,
            DROPOUT, QUADS, HOLES, WIDE, PRECISION, WANT_DQ, SINK,
        )  # fmt: skip
    count = before + tl.cdiv(high - inner_high, BLOCK_N)
    dq, seen = _over_keys(
        dq, seen, q, do, level, delta, (low, before, inner_high, count), offs_m, q_valid,
        k_base, v_base, hidden_k, length_kv, k_ss, k_sd, v_ss, v_sd, hidden_k_ss,
        band, bias, mask, alibi, drop, scale, factor, softcap, inverse_keep,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, PLAIN, BIAS, ARBITRARY, ALIBI, SOFTCAP,
        DROPOUT, QUADS, HOLES, WIDE, PRECISION, WANT_DQ, SINK,
    )  # fmt: skip

    if SINK:
        # dsink = - sum of exp(sink - lse) * delta over the rows that see a key.
        weight = tl.exp2(tl.load(Sink + h) * LOG2E - level)
        share = tl.sum(tl.where(q_valid & (seen > 0), weight * delta, 0.0), 0)
        tl.store(Share + h + (pid % tiles + (0 if PACKED else n * tiles)) * heads, -share)
    if WANT_DQ:
        dq = tl.where(q_valid[:, None], dq * scale, 0.0)
        # thd: what lies outside every sequence was filled before.
        written = q_valid if PACKED else (row >= 0) & (row < storage_q)
        if PARTS:
            DQ += part.to(tl.int64) * dq_sp
        at = DQ + long_n * dq_sb + long_h * dq_sh + place * dq_ss + steps[:, None] * dq_ss
        tl.store(
            at + offs_d[None, :], dq.to(DQ.dtype.element_ty),
            mask=written[:, None] & (offs_d[None, :] < D),
        )  # fmt: skip
