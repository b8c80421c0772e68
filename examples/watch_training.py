"""A training run in which an attention kernel goes wrong at a step, and what `gradtruth.watch` says of it.

    python examples/watch_training.py --save cases

A small transformer learns a module of Python's library, letter by letter. From step 90 on the kernel of layer 2
leaves dk and dv of the last sequence as its call before left them, as one does whose workspace is not cleared. The
forward is right, the shapes are right, nothing is NaN, and the loss goes on falling. Every tenth step is watched.

The fault is planted: ``F.scaled_dot_product_attention`` is replaced by a kernel that has it, before the model is made.
The model, the training and the watch know nothing of that.
"""

import argparse
import inspect
import logging

import torch
from torch import nn
from torch.nn import functional as F

import gradtruth

TEXT = inspect.getsource(argparse)


# ---------------------------------------------------------------- the fault


class Kernel:
    """PyTorch's attention, with a backward that is stale in one layer from when ``stale`` is set.

    Args:
        layer, layers: in which of how many.
    """

    def __init__(self, layer, layers):
        self.healthy = [F.scaled_dot_product_attention]
        self.layer, self.layers = layer, layers
        self.calls, self.stale, self.workspace = 0, False, None

    def __call__(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        mine = self.calls % self.layers == self.layer
        self.calls += 1
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, **more}
        if not mine:
            return self.healthy[0](query, key, value, **options)
        return _Stale.apply(self, options, query, key, value)


class _Stale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, options, *operands):
        ctx.kernel = kernel
        with torch.enable_grad():
            ctx.operands = [x.detach().requires_grad_() for x in operands]
            ctx.out = kernel.healthy[0](*ctx.operands, **options)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, dout):
        dq, dk, dv = (x.clone() for x in torch.autograd.grad(ctx.out, ctx.operands, dout))
        kernel = ctx.kernel
        before, kernel.workspace = kernel.workspace, (dk[-1].clone(), dv[-1].clone())
        if kernel.stale and before is not None:
            dk[-1], dv[-1] = before
        return None, None, dq, dk, dv


# ---------------------------------------------------------------- the model


class Layer(nn.Module):
    """Causal attention and a feed-forward part, each behind a norm and beside a residual."""

    def __init__(self, width, heads):
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
    """Letters to the next letter's logits."""

    def __init__(self, width=64, heads=4, layers=4, length=128):
        super().__init__()
        self.embed, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batches(batch, length):
    """Random stretches of the text, with the stretches one letter on."""
    letters = torch.tensor(list(TEXT.encode()))
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(letters) - length - 1, (batch, 1), generator=generator)
        places = starts + torch.arange(length)
        yield letters[places], letters[places + 1]


# ---------------------------------------------------------------- the run


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument(
        "--fault-at", type=int, default=90, help="step from which on layer 2 is wrong; -1 never"
    )
    parser.add_argument(
        "--every", type=int, default=10, help="steps from one that is watched to the next"
    )
    parser.add_argument("--save", help="folder for the wrong calls")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    given = parser.parse_args(arguments)
    logging.getLogger("gradtruth").setLevel(logging.ERROR)  # the summary is printed below
    layers = 4
    kernel = Kernel(2, layers)
    try:
        F.scaled_dot_product_attention = kernel
        torch.manual_seed(0)
        return train(Model(layers=layers, length=given.length), kernel, given)
    finally:
        F.scaled_dot_product_attention = kernel.healthy[0]


def told(found):
    """What the program does with a finding; "raise" would stop it."""
    print(
        f"WRONG {found.tensor} in {found.layer}, sequence {found.sequence}, from step {found.step}"
    )


def train(model, kernel, given):
    """The run; returns the findings."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    source = batches(given.batch, given.length)
    model.train()
    # So small a model has time for all of its calls in each watched step.
    options = {"every": given.every, "calls": None, "save": given.save, "on_finding": told}
    with gradtruth.watch(model, **options) as watched:
        for step in range(given.steps):
            kernel.stale = 0 <= given.fault_at <= step
            tokens, target = next(source)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % given.every == 0:
                print(f"step {step:4}  loss {loss.item():.3f}  findings {len(watched.findings)}")
    print(watched.summary())
    return watched.findings


if __name__ == "__main__":
    main()
