"""A training run to capture from: two layers of nn.MultiheadAttention learn to copy.

    gradtruth capture --list examples/capture_training.py
    gradtruth capture -o cases --layer '*.1.*' --step 0,10-:10 examples/capture_training.py -- --steps 30
    gradtruth verify cases/*.safetensors

The program knows nothing of gradtruth.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """Attention and a residual, causal."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x):
        y, length = self.norm(x), x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]


class Model(nn.Module):
    """Tokens to the next token's logits."""

    def __init__(self, tokens=17, width=32, heads=4, layers=2):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.places = nn.Parameter(torch.randn(64, width) * 0.1)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(given.steps):
        half = torch.randint(1, 17, (8, 12))
        text = torch.cat([half, half], 1)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
