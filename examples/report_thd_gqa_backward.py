"""A report retold: the backward of packed sequences (thd) with GQA that depends on the calls before it.

On an H100 dk and dv of a sequence that no query attends to were not zero but what an earlier call had left in the
workspace; the order of two calls changed their results, and so did freeing and allocating memory between them.

Part 1 calls fused_attn_bwd twice, A and then B, on two sequences in slots of 4 and 8 tokens (2 query heads, 1 KV head):
    A: 1 and 2 queries, 3 and 6 keys;    B: 0 and 3 queries, 3 and 6 keys.
out and lse are arbitrary numbers, as in the report. Then it runs other orders, with calls of another shape and memory
full of NaN between: each result must have the same bits as the first time, dk and dv of B's first sequence and
every padding row must be exactly 0, and the rest must be the gradients of the out and lse that were given.

Part 2 trains through the module (4 query heads, 1 KV head, head_dim 256, bf16, two sequences of 64) and does between
two backward passes what wrapping a model does: nn.Linear(4096, 1024).bfloat16().

    python examples/report_thd_gqa_backward.py
    python examples/report_thd_gqa_backward.py --device cuda --backend reference

Exit code: 0 all right, 1 something is wrong.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtruth.compat.transformer_engine import DotProductAttention, fused_attn_bwd

NAMES = ("dq", "dk", "dv")
SCALE = 0.1
SLOTS = ((0, 4), (4, 12))  # storage of the two sequences, on both sides
ORDERS = ("AB", "BA", "AAB", "BBA", "ABBA")


@dataclass
class Call:
    """One call of fused_attn_bwd."""

    lengths_q: tuple[int, int]
    lengths_kv: tuple[int, int]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def drawn(
        seed: int, lengths_q: tuple[int, int], lengths_kv: tuple[int, int], device: torch.device
    ) -> Call:
        noise = torch.Generator().manual_seed(seed)
        shapes = {
            "q": (12, 2, 8),
            "k": (12, 1, 8),
            "v": (12, 1, 8),
            "out": (12, 2, 8),
            "dout": (12, 2, 8),
            "lse": (12, 2, 1),
        }
        drawn = {
            name: torch.randn(shape, generator=noise).to(device, torch.float16)
            for name, shape in shapes.items()
        }
        return Call(lengths_q, lengths_kv, drawn)

    def run(self, backend: str) -> tuple[Tensor, ...]:
        t = self.tensors
        device = t["q"].device
        slots = cumulated((4, 8), device)
        unused_rng_state = torch.zeros(2, dtype=torch.int64, device=device)
        dq, dk, dv, _, _ = fused_attn_bwd(
            8,
            8,
            cumulated(self.lengths_q, device),
            cumulated(self.lengths_kv, device),
            t["q"],
            t["k"],
            t["v"],
            t["out"],
            t["dout"],
            torch.float16,
            [t["lse"], unused_rng_state],
            backend,
            cu_seqlens_q_padded=slots,
            cu_seqlens_kv_padded=slots,
            attn_scale=SCALE,
            qkv_layout="thd_thd_thd",
            attn_mask_type="padding",
            deterministic=True,
        )
        return dq, dk, dv

    def exact(self) -> tuple[Tensor, ...]:
        """fp64, sequence by sequence, from the same out and lse."""
        q, k, v, out, dout, lse = (t.double() for t in self.tensors.values())
        found = tuple(torch.zeros_like(t) for t in (q, k, v))
        for (start, _), length_q, length_kv in zip(
            SLOTS, self.lengths_q, self.lengths_kv, strict=True
        ):
            rows, keys = slice(start, start + length_q), slice(start, start + length_kv)
            weights = torch.exp(
                SCALE * torch.einsum("ihd,jd->hij", q[rows], k[keys, 0])
                - lse[rows].permute(1, 0, 2)
            )
            delta = (dout[rows] * out[rows]).sum(-1).t()[..., None]
            dscores = weights * (torch.einsum("ihd,jd->hij", dout[rows], v[keys, 0]) - delta)
            found[0][rows] = SCALE * torch.einsum("hij,jd->ihd", dscores, k[keys, 0])
            found[1][keys, 0] = SCALE * torch.einsum("hij,ihd->jd", dscores, q[rows])
            found[2][keys, 0] = torch.einsum("hij,ihd->jd", weights, dout[rows])
        return found

    def places(self, *, of_keys: bool) -> Tensor:
        """bool [12]: the tokens whose gradient may differ from 0."""
        held = torch.zeros(12, dtype=torch.bool, device=self.tensors["q"].device)
        for (start, _), length_q, length_kv in zip(
            SLOTS, self.lengths_q, self.lengths_kv, strict=True
        ):
            if length_q and length_kv:
                held[start : start + (length_kv if of_keys else length_q)] = True
        return held


def cumulated(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def churn(device: torch.device) -> None:
    """Leave freed blocks of many sizes full of NaN for the next call to find."""
    blocks = [torch.full((2**power,), torch.nan, device=device) for power in range(4, 20)]
    del blocks


def another_shape(device: torch.device, backend: str) -> None:
    """A backward of other lengths, heads and head dim."""
    q, k, v = (
        torch.full((70, heads, 32), 1e4, dtype=torch.float16, device=device) for heads in (6, 2, 2)
    )
    module = DotProductAttention(
        6, 32, 2, qkv_format="thd", attn_mask_type="padding_causal", backend=backend
    )
    lengths = cumulated((33, 0, 37), device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    module(*leaves, cu_seqlens_q=lengths, cu_seqlens_kv=lengths).sum().backward()


def calls_in_any_order(device: torch.device, backend: str) -> bool:
    """Part 1."""
    calls = {
        "A": Call.drawn(42, (1, 2), (3, 6), device),
        "B": Call.drawn(43, (0, 3), (3, 6), device),
    }
    first: dict[str, tuple[Tensor, ...]] = {}
    right = True
    for order in ORDERS:
        for name in order:
            found = calls[name].run(backend)
            same = all(
                torch.equal(a, b) for a, b in zip(found, first.setdefault(name, found), strict=True)
            )
            unseen = [
                float(grad[~calls[name].places(of_keys=grad is not found[0])].abs().max())
                for grad in found
            ]  # NaN is not 0 either
            right &= same and unseen == [0.0, 0.0, 0.0]
            norms = ", ".join(
                f"{n} {float(g.double().norm()):.4f}" for n, g in zip(NAMES, found, strict=True)
            )
            tops = ", ".join(
                f"|{n}| {float(g[:4].abs().max()):.4f}" for n, g in zip(NAMES, found, strict=True)
            )
            print(f"{order:4s} {name}: norms {norms}; tokens 0-3 max {tops}")
            print(
                f"        same bits as the first time: {same}; where nothing attends max {max(unseen)}"
            )
            another_shape(device, backend)
            churn(device)
    for name, call in calls.items():
        plain = call.run("unfused")
        for which, ours, yardstick, wanted in zip(
            NAMES, first[name], plain, call.exact(), strict=True
        ):
            error, norm = float((ours.double() - wanted).norm()), float(wanted.norm())
            allowed = 2 * float((yardstick.double() - wanted).norm()) + 2**-11 * norm
            right &= error <= allowed
            print(
                f"{name}: {which} rel_l2 {error / norm:.2e} of fp64 (allowed {allowed / norm:.2e})"
            )
    return right


def churned_module(device: torch.device, backend: str) -> bool:
    """Part 2."""
    lengths = cumulated((64, 64), device)
    noise = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(128, heads, 256, generator=noise).to(device, torch.bfloat16).requires_grad_()
        for heads in (4, 1, 1)
    )
    module = DotProductAttention(
        4,
        256,
        num_gqa_groups=1,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        softmax_scale=256**-0.5,
        backend=backend,
    )

    def gradients() -> tuple[Tensor, ...]:
        out = module(
            q, k, v, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=64, max_seqlen_kv=64
        )
        return torch.autograd.grad(out.sum(), (q, k, v))

    first, right = gradients(), True
    steps = {
        "baseline": lambda: None,
        "after nn.Linear(4096, 1024).bfloat16()": lambda: (
            torch.nn.Linear(4096, 1024).to(device).bfloat16()
        ),
        "after NaN was freed": lambda: churn(device),
        "after empty_cache": lambda: torch.cuda.empty_cache() if device.type == "cuda" else None,
    }
    for label, step in steps.items():
        step()
        found = gradients()
        same = all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
        finite = all(bool(grad.isfinite().all()) for grad in found)
        right &= same and finite
        tops = ", ".join(
            f"{n} {float(g.abs().max()):.4f}" for n, g in zip(NAMES, found, strict=True)
        )
        print(f"{label:40s} max {tops}; finite: {finite}; same bits: {same}")
    return right


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="thd + GQA backward calls in any order and after any allocation"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    right = calls_in_any_order(device, chosen.backend)
    right &= churned_module(device, chosen.backend)
    print("all right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
