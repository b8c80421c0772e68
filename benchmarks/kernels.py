"""The Triton kernels beside SDPA-cuDNN, SDPA-flash, FA4 and FlexAttention on one GPU: verified, then timed.

    python -m benchmarks.kernels --json OUT            # the grid and the features, some four minutes on an H200
    python -m benchmarks.kernels --only grid --short   # S 1024 and 8192 only

TFLOP/s by the usual count (forward 4 B H S S D, halved when causal; backward 2.5 times that), medians of CUDA-event
times, backward through autograd, all contestants of a shape one after the other. A contestant whose out or gradients
are further than 2 % (relative L2, bf16; 1e-4 for fp32) from fp32 attention is printed as WRONG and not timed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradtruth

TOKENS = 16384
NEAR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
Call = Callable[..., Tensor]


@dataclass
class Shape:
    """One row of the table: tensors and who may compute it.

    Attributes:
        name: of the row.
        leaves: q, k, v in [B, S, H, D] and what else gets a gradient.
        flops: of a forward.
        ours: takes the leaves.
        peers: by name, each takes the leaves and returns out in ours' layout.
        judged: False where results differ by design (dropout): ours is judged by the suite, nobody here.
        exact: what fp32 leaves are attended with to judge; ours with the backend ``reference`` when None.
    """

    name: str
    leaves: tuple[Tensor, ...]
    flops: float
    ours: Call
    peers: dict[str, Call] = field(default_factory=dict)
    judged: bool = True
    exact: Call | None = None


def ours(*names: str, backend: str = "triton", **given) -> Call:
    """gradtruth.attention; what follows q, k, v goes to the arguments ``names``."""

    def call(q, k, v, *more):
        return gradtruth.attention(
            q,
            k,
            v,
            backend=backend,
            check_inputs=False,
            **given,
            **dict(zip(names, more, strict=True)),
        )

    return call


def sdpa(kind: SDPBackend, **given) -> Call:
    """torch's SDPA with one backend; a fourth leaf is attn_mask."""

    def call(q, k, v, *more):
        mask = more[0] if more else given.get("attn_mask")
        rest = {name: value for name, value in given.items() if name != "attn_mask"}
        with sdpa_kernel([kind]):
            out = F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)),
                attn_mask=mask, enable_gqa=q.shape[2] != k.shape[2], **rest,
            )  # fmt: skip
        return out.transpose(1, 2)

    return call


SDPA = {
    "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "flash2": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "math": partial(sdpa, SDPBackend.MATH),
}


@cache
def _flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(score=None, visible=None, sink=None) -> Call:
    """FlexAttention compiled; ``score(more)`` makes a score_mod, ``visible`` is a mask_mod."""
    from torch.nn.attention.flex_attention import create_block_mask

    blocks = {}

    def call(q, k, v, *more):
        size = q.shape[1], k.shape[1]
        if visible is not None and size not in blocks:
            blocks[size] = create_block_mask(visible, None, None, *size, device=q.device)
        out = _flex()(
            *(x.transpose(1, 2) for x in (q, k, v)),
            score_mod=None if score is None else score(*more), block_mask=blocks.get(size),
            enable_gqa=q.shape[2] != k.shape[2], return_lse=sink is not None,
        )  # fmt: skip
        if sink is not None:
            out, lse = out
            out = out * torch.sigmoid(lse - more[0][None, :, None])[..., None].to(out.dtype)
        return out.transpose(1, 2)

    return call


def fa4(**given) -> Call:
    """flash-attn-4, when it can be imported."""

    def call(q, k, v):
        from flash_attn.cute import flash_attn_func

        out = flash_attn_func(q, k, v, **given)
        return out[0] if isinstance(out, tuple) else out

    return call


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """A leaf."""
    return torch.randn(*shape, device="cuda", dtype=dtype).mul_(scale).requires_grad_()


def qkv(b, s, h, g, d, dtype=torch.bfloat16, dv=None):
    """q, k, v."""
    return (
        drawn(b, s, h, d, dtype=dtype),
        drawn(b, s, g, d, dtype=dtype),
        drawn(b, s, g, dv or d, dtype=dtype),
    )


def grid(*, short: bool) -> Iterator[Shape]:
    """d x S x mask at 16k tokens, multi-head and grouped."""
    lengths = (1024, 8192) if short else (512, 1024, 2048, 4096, 8192, 16384)
    heads = [(64, 32, 32), (128, 16, 16), (256, 8, 8), (128, 32, 8), (256, 16, 2)]
    for d, h, g in heads:
        for s in lengths:
            for causal in (True, False):
                b = TOKENS // s
                mask = "causal" if causal else "no_mask"
                peers = {name: SDPA[name](is_causal=causal) for name in ("cudnn", "flash2")}
                peers["fa4"] = fa4(causal=causal)
                if s == 8192:
                    peers["flex"] = flex(visible=_causal if causal else None)
                yield Shape(
                    f"d{d} h{h}/{g} S{s} {mask}", qkv(b, s, h, g, d),
                    4 * b * h * s * s * d * (0.5 if causal else 1.0), ours(attn_mask_type=mask), peers,
                )  # fmt: skip


