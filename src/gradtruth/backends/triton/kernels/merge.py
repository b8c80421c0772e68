"""After a forward in parts: the softmax over all keys from the softmaxes over some, in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

_FREE = [
    "heads", "tiles", "storage_q", "parts", "pl_sb", "pl_sh", "pl_sp", "lse_sb", "lse_sh",
]  # fmt: skip


@triton.jit(do_not_specialize=_FREE)
def merge(
    PartOut, PartLse, Out, Lse,
    po_sb, po_ss, po_sh, po_sp, pl_sb, pl_sh, pl_ss, pl_sp, o_sb, o_ss, o_sh, lse_sb, lse_sh, lse_ss,
    heads, tiles, storage_q, parts,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """out = sum of exp(lse_p - lse) out_p, lse = ln sum of exp(lse_p); rows that no part reached: 0 and -inf."""
    pid = tl.program_id(0)
    tile = pid % tiles
    h = ((pid // tiles) % heads).to(tl.int64)
    n = (pid // tiles // heads).to(tl.int64)
    row = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside = row < storage_q
    offs_dv = tl.arange(0, BLOCK_DV)
    whole = inside[:, None] & (offs_dv[None, :] < DV)
    lse_at = PartLse + n * pl_sb + h * pl_sh + row * pl_ss
    out_at = PartOut + n * po_sb + h * po_sh + row[:, None] * po_ss + offs_dv[None, :]
    pl_step = (pid * 0).to(tl.int64) + pl_sp
    po_step = (pid * 0).to(tl.int64) + po_sp
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for part in range(0, parts):
        top = tl.maximum(top, tl.load(lse_at + part * pl_step, mask=inside, other=float("-inf")))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for part in range(0, parts):
        lse = tl.load(lse_at + part * pl_step, mask=inside, other=float("-inf"))
        weight = tl.exp(lse - base)
        total += weight
        acc += weight[:, None] * tl.load(out_at + part * po_step, mask=whole, other=0.0)
    empty = total == 0.0
    some = tl.where(empty, 1.0, total)
    out = acc / some[:, None]
    lse = tl.where(empty, float("-inf"), base + tl.log(some))
    tl.store(Lse + n * lse_sb + h * lse_sh + row * lse_ss, lse, mask=inside)
    at = Out + n * o_sb + h * o_sh + row[:, None] * o_ss + offs_dv[None, :]
    tl.store(at, out.to(Out.dtype.element_ty), mask=whole)
