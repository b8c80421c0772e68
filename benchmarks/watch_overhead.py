"""What `gradtruth.watch` costs a training run.

    python -m benchmarks.watch_overhead [--device cuda] [--json FILE]

One training step (forward, backward, AdamW) of a GPT-like model is timed four ways, in turns: without a watch; under
a watch in a step that is not watched; in one that is; in the first one, where every call is looked at. From the
shortest of each follows what a run costs more with one step of every 1, 10 and 100 watched. On a CPU the time is the
process's own, so that what else runs counts little; on a GPU it is the wall clock, the device waited for. With
``--steps N`` whole runs of N steps are timed too.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import gradtruth
from gradtruth.verify.cases.provenance import machine_facts

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"layers": 4, "width": 256, "heads": 4, "batch": 4, "length": 512, "dtype": "float32"},
    "cuda": {
        "layers": 12,
        "width": 1024,
        "heads": 16,
        "batch": 8,
        "length": 2048,
        "dtype": "bfloat16",
    },
}
FACTS = ("processor", "gpu", "threads", "torch", "cuda", "python", "gradtruth")


class Layer(nn.Module):
    """Causal attention and a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        B, S, width = x.shape
        parts = self.qkv(self.norm(x)).view(B, S, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(out.transpose(1, 2).reshape(B, S, width))
        return x + self.feed(x)


class Model(nn.Module):
    """Tokens to the next token's logits."""

    def __init__(
        self, layers: int, width: int, heads: int, length: int, tokens: int = 4096
    ) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Run:
    """A model that trains on random tokens, and a clock."""

    def __init__(self, device: str, size: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.device = device
        model = Model(size["layers"], size["width"], size["heads"], size["length"])
        self.model = model.to(device, getattr(torch, size["dtype"])).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        shape = (size["batch"], size["length"])
        self.tokens = torch.randint(0, 4096, shape, device=device)

    def step(self) -> None:
        """One step of the training."""
        logits = self.model(self.tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), self.tokens.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def now(self) -> float:
        """Seconds: of this process on a CPU, of the wall clock on a GPU that has nothing left to do."""
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, call: Callable[[], None]) -> float:
        """Seconds of a call."""
        start = self.now()
        call()
        return self.now() - start


def steps(run: Run, rounds: int) -> dict[str, list[float]]:
    """Seconds of steps of each kind, in turns."""
    found: dict[str, list[float]] = {"plain": [], "open": [], "watched": [], "first": []}
    for _ in range(2):
        run.step()
    for _ in range(rounds):
        found["plain"].append(run.timed(run.step))
        with gradtruth.watch(run.model, every=2, on_finding="raise") as watched:
            for kind in ("first", "open", "watched"):
                found[kind].append(run.timed(run.step))
        if watched.steps_watched != 2 or not watched.record.calls or watched.record.not_reached:
            raise RuntimeError(watched.summary())
    return found


def runs(run: Run, count: int) -> dict[str, float]:
    """Percent that a whole run of some steps takes longer, per ``every``."""

    def many() -> None:
        for _ in range(count):
            run.step()

    plain = statistics.median(run.timed(many) for _ in range(3))
    found = {}
    for every in (100, 10):
        with gradtruth.watch(run.model, every=every, on_finding="raise"):
            found[f"every={every}"] = round(100 * (run.timed(many) / plain - 1), 2)
    return found


def profile(run: Run) -> str:
    """The operators of the first watched step, where every call is looked at."""
    with torch.profiler.profile() as found, gradtruth.watch(run.model, every=10**9):
        run.step()
    keys = ("self_cpu_time_total", *(["self_cuda_time_total"] if run.device != "cpu" else []))
    return "\n".join(found.key_averages().table(sort_by=key, row_limit=40) for key in keys)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--steps", type=int, default=0, help="also time whole runs of so many steps"
    )
    parser.add_argument(
        "--profile", help="where to write what a watched step runs, by torch's profiler"
    )
    parser.add_argument(
        "--json", help="where to write; by default a dated file in benchmarks/results"
    )
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    size = SIZES[given.device]
    run = Run(given.device, size)
    times = {kind: min(found) for kind, found in steps(run, given.rounds).items()}
    plain, extra = times["plain"], times["watched"] - times["plain"]
    still = max(0.0, times["open"] - plain)
    percent = {
        f"every={n}": round(100 * (extra + (n - 1) * still) / (n * plain), 3) for n in (100, 10, 1)
    }
    watched = {f"every={n}": round(100 * extra / (n * plain), 3) for n in (100, 10, 1)}
    facts = machine_facts(given.device)
    document = {
        "command": f"python -m benchmarks.watch_overhead --device {given.device}",
        "machine": {name: facts[name] for name in FACTS if name in facts}
        | {"platform": platform.platform()},
        "model": size,
        "calls a watched step": inspect.signature(gradtruth.watch).parameters["calls"].default,
        "milliseconds a step": {kind: round(1000 * found, 2) for kind, found in times.items()},
        "percent, by the watched steps": watched,
        "percent, with what other steps measured more": percent,
    }
    if given.profile:
        Path(given.profile).write_text(profile(run))
    if given.steps:
        document["percent, of whole runs"] = runs(run, given.steps)
    target = given.json or f"benchmarks/results/{date.today()}-watch-overhead-{given.device}.json"
    Path(target).write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2))
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