def _causal(b, h, i, j):
    return i >= j


def features() -> Iterator[Shape]:
    """What most kernels leave to slow paths."""
    b, s, h, d = 2, 4096, 16, 128
    full = 4 * b * h * s * s * d
    hidden = torch.rand(1, 1, s, s, device="cuda") < 0.3
    hidden[..., 0] = False
    yield Shape(
        "arbitrary mask [1,1,S,T]", qkv(b, s, h, h, d), full,
        ours(attn_mask_type="arbitrary", attention_mask=hidden),
        {n: SDPA[n](attn_mask=~hidden) for n in ("cudnn", "efficient", "math")}
        | {"flex": flex(visible=lambda b, h, i, j: ~hidden[0, 0, i, j])},
    )  # fmt: skip
    scale = 1 / math.sqrt(d)

    def added(factor=1.0, rows=True):
        def make(bias):
            def mod(x, b, h, i, j):
                return x + bias[0, h if bias.shape[1] > 1 else 0, i if rows else 0, j] * factor

            return mod

        return make

    for kind, factor in (("post_scale_bias", 1.0), ("pre_scale_bias", scale)):
        peers = {
            n: (lambda q, k, v, x, n=n, f=factor: SDPA[n]()(q, k, v, x if f == 1.0 else x * f))
            for n in ("cudnn", "efficient", "math")
        }
        yield Shape(
            f"{kind} [1,H,S,T], dbias", (*qkv(b, s, h, h, d), drawn(1, h, s, s)), full,
            ours("bias", bias_type=kind), peers | {"flex": flex(score=added(factor))},
        )  # fmt: skip
    long = 16384
    yield Shape(
        "post_scale_bias [1,1,1,T] at 16k, dbias", (*qkv(1, long, h, h, d), drawn(1, 1, 1, long)),
        4 * h * long * long * d, ours("bias"),
        {"efficient": lambda q, k, v, x: SDPA["efficient"]()(q, k, v, x.expand(1, h, long, long)),
         "flex": flex(score=added(rows=False))},
    )  # fmt: skip
    wide = 1024
    inside = 4 * b * h * d * sum(min(i + 1, wide + 1) for i in range(s))

    def windowed(b, h, i, j):
        return (i >= j) & (i - j <= wide)

    def capped(*_):
        return lambda x, b, h, i, j: 30.0 * torch.tanh(x / 30.0)

    yield Shape(
        "softcap 30, window 1024", qkv(b, s, h, h, d), inside,
        ours(attn_mask_type="causal", window_size=(wide, 0), softcap=30.0),
        {"flex": flex(score=capped, visible=windowed),
         "fa4": fa4(causal=True, window_size=(wide, 0), softcap=30.0)},
    )  # fmt: skip
    sink = torch.randn(64, device="cuda").requires_grad_()
    yield Shape(
        "sinks, window 1024, d64 h64/8", (*qkv(b, s, 64, 8, 64), sink), inside * 64 * 64 / (h * d),
        ours("softmax_offset", softmax_type="learnable", attn_mask_type="causal", window_size=(wide, 0)),
        {"flex": flex(visible=windowed, sink=True)},
    )  # fmt: skip
    yield Shape(
        "dropout 0.1 causal", qkv(b, s, h, h, d), full / 2, ours(attn_mask_type="causal", dropout_p=0.1),
        {n: SDPA[n](is_causal=True, dropout_p=0.1) for n in ("cudnn", "flash2", "efficient")},
        judged=False,
    )  # fmt: skip
    for one in (64, 128):
        yield Shape(
            f"fp32 d{one} causal", qkv(b, s, 8, 8, one, torch.float32), 4 * b * 8 * s * s * one / 2,
            ours(attn_mask_type="causal"),
            {n: SDPA[n](is_causal=True) for n in ("efficient", "math")} | {"flex": flex(visible=_causal)},
        )  # fmt: skip
    for one in (80, 160, 192):
        yield Shape(
            f"d{one} causal", qkv(b, s, h, h, one), 4 * b * h * s * s * one / 2, ours(attn_mask_type="causal"),
            {n: SDPA[n](is_causal=True) for n in ("cudnn", "flash2", "efficient")}
            | {"flex": flex(visible=_causal), "fa4": fa4(causal=True)},
        )  # fmt: skip
    yield _thd(h, d)


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
    return Shape("thd causal, query-less sequences", leaves, flops, ours(**given), peers)


