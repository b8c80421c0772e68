"""dK and dV: one program per tile of keys and KV head, walking over the queries of the group that see it."""

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
from gradtruth.backends.triton.kernels.terms import kept, scores


@triton.jit
def _over_queries(
    dk, dv, k, v, blocks, offs_n, first_n, k_valid, q_base, do_base, level_base, delta_base, hidden_q, length_q,
    q_ss, q_sd, do_ss, do_sd, hidden_s, band, bias, mask, alibi, drop, scale, factor, softcap,
    inverse_keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr, PLAIN: tl.constexpr, BIAS: tl.constexpr, ARBITRARY: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, QUADS: tl.constexpr,
    HOLES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
):  # fmt: skip
    """Blocks of queries of one head added to dk [N, D] and dv [N, Dv]; scores stand as [N, M]."""
    low, before, inner_high, count = blocks
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    in_tile = tl.arange(0, BLOCK_M)
    if WIDE:
        steps = in_tile.to(tl.int64)
    else:
        steps = in_tile
    for number in range(0, count):
        start_m = block_at(number, low, before, inner_high, BLOCK_M)
        offs_m = start_m + in_tile
        q_valid = offs_m < length_q
        if HOLES % 2 == 1:
            q_valid = q_valid & (
                tl.load(hidden_q + offs_m.to(tl.int64) * hidden_s, mask=q_valid, other=1) == 0
            )
        place = start_m.to(tl.int64)
        q = load_rows(q_base + place * q_ss, steps, q_ss, offs_d, q_sd, q_valid, D, MASKED)
        do = load_rows(do_base + place * do_ss, steps, do_ss, offs_dv, do_sd, q_valid, DV, MASKED)
        if MASKED:
            level = tl.load(level_base + offs_m, mask=q_valid, other=float("inf"))
        else:
            level = tl.load(level_base + offs_m)
        s = product(k, q, PRECISION)
        x, slope, _ = scores(
            s, offs_m[None, :], offs_n[:, None], q_valid[None, :], k_valid[:, None],
            band, bias, mask, alibi, scale, softcap,
            MASKED, PLAIN, BIAS, ARBITRARY, ALIBI, SOFTCAP,
        )  # fmt: skip
        if PLAIN:
            p = tl.exp2(x * factor - level[None, :])
        else:
            p = tl.exp2(x - level[None, :])
        if DROPOUT:
            keep = tl.trans(kept(drop, offs_m, offs_n, first_n, QUADS))
        if WANT_DV:
            dropped = p
            if DROPOUT:
                dropped = tl.where(keep, p * inverse_keep, 0.0)
            dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)
        if WANT_DK:
            if MASKED:
                delta = tl.load(delta_base + offs_m, mask=q_valid, other=0.0)
            else:
                delta = tl.load(delta_base + offs_m)
            dp = product(v, do, PRECISION)
            if DROPOUT:
                dp = tl.where(keep, dp * inverse_keep, 0.0)
            ds = p * (dp - delta[None, :])
            if SOFTCAP:
                ds *= slope
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


# Not specialised on: sizes, and strides that follow from lengths and whose alignment is worth nothing.
_FREE = [
    "batch", "heads", "groups", "tiles", "storage_q", "storage_kv", "length_q", "length_kv",
    "diagonal", "left", "right", "threshold", "bias_i", "bias_j", "mask_i", "mask_j", "programs",
    "chunk", "shares", "span_sb", "span_sh",
]  # fmt: skip


