"""Host time of gradtruth.attention beyond the kernel it calls, and CPU auto beside SDPA called directly.

    python -m benchmarks.host_time [--json FILE]

The kernel's own time is taken out by a backend that returns prepared tensors, so what is left is Python:
validation, selection, autograd. Medians of repeated blocks; ``new`` is a (B, S) that was never seen, of a Spec
that was.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import gradtruth
from gradtruth import backends
from gradtruth.core.problem import Problem
from gradtruth.core.support import DEFAULT_CLAIMS, Claims, Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

BLOCKS, CALLS = 9, 200


class Nothing:
    """A backend whose kernel takes no time: it returns the tensors that it was given beforehand."""

    name = "sdpa_flash"

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.out = torch.zeros_like(q)
        self.lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1])
        self.grads = Grads(dq=torch.zeros_like(q), dk=torch.zeros_like(k), dv=torch.zeros_like(v))

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """Everything."""
        return Support()

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """The default set, so that auto takes it."""
        return DEFAULT_CLAIMS

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """Prepared tensors."""
        return Forward(out=self.out, lse=self.lse)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """Prepared tensors."""
        return self.grads


def median_us(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Median over blocks of the mean time of a call, in microseconds."""
    for _ in range(20):
        call()
    times = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def qkv(
    batch: int, length: int, heads: int, dim: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k, v that require grad."""
    return [
        torch.randn(batch, length, heads, dim, dtype=dtype, requires_grad=True) for _ in range(3)
    ]


def host_times() -> dict[str, float]:
    """Microseconds per call with a kernel that takes no time, and SDPA's own at a tiny size."""
    q, k, v = qkv(1, 4, 2, 8)
    tiny = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    dout = torch.ones_like(q)
    nothing, real = Nothing(q, k, v), backends.get
    swap_get(lambda name: nothing if name == "sdpa_flash" else real(name))
    try:
        rows = {
            "forward, seen": median_us(
                lambda: gradtruth.attention(q, k, v, attn_mask_type="causal")
            )
        }
        rows["forward, new (B, S)"] = never_seen_us(nothing)
        nothing.out = torch.zeros_like(q)
        out = gradtruth.attention(q, k, v, attn_mask_type="causal")
        rows["backward, seen"] = median_us(
            lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        )
        rows["backward, an identity beside it"] = identity_us(q, k, v, dout)
    finally:
        swap_get(real)
    rows["SDPA forward, kernel included"] = median_us(
        lambda: scaled_dot_product_attention(*tiny, is_causal=True)
    )
    peer = scaled_dot_product_attention(*tiny, is_causal=True)
    rows["SDPA backward, kernel included"] = median_us(
        lambda: torch.autograd.grad(peer, tiny, dout.transpose(1, 2), retain_graph=True)
    )
    return rows


def swap_get(get: Callable[[str], Any]) -> None:
    """Put another way of finding backends in place, and forget every plan."""
    from gradtruth import calls, ops
    from gradtruth.backends import select

    select.get = get  # type: ignore[assignment]
    select.select.cache_clear()
    calls._prepared.clear()
    ops._plans.clear()


def never_seen_us(nothing: Nothing) -> float:
    """Median time of the first call of a shape, over shapes."""
    times = []
    for length in range(5, 205):
        q, k, v = qkv(1, length, 2, 8)
        nothing.out = q.detach()
        start = time.perf_counter()
        gradtruth.attention(q, k, v, attn_mask_type="causal")
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def identity_us(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> float:
    """What PyTorch's own autograd.grad call costs for a function of three inputs that does nothing."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            return tensors[0].detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return grad, grad, grad

    out = Identity.apply(q, k, v)
    return median_us(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))


def beside_sdpa() -> list[dict[str, Any]]:
    """CPU auto over SDPA called directly, forward and forward + backward, interleaved, at [2, 1024, 8, 64]."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = qkv(2, 1024, 8, 64, dtype)
        for causal in (False, True):
            mask = "causal" if causal else "no_mask"

            def ours(mask: str = mask, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                return gradtruth.attention(q, k, v, attn_mask_type=mask)

            def theirs(
                causal: bool = causal, q: Tensor = q, k: Tensor = k, v: Tensor = v
            ) -> Tensor:
                heads_first = (x.transpose(1, 2) for x in (q, k, v))
                return scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

            dout = torch.randn_like(q)
            for phase in ("forward", "forward + backward"):
                pair = [timed(f, phase, (q, k, v), dout) for f in (ours, theirs)]
                ratio, spread = interleaved_ratio(*pair)
                name = gradtruth.explain(q, k, v, attn_mask_type=mask).forward
                rows.append(
                    {
                        "dtype": str(dtype).removeprefix("torch."),
                        "mask": mask,
                        "phase": phase,
                        "backend": name.name if name else None,
                        "ours / SDPA": round(ratio, 3),
                        "quartiles": [round(x, 3) for x in spread],
                    }
                )
    return rows


def timed(
    function: Callable[[], Tensor], phase: str, inputs: tuple[Tensor, ...], dout: Tensor
) -> Callable[[], float]:
    """A call that returns its own time in seconds."""

    def run() -> float:
        start = time.perf_counter()
        out = function()
        if phase != "forward":
            torch.autograd.grad(out, inputs, dout)
        return time.perf_counter() - start

    return run


def interleaved_ratio(
    first: Callable[[], float], second: Callable[[], float]
) -> tuple[float, list[float]]:
    """Median and quartiles of first over second, each pair measured one right after the other."""
    for _ in range(3):
        first(), second()
    ratios = []
    for turn in range(15):
        a, b = (first(), second()) if turn % 2 else tuple(reversed((second(), first())))
        ratios.append(a / b)
    quartiles = statistics.quantiles(ratios, n=4)
    return quartiles[1], [quartiles[0], quartiles[2]]


def main() -> None:
    """Measure, print, and write JSON when asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    result = {
        "command": "python -m benchmarks.host_time",
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "gradtruth": gradtruth.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "host time, us": {name: round(value, 1) for name, value in host_times().items()},
        "beside SDPA": beside_sdpa(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
