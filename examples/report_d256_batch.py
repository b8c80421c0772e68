"""A report retold: head_dim 256, GQA 16/2, causal, sbhd, bf16, and gradients that go wrong only in a batch.

On a B200 a backend returned a right forward and wrong dq, dk, dv (dq five times too large, cosine -0.11) when the
batch had two sequences. Each sequence alone was right, and so was Gaussian noise in any batch: only real activations
showed it. So this compares the batch and each of its sequences alone with an fp64 computation of the same input,
and the input has what real activations have: outlier channels, a few rows that attend sharply, and sequences
that differ in scale.

    python examples/report_d256_batch.py
    python examples/report_d256_batch.py --device cuda --backend auto --backend sdpa_cudnn
    python examples/report_d256_batch.py --case CASE.safetensors      a captured sbhd causal case

A tensor is right when its error is at most twice that of plain rounding on the same input (the backend "unfused"),
plus one rounding of the result.

Exit code: 0 all right, 1 something is wrong, 2 the case is not of this kind, 3 a named backend refuses.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtruth import DotProductAttention, UnsupportedProblem
from gradtruth.verify.cases.case import Case

LENGTH, BATCH, HEADS, GROUPS, HEAD_DIM = 384, 2, 16, 2, 256
NAMES = ("out", "dq", "dk", "dv")


@dataclass
class Sample:
    """q [S, B, H, D], k [S, B, G, D], v [S, B, G, Dv] and dout [S, B, H, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def sequence(self, n: int) -> Sample:
        """Sequence n alone, as views: a batch of one."""
        return Sample(*(t[:, n : n + 1] for t in (self.q, self.k, self.v, self.dout)))


def structured(length: int, device: torch.device) -> Sample:
    """Input with the statistics that activations have and Gaussian noise lacks."""
    noise = torch.Generator().manual_seed(7)

    def draw(heads: int) -> Tensor:
        return torch.randn(length, BATCH, heads, HEAD_DIM, generator=noise)

    channels = torch.randperm(HEAD_DIM, generator=noise)[:6]
    q, k, v, dout = draw(HEADS), draw(GROUPS), draw(GROUPS), draw(HEADS)
    k[..., channels] += (
        6.0  # the same outlier channels in every key, as after a key projection's bias
    )
    q[..., channels] += 3.0 * torch.randn(length, BATCH, HEADS, 1, generator=noise)
    q[::17] *= 4.0  # rows that attend sharply
    v += torch.randn(HEAD_DIM, generator=noise)
    dout *= (
        torch.rand(length, BATCH, 1, 1, generator=noise).pow(4) * 3.0
    )  # few tokens carry most of the loss
    scale = torch.tensor([0.5, 1.5]).view(1, BATCH, 1, 1)  # sequences are not alike
    parts = (q * scale, k * scale, v / scale, dout * scale)
    return Sample(*(t.to(device, torch.bfloat16) for t in parts))


def captured(path: str, device: torch.device) -> Sample:
    """The tensors of a case file. Raises ValueError when it is not sbhd, causal and otherwise plain."""
    case = Case.load(path).to(device)
    spec, inputs = case.problem.spec, case.inputs
    if spec.layout != "sbhd" or spec.mask_label() != "causal" or spec.packing != "separate":
        raise ValueError(f"{path} is {case.problem.label()}, expected an sbhd causal case")
    return Sample(inputs.q, inputs.k, inputs.v, case.dout)


def attend(sample: Sample, backend: str) -> dict[str, Tensor]:
    """out, dq, dk, dv through the module, in sbhd."""
    _, _, heads, head_dim = sample.q.shape
    module = DotProductAttention(
        heads,
        (head_dim, sample.v.shape[-1]),
        num_gqa_groups=sample.k.shape[2],
        qkv_format="sbhd",
        attn_mask_type="causal",
        backend=backend,
    )
    leaves = [t.detach().requires_grad_() for t in (sample.q, sample.k, sample.v)]
    out = module(*leaves)
    grads = torch.autograd.grad(out, leaves, sample.dout.flatten(-2))
    return dict(zip(NAMES, (out.detach().view(sample.dout.shape), *grads), strict=True))


def exact(sample: Sample) -> dict[str, Tensor]:
    """The same in fp64, as the definition says: softmax(q k^T / sqrt(D)) v over the keys up to the query's own."""
    q, k, v = (t.detach().double().requires_grad_() for t in (sample.q, sample.k, sample.v))
    share = q.shape[2] // k.shape[2]
    scores = torch.einsum("ibhd,jbhd->bhij", q, k.repeat_interleave(share, 2)) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    out = torch.einsum("bhij,jbhd->ibhd", weights, v.repeat_interleave(share, 2))
    grads = torch.autograd.grad(out, (q, k, v), sample.dout.double())
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))


def rel_l2(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def show(
    label: str, found: dict[str, Tensor], wanted: dict[str, Tensor], yardstick: dict[str, Tensor]
) -> bool:
    """Print one line a tensor; True when each is right."""
    right = True
    for name in NAMES:
        reference, ours = wanted[name], found[name].double()
        error = rel_l2(ours, reference)
        allowed = (
            2 * rel_l2(yardstick[name], reference) + torch.finfo(yardstick[name].dtype).eps / 2
        )
        cosine = float(
            torch.nn.functional.cosine_similarity(ours.flatten(), reference.flatten(), dim=0)
        )
        good = error <= allowed  # False for NaN
        right &= good
        print(
            f"{label:22s} {name:4s} rel_l2 {error:.2e} (allowed {allowed:.2e})  cos {cosine:+.6f}  "
            f"norm {float(ours.norm()):10.2f}  exact {float(reference.norm()):10.2f}{'' if good else '  <- WRONG'}"
        )
    return right


def examine(sample: Sample, backend: str) -> bool:
    """Compare one backend on the batch, on each sequence inside it, and on each sequence alone."""
    batch, wanted, yardstick = attend(sample, backend), exact(sample), attend(sample, "unfused")
    right = show(f"{backend} batch of {sample.q.shape[1]}", batch, wanted, yardstick)
    for n in range(sample.q.shape[1]):
        inside, ours, plain = (
            {name: t[:, n : n + 1] for name, t in found.items()}
            for found in (wanted, batch, yardstick)
        )
        alone = attend(sample.sequence(n), backend)
        right &= show(f"{backend} {n} in the batch", ours, inside, plain)
        right &= show(f"{backend} {n} alone", alone, inside, plain)
    return right


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="gradients of a batch at head_dim 256 against fp64"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", action="append", help="may be repeated; default: auto")
    parser.add_argument("--case", help="a captured case instead of made data")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of made data")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    try:
        sample = captured(chosen.case, device) if chosen.case else structured(chosen.length, device)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in vars(sample).items())
    print(f"{shapes}, {sample.q.dtype}, on {device}")
    right, refused = True, False
    for backend in chosen.backend or ["auto"]:
        try:
            right &= examine(sample, backend)
        except UnsupportedProblem as refusal:
            print(refusal)
            refused = True
    print(("all that ran is right" if refused else "all right") if right else "WRONG")
    return (3 if refused else 0) if right else 1


if __name__ == "__main__":
    sys.exit(main())