@triton.jit(do_not_specialize=_FREE)
def backward_keys(
    Q, K, V, Dout, Level, Delta, DK, DV_, Where, Ends, Order, Bias, Mask, Spans, HiddenQ, HiddenK, Slopes, Seed,
    q_sb, q_ss, q_sh, q_sd, k_sb, k_ss, k_sh, k_sd, v_sb, v_ss, v_sh, v_sd, do_sb, do_ss, do_sh, do_sd,
    dk_sb, dk_ss, dk_sh, dv_sb, dv_ss, dv_sh, dk_sp, dv_sp,
    bias_sb, bias_sh, bias_si, bias_sj, mask_sb, mask_sh, mask_si, mask_sj, span_sb, span_sh, span_s,
    hidden_q_sb, hidden_q_ss, hidden_k_sb, hidden_k_ss, slopes_sb, slopes_sh,
    bias_i, bias_j, mask_i, mask_j, batch, heads, groups, tiles, storage_q, storage_kv,
    length_q, length_kv, diagonal, left, right,
    scale, factor, softcap, threshold, inverse_keep, programs, chunk, shares,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    PLAIN: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, ARBITRARY: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, QUADS: tl.constexpr,
    PRECISION: tl.constexpr, HOLES: tl.constexpr, WIDE: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """With PARTS the heads of a group go to ``shares`` parts, and the queries are shared out too.

    Part p has heads share p % shares and queries chunk p // shares, and writes to DK + p * dk_sp, DV + p * dv_sp.
    """
    pid = tl.program_id(0)
    part = pid * 0
    if PARTS:
        part = pid // programs
        pid = pid % programs
    n, g, tile, count = tile_of(Ends, Order, batch, pid, tiles, groups, PACKED)
    if n < 0:
        return
    # The first keys are seen by most queries of a causal mask: they go first.
    tile = count - 1 - tile
    (
        start_q, length_q, start_kv, length_kv, diagonal, index_q, index_kv, origin_q, origin_kv, sequence, head,
    ) = locate(Where, batch, n, length_q, length_kv, diagonal, RAGGED)  # fmt: skip
    first_n = tile * BLOCK_N
    if RAGGED and not PACKED:
        first_n -= tl.cdiv(start_kv, BLOCK_N) * BLOCK_N
    in_tile = tl.arange(0, BLOCK_N)
    offs_n = first_n + in_tile
    row = start_kv + offs_n
    k_valid = (offs_n >= 0) & (offs_n < length_kv)
    long_n = n.to(tl.int64)
    long_g = g.to(tl.int64)
    if HOLES >= 2:
        hidden = tl.load(
            HiddenK + long_n * hidden_k_sb + row.to(tl.int64) * hidden_k_ss, mask=k_valid, other=1
        )
        k_valid = k_valid & (hidden == 0)
    steps = in_tile
    if WIDE:
        steps = in_tile.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    place = (start_kv + first_n).to(tl.int64)
    k = load_rows(
        K + long_n * k_sb + long_g * k_sh + place * k_ss,
        steps,
        k_ss,
        offs_d,
        k_sd,
        k_valid,
        D,
        True,
    )
    v = load_rows(
        V + long_n * v_sb + long_g * v_sh + place * v_ss,
        steps,
        v_ss,
        offs_dv,
        v_sd,
        k_valid,
        DV,
        True,
    )
    band = (diagonal, left, right)
    start = start_q.to(tl.int64)
    hidden_q = HiddenQ + long_n * hidden_q_sb + start * hidden_q_ss
    low, inner_low, inner_high, high = visible_blocks(
        tl.maximum(first_n, 0), tl.minimum(first_n + BLOCK_N, length_kv) - 1,
        length_q, -diagonal, right, left, BLOCK_M, SPLIT,
    )  # fmt: skip
    group_size = heads // groups
    first_head = 0
    end_head = group_size
    if PARTS:
        low, inner_low, inner_high, high = share_of(
            (low, inner_low, inner_high, high), part // shares, chunk
        )
        own = tl.cdiv(group_size, shares)
        first_head = part % shares * own
        end_head = tl.minimum(first_head + own, group_size)
    before = (inner_low - low) // BLOCK_M
    inner = (inner_high - inner_low) // BLOCK_M
    number = before + tl.cdiv(high - inner_high, BLOCK_M)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for at in range(first_head, end_head):
        h = g * group_size + at
        long_h = h.to(tl.int64)
        q_base = Q + long_n * q_sb + long_h * q_sh + start * q_ss
        do_base = Dout + long_n * do_sb + long_h * do_sh + start * do_ss
        # Level and Delta are [B', H, S]; thd has one storage row.
        base = ((0 if PACKED else long_n) * heads + long_h) * storage_q + start
        level_base = Level + base
        delta_base = Delta + base
        bias = (
            Bias + long_n * bias_sb + long_h * bias_sh,
            bias_si, bias_sj, bias_i, bias_j, index_q, index_kv,
        )  # fmt: skip
        mask = (
            Mask + long_n * mask_sb + long_h * mask_sh,
            mask_si, mask_sj, mask_i, mask_j, index_q, index_kv,
        )  # fmt: skip
        alibi = 0.0
        if ALIBI:
            alibi = tl.load(Slopes + n * slopes_sb + h * slopes_sh)
        drop = (0, 0, 0, 0, 0, 0)
        if DROPOUT:
            drop = (tl.load(Seed), threshold, sequence, head + h, origin_q, origin_kv)
        begin = low
        if ARBITRARY:
            begin, end = spanned(
                Spans + long_n * span_sb + long_h * span_sh, span_s, offs_n + index_kv, k_valid, mask_j,
                index_q, low, high, BLOCK_M,
            )  # fmt: skip
            number = tl.cdiv(end - begin, BLOCK_M)
        if SPLIT:
            dk, dv = _over_queries(
                dk, dv, k, v, (inner_low, inner, inner_high, inner), offs_n, first_n, k_valid, q_base, do_base,
                level_base, delta_base, hidden_q, length_q, q_ss, q_sd, do_ss, do_sd, hidden_q_ss,
                band, bias, mask, alibi, drop, scale, factor, softcap, inverse_keep,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, False, PLAIN, BIAS, ARBITRARY, ALIBI, SOFTCAP,
                DROPOUT, QUADS, HOLES, WIDE, PRECISION, WANT_DK, WANT_DV,
            )  # fmt: skip
        dk, dv = _over_queries(
            dk, dv, k, v, (begin, before, inner_high if SPLIT else begin, number), offs_n, first_n, k_valid,
            q_base, do_base, level_base, delta_base, hidden_q, length_q, q_ss, q_sd, do_ss, do_sd, hidden_q_ss,
            band, bias, mask, alibi, drop, scale, factor, softcap, inverse_keep,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, True, PLAIN, BIAS, ARBITRARY, ALIBI, SOFTCAP,
            DROPOUT, QUADS, HOLES, WIDE, PRECISION, WANT_DK, WANT_DV,
        )  # fmt: skip

    # thd: what lies outside every sequence was filled before.
    written = k_valid if PACKED else (row >= 0) & (row < storage_kv)
    if PARTS:
        DK += part.to(tl.int64) * dk_sp
        DV_ += part.to(tl.int64) * dv_sp
    if WANT_DK:
        dk = tl.where(k_valid[:, None], dk * scale, 0.0)
        at_k = DK + long_n * dk_sb + long_g * dk_sh + place * dk_ss + steps[:, None] * dk_ss
        tl.store(
            at_k + offs_d[None, :], dk.to(DK.dtype.element_ty),
            mask=written[:, None] & (offs_d[None, :] < D),
        )  # fmt: skip
    if WANT_DV:
        dv = tl.where(k_valid[:, None], dv, 0.0)
        at_v = DV_ + long_n * dv_sb + long_g * dv_sh + place * dv_ss + steps[:, None] * dv_ss
        tl.store(
            at_v + offs_dv[None, :], dv.to(DV_.dtype.element_ty),
            mask=written[:, None] & (offs_dv[None, :] < DV),
        )  # fmt: skip
