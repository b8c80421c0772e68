"""dbias: one program per tile of the bias and chunk of what the bias is broadcast over; no atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from gradtruth.backends.triton.kernels.places import (
    load_rows,
    locate,
    product,
    visible_blocks,
)
from gradtruth.backends.triton.kernels.terms import kept, scores

_FREE = [
    "batch", "heads", "group_size", "storage_q", "length_q", "length_kv", "diagonal", "left",
    "right", "threshold", "bias_i", "bias_j", "mask_i", "mask_j", "part_b", "part_h",
    "part_i", "part_j", "tiles_i", "tiles_j", "chunks", "chunks_i",
]  # fmt: skip


@triton.jit(do_not_specialize=_FREE)
def backward_bias(
    Q, K, V, Dout, Level, Delta, Part, Where, Bias, Mask, Spans, HiddenQ, HiddenK, Slopes, Seed,
    q_sb, q_ss, q_sh, q_sd, k_sb, k_ss, k_sh, k_sd, v_sb, v_ss, v_sh, v_sd, do_sb, do_ss, do_sh, do_sd,
    bias_sb, bias_sh, bias_si, bias_sj, mask_sb, mask_sh, mask_si, mask_sj, span_sb, span_sh, span_s,
    hidden_q_sb, hidden_q_ss, hidden_k_sb, hidden_k_ss, slopes_sb, slopes_sh,
    bias_i, bias_j, mask_i, mask_j, batch, heads, group_size, storage_q,
    length_q, length_kv, diagonal, left, right,
    scale, factor, softcap, threshold, inverse_keep,
    part_b, part_h, part_i, part_j, tiles_i, tiles_j, chunks, chunks_i,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    PLAIN: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, ARBITRARY: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, QUADS: tl.constexpr,
    PRECISION: tl.constexpr, HOLES: tl.constexpr, WIDE: tl.constexpr,
    ALL_B: tl.constexpr, ALL_H: tl.constexpr, ALL_I: tl.constexpr, ALL_J: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Part is [chunks * chunks_i, part_b, part_h, part_i, part_j]; ALL_x: the bias has size 1 along x.

    A program sums over the (sequence, head) pairs chunk, chunk + chunks, ... and, where the bias has no rows,
    over the tiles of queries chunk_i, chunk_i + chunks_i, ...
    """
    pid = tl.program_id(0)
    tile_j = pid % tiles_j
    rest = pid // tiles_j
    tile_i = rest % tiles_i
    rest = rest // tiles_i
    own_h = rest % part_h
    rest = rest // part_h
    own_b = rest % part_b
    rest = rest // part_b
    chunk_i = rest % chunks_i
    chunk = rest // chunks_i
    pairs = (batch if ALL_B else 1) * (heads if ALL_H else 1)
    lines_m = tl.arange(0, BLOCK_M)
    lines_n = tl.arange(0, BLOCK_N)
    steps_m = lines_m
    steps_n = lines_n
    if WIDE:
        steps_m = lines_m.to(tl.int64)
        steps_n = lines_n.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for pair in range(chunk, pairs, chunks):
        h = own_h
        n = own_b
        if ALL_H:
            h = pair % heads
            if ALL_B:
                n = pair // heads
        elif ALL_B:
            n = pair
        (
            start_q, own_q, start_kv, own_kv, off, index_q, index_kv, origin_q, origin_kv, sequence, head,
        ) = locate(Where, batch, n, length_q, length_kv, diagonal, RAGGED)  # fmt: skip
        long_n = n.to(tl.int64)
        long_h = h.to(tl.int64)
        group = long_h // group_size
        long_q = start_q.to(tl.int64)
        long_k = start_kv.to(tl.int64)
        bias = (
            Bias + long_n * bias_sb + long_h * bias_sh,
            bias_si, bias_sj, bias_i, bias_j, index_q, index_kv,
        )  # fmt: skip
        mask = (
            Mask + long_n * mask_sb + long_h * mask_sh,
            mask_si, mask_sj, mask_i, mask_j, index_q, index_kv,
        )  # fmt: skip
        band = (off, left, right)
        alibi = 0.0
        if ALIBI:
            alibi = tl.load(Slopes + n * slopes_sb + h * slopes_sh)
        drop = (0, 0, 0, 0, 0, 0)
        if DROPOUT:
            drop = (tl.load(Seed), threshold, sequence, head + h, origin_q, origin_kv)
        first_row = (0 if PACKED else long_n) * heads + long_h
        if ALL_I:
            begin_m = chunk_i * BLOCK_M
            end_m = own_q
        else:
            begin_m = tile_i * BLOCK_M - index_q
            end_m = begin_m + 1
        for start_m in range(begin_m, end_m, BLOCK_M * chunks_i):
            offs_m = start_m + lines_m
            q_valid = (offs_m >= 0) & (offs_m < own_q)
            if HOLES % 2 == 1:
                hidden_m = tl.load(
                    HiddenQ + long_n * hidden_q_sb + (start_q + offs_m).to(tl.int64) * hidden_q_ss,
                    mask=q_valid,
                    other=1,
                )
                q_valid = q_valid & (hidden_m == 0)
            place = long_q + start_m
            q = load_rows(
                Q + long_n * q_sb + long_h * q_sh + place * q_ss,
                steps_m,
                q_ss,
                offs_d,
                q_sd,
                q_valid,
                D,
                True,
            )
            do = load_rows(
                Dout + long_n * do_sb + long_h * do_sh + place * do_ss,
                steps_m, do_ss, offs_dv, do_sd, q_valid, DV, True,
            )  # fmt: skip
            at_row = first_row * storage_q + start_q + offs_m
            level = tl.load(Level + at_row, mask=q_valid, other=float("inf"))
            delta = tl.load(Delta + at_row, mask=q_valid, other=0.0)
            low, inner_low, inner_high, high = visible_blocks(
                tl.maximum(start_m, 0), tl.minimum(start_m + BLOCK_M, own_q) - 1,
                own_kv, off, left, right, BLOCK_N, False,
            )  # fmt: skip
            begin_n = low
            end_n = high
            if not ALL_J:
                begin_n = tile_j * BLOCK_N - index_kv
                reached = (begin_n < high) & (begin_n + BLOCK_N > low)
                end_n = tl.where(reached, begin_n + 1, begin_n)
            for start_n in range(begin_n, end_n, BLOCK_N):
                offs_n = start_n + lines_n
                k_valid = (offs_n >= 0) & (offs_n < own_kv)
                if HOLES >= 2:
                    hidden_n = tl.load(
                        HiddenK + long_n * hidden_k_sb + (start_kv + offs_n).to(tl.int64) * hidden_k_ss,
                        mask=k_valid, other=1,
                    )  # fmt: skip
                    k_valid = k_valid & (hidden_n == 0)
                there = long_k + start_n
                k = load_rows(
                    K + long_n * k_sb + group * k_sh + there * k_ss,
                    steps_n, k_ss, offs_d, k_sd, k_valid, D, True,
                )  # fmt: skip
                v = load_rows(
                    V + long_n * v_sb + group * v_sh + there * v_ss,
                    steps_n, v_ss, offs_dv, v_sd, k_valid, DV, True,
                )  # fmt: skip
                s = product(q, k, PRECISION)
                x, slope, visible = scores(
                    s, offs_m[:, None], offs_n[None, :], q_valid[:, None], k_valid[None, :],
                    band, bias, mask, alibi, scale, softcap,
                    True, False, BIAS, ARBITRARY, ALIBI, SOFTCAP,
                )  # fmt: skip
                p = tl.exp2(x - level[:, None])
                dp = product(do, v, PRECISION)
                if DROPOUT:
                    dp = tl.where(
                        kept(drop, offs_m, offs_n, start_n, QUADS and (ALIGNED or ALL_J)),
                        dp * inverse_keep,
                        0.0,
                    )
                ds = p * (dp - delta[:, None])
                if BIAS == 1:
                    if SOFTCAP:
                        ds *= slope
                    ds *= scale
                acc += ds
    lines_i = tile_i * BLOCK_M + lines_m
    lines_j = tile_j * BLOCK_N + lines_n
    at = ((chunk * chunks_i + chunk_i).to(tl.int64) * part_b + own_b) * part_h + own_h
    if ALL_I and ALL_J:
        tl.store(Part + at, tl.sum(tl.sum(acc, 1), 0))
    elif ALL_J:
        tl.store(Part + at * part_i + lines_i, tl.sum(acc, 1), mask=lines_i < part_i)
    elif ALL_I:
        tl.store(Part + at * part_j + lines_j, tl.sum(acc, 0), mask=lines_j < part_j)
    else:
        where = (at * part_i + lines_i[:, None]) * part_j + lines_j[None, :]
        inside = (lines_i[:, None] < part_i) & (lines_j[None, :] < part_j)
        tl.store(Part + where, acc, mask=inside)