def median_ms(call: Callable[[], object], reps: int = 9) -> float:
    """Median CUDA-event time; events of all repetitions are recorded before any is read."""
    for _ in range(3):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def judge(shape: Shape, found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative L2 of out and gradients."""
    return max(
        ((x.float() - y.float()).norm() / y.float().norm()).item()
        for x, y in zip(found, exact, strict=True)
    )


def run(shape: Shape) -> dict[str, object]:
    """Verify and time everybody."""
    row: dict[str, object] = {"name": shape.name, "flops": shape.flops}
    out = shape.ours(*shape.leaves)
    dout = torch.randn_like(out)
    exact = None
    if shape.judged:
        wide = [x.detach().float().requires_grad_() for x in shape.leaves]
        reference = _exact(shape)(*wide)
        exact = [reference, *torch.autograd.grad(reference, wide, dout.float())]
        exact = [x.detach() for x in exact]
        del reference, wide
    near = NEAR[out.dtype]
    for name, call in {"ours": shape.ours, **shape.peers}.items():
        try:
            out = call(*shape.leaves)
            grads = torch.autograd.grad(out, shape.leaves, dout, retain_graph=True)
            error = judge(shape, [out, *grads], exact) if exact else None
            entry = {"error": error}
            if error is not None and not error <= near:
                entry["wrong"] = True
            else:
                with torch.no_grad():
                    forward = median_ms(partial(call, *shape.leaves))
                backward = median_ms(
                    partial(torch.autograd.grad, out, shape.leaves, dout, retain_graph=True)
                )
                entry |= {"forward_ms": forward, "backward_ms": backward}
        except Exception as fault:  # noqa: BLE001 - whatever a peer raises is its row
            entry = {"refused": f"{type(fault).__name__}: {str(fault).splitlines()[0][:120]}"}
        row[name] = entry
    return row


def _exact(shape: Shape) -> Call:
    """fp32 attention of the same arguments: the backend ``reference``."""
    if shape.exact is not None:
        return shape.exact

    def call(*leaves):
        with torch.no_grad():
            torch.cuda.empty_cache()
        cells = dict(zip(shape.ours.__code__.co_freevars, shape.ours.__closure__, strict=True))
        names, given = cells["names"].cell_contents, cells["given"].cell_contents
        return ours(*names, backend="reference", **given)(*leaves)

    return call


def shown(row: dict[str, object]) -> str:
    """One line: TFLOP/s forward / backward of each, and the ratio of ours to the best peer."""
    parts, best = [], {"forward_ms": math.inf, "backward_ms": math.inf}
    for name, entry in row.items():
        if not isinstance(entry, dict):
            continue
        if "forward_ms" in entry:
            rates = [
                row["flops"] * f / entry[t] / 1e9
                for f, t in ((1, "forward_ms"), (2.5, "backward_ms"))
            ]
            parts.append(f"{name} {rates[0]:.0f}/{rates[1]:.0f}")
            if name != "ours":
                best = {t: min(best[t], entry[t]) for t in best}
        else:
            why = f"WRONG {entry['error']:.1e}" if "wrong" in entry else "refuses"
            parts.append(f"{name} {why}")
    mine = row["ours"]
    if "forward_ms" in mine and best["forward_ms"] < math.inf:
        row["ratio"] = [best[t] / mine[t] for t in best]
        parts.append("ratio {:.2f}/{:.2f}".format(*row["ratio"]))
    return f"{row['name']:40} " + "  ".join(parts)


def main() -> None:
    """Print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("grid", "features"))
    parser.add_argument("--short", action="store_true", help="two lengths of the grid")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    versions = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(), "triton": __import__("triton").__version__,
    }  # fmt: skip
    print(versions)
    rows = []
    shapes = [] if given.only == "grid" else [features()]
    shapes += [] if given.only == "features" else [grid(short=given.short)]
    for shape in (x for many in shapes for x in many):
        row = run(shape)
        rows.append(row)
        print(shown(row), flush=True)
        if given.json:
            given.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
        torch.cuda.empty_cache()
    for label, chosen in (("grid", lambda n: n.startswith("d") and "/" in n and " S" in n),):
        ratios = [row["ratio"] for row in rows if "ratio" in row and chosen(row["name"])]
        if ratios:
            means = [math.exp(statistics.fmean(math.log(r[i]) for r in ratios)) for i in (0, 1)]
            least = [min(r[i] for r in ratios) for i in (0, 1)]
            print(
                f"{label}: geometric mean {means[0]:.2f}/{means[1]:.2f}, least {least[0]:.2f}/{least[1]:.2f}"
            )


if __name__ == "__main__":
    main()
