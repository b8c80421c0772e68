"""The shapes of the benchmarks: the grid of plain attention, and what most kernels leave to slow paths."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.contestants import SDPA, Call, Shape, fa4, flex, ours

TOKENS = 16384
HEADS = ((64, 32, 32), (128, 16, 16), (256, 8, 8), (128, 32, 8), (256, 16, 2))  # d, H, G
B, S, H, D = 2, 4096, 16, 128  # of most features
FULL = 4 * B * H * S * S * D


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A leaf."""
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def qkv(b=B, s=S, h=H, g=H, d=D, dtype=torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v."""
    return tuple(drawn(b, s, n, d, dtype=dtype) for n in (h, g, g))  # type: ignore[return-value]


def grid(*, short: bool) -> Iterator[Shape]:
    """d x S x mask at 16k tokens, multi-head and grouped."""
    lengths = (1024, 8192) if short else (8192, 512, 2048, 1024, 4096, 16384)
    for s in lengths:
        for d, h, g in HEADS:
            for causal in (True, False):
                b = TOKENS // s
                mask = "causal" if causal else "no_mask"
                peers = {name: SDPA[name](is_causal=causal) for name in ("cudnn", "flash2")}
                peers |= {
                    "fa4": fa4(causal=causal),
                    "flex": flex(visible=_causal if causal else None),
                }
                yield Shape(
                    f"d{d} h{h}/{g} S{s} {mask}", qkv(b, s, h, g, d),
                    4 * b * h * s * s * d * (0.5 if causal else 1.0), (), {"attn_mask_type": mask},
                    peers, grid=True,
                )  # fmt: skip


def _causal(b, h, i, j):
    return i >= j


def features() -> Iterator[Shape]:
    """What most kernels leave to slow paths."""
    yield from _arbitrary()
    yield from _biased()
    yield from _windowed()
    causal = {"attn_mask_type": "causal"}
    yield Shape(
        "dropout 0.1 causal", qkv(), FULL / 2, (), {**causal, "dropout_p": 0.1},
        {n: SDPA[n](is_causal=True, dropout_p=0.1) for n in ("cudnn", "flash2", "efficient", "math")},
        judged=False,
    )  # fmt: skip
    for d in (64, 128):
        yield Shape(
            f"fp32 d{d} causal", qkv(h=8, g=8, d=d, dtype=torch.float32), 4 * B * 8 * S * S * d / 2, (), causal,
            {n: SDPA[n](is_causal=True) for n in ("cudnn", "efficient", "math")} | {"flex": flex(visible=_causal)},
        )  # fmt: skip
    for d in (80, 160, 192):
        yield Shape(
            f"d{d} causal", qkv(d=d), 4 * B * H * S * S * d / 2, (), causal,
            {n: SDPA[n](is_causal=True) for n in ("cudnn", "flash2", "efficient")}
            | {"flex": flex(visible=_causal), "fa4": fa4(causal=True)},
        )  # fmt: skip
    yield _thd(H, D)


def _arbitrary() -> Iterator[Shape]:
    """A random mask; and documents as a mask tensor, where most tiles are hidden."""
    document = torch.arange(S, device="cuda") // 512
    apart = (document[:, None] != document[None, :])[None, None]
    random = torch.rand(1, 1, S, S, device="cuda") < 0.3
    random[..., 0] = False
    for name, hidden in (("random", random), ("documents of 512", apart)):
        yield Shape(
            f"arbitrary mask [1,1,S,T], {name}", qkv(), FULL * (1 - hidden.float().mean().item()), (),
            {"attn_mask_type": "arbitrary", "attention_mask": hidden},
            {n: SDPA[n](attn_mask=~hidden) for n in ("cudnn", "efficient", "math")}
            | {"flex": flex(visible=_seen(hidden))},
        )  # fmt: skip


def _seen(hidden: Tensor) -> Call:
    return lambda b, h, i, j: ~hidden[0, 0, i, j]


def _added(factor: float = 1.0, *, rows: bool = True) -> Call:
    """A score_mod that adds a bias."""

    def make(bias):
        def mod(x, b, h, i, j):
            return x + bias[0, h if bias.shape[1] > 1 else 0, i if rows else 0, j] * factor

        return mod

    return make


def _with_bias(name: str, factor: float) -> Call:
    return lambda q, k, v, x: SDPA[name]()(q, k, v, x if factor == 1.0 else x * factor)


def _biased() -> Iterator[Shape]:
    """Gradients of a bias, whole and broadcast."""
    for kind, factor in (("post_scale_bias", 1.0), ("pre_scale_bias", 1 / math.sqrt(D))):
        yield Shape(
            f"{kind} [1,H,S,T], dbias", (*qkv(), drawn(1, H, S, S)), FULL, ("bias",), {"bias_type": kind},
            {n: _with_bias(n, factor) for n in ("cudnn", "efficient", "math")} | {"flex": flex(score=_added(factor))},
        )  # fmt: skip
    long = 16384

    def expanded(name: str) -> Call:
        return lambda q, k, v, x: SDPA[name]()(q, k, v, x.expand(1, H, long, long))

    yield Shape(
        "post_scale_bias [1,1,1,T] at 16k, dbias", (*qkv(1, long), drawn(1, 1, 1, long)), 4 * H * long * long * D,
        ("bias",), {},
        {n: expanded(n) for n in ("cudnn", "efficient")} | {"flex": flex(score=_added(rows=False))},
    )  # fmt: skip


def _windowed() -> Iterator[Shape]:
    """A window of 1024 with a soft cap, and with sinks."""
    wide = 1024
    pairs = sum(min(i + 1, wide + 1) for i in range(S))
    window = {"attn_mask_type": "causal", "window_size": (wide, 0)}

    def near(b, h, i, j):
        return (i >= j) & (i - j <= wide)

    def capped(*_):
        return lambda x, b, h, i, j: 30.0 * torch.tanh(x / 30.0)

    yield Shape(
        "softcap 30, window 1024", qkv(), 4 * B * H * D * pairs, (), {**window, "softcap": 30.0},
        {"flex": flex(score=capped, visible=near), "fa4": fa4(causal=True, window_size=(wide, 0), softcap=30.0)},
    )  # fmt: skip
    yield Shape(
        "sinks, window 1024, d64 h64/8", (*qkv(h=64, g=8, d=64), drawn(64, dtype=torch.float32)),
        4 * B * 64 * 64 * pairs, ("softmax_offset",), {**window, "softmax_type": "learnable"},
        {"flex": flex(visible=near, sink=True)},
    )  # fmt: skip


def _thd(h: int, d: int) -> Shape:
    """Sequences of very different lengths, some without a query."""
    lq = [8192, 0, 4096, 2048, 0, 1024, 512, 512]
    lk = [8192, 2048, 4096, 2048, 1024, 1024, 512, 512]
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        for x in (lq, lk)
    )
    given = {
        "qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu_q,
        "cu_seqlens_kv": cu_k, "max_seqlen_q": max(lq), "max_seqlen_kv": max(lk),
    }  # fmt: skip
    flops = 4 * h * d * sum(a * b for a, b in zip(lq, lk, strict=True)) / 2
    leaves = (drawn(sum(lq), h, d), drawn(sum(lk), h, d), drawn(sum(lk), h, d))
    names = ("aten_flash_varlen", "torch_varlen", "aten_cudnn_varlen", "flash_attn_4")
    peers = {name: ours(backend=name, **given) for name in names}
    return Shape("thd causal, query-less sequences", leaves, flops, (), given, peers)
