"""Before the backward: what it needs per query and head, once."""

from __future__ import annotations

import triton
import triton.language as tl

from gradtruth.backends.triton.kernels.places import load_rows
from gradtruth.backends.triton.kernels.terms import LOG2E

_FREE = [
    "heads", "tiles", "storage_q", "lse_sb", "lse_sh", "dlse_sb", "dlse_sh",
]  # fmt: skip


@triton.jit(do_not_specialize=_FREE)
def rows(
    Out, Dout, Lse, Dlse, Level, Delta,
    o_sb, o_ss, o_sh, o_sd, do_sb, do_ss, do_sh, do_sd, lse_sb, lse_sh, lse_ss, dlse_sb, dlse_sh, dlse_ss,
    heads, tiles, storage_q,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, DLSE: tl.constexpr,
):  # fmt: skip
    """Level = lse * log2(e), +inf for a row without keys, so that exp2(x - level) is 0; Delta = dout . out - dlse.

    Both are [B', H, S], fp32. All storage rows are computed; those outside every sequence are never read.
    """
    pid = tl.program_id(0)
    tile = pid % tiles
    h = ((pid // tiles) % heads).to(tl.int64)
    n = (pid // tiles // heads).to(tl.int64)
    row = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside = row < storage_q
    offs_dv = tl.arange(0, BLOCK_DV)
    out = load_rows(Out + n * o_sb + h * o_sh, row, o_ss, offs_dv, o_sd, inside, DV, True)
    dout = load_rows(Dout + n * do_sb + h * do_sh, row, do_ss, offs_dv, do_sd, inside, DV, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if DLSE:
        delta -= tl.load(Dlse + n * dlse_sb + h * dlse_sh + row * dlse_ss, mask=inside, other=0.0)
    lse = tl.load(Lse + n * lse_sb + h * lse_sh + row * lse_ss, mask=inside, other=0.0)
    level = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    at = (n * heads + h) * storage_q + row
    tl.store(Level + at, level, mask=inside)
    tl.store(Delta + at, delta, mask=inside)
