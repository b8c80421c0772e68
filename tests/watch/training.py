"""A small model that trains, and attention with a fault that begins at a step."""

import torch
from torch import nn
from torch.nn import functional as F

PLAIN = {"sdpa": F.scaled_dot_product_attention}
"""In a dict: a name of the module would be replaced as well."""


class Block(nn.Module):
    """q, k, v of one projection, attention, a residual."""

    def __init__(self, width, heads, groups, attend):
        super().__init__()
        self.heads, self.groups, self.size, self.attend = heads, groups, width // heads, attend
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.size)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        B, S, _ = x.shape
        parts = self.qkv(self.norm(x)).view(B, S, -1, self.size)
        q, k, v = parts.split((self.heads, self.groups, self.groups), 2)
        return x + self.proj(self.attend(q, k, v).reshape(B, S, -1))


class Model(nn.Module):
    """Tokens to the next token's logits."""

    def __init__(self, attend, *, width=32, heads=2, groups=2, layers=2, tokens=17, places=64):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.places = nn.Parameter(torch.randn(places, width) * 0.5)
        self.layers = nn.ModuleList(Block(width, heads, groups, attend) for _ in range(layers))
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sdpa(q, k, v, **options):
    """[B, S, H, D] through F.scaled_dot_product_attention."""
    options.setdefault("enable_gqa", q.shape[2] != k.shape[2])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def train(model, steps, *, dtype=torch.float32, batch=3, length=24, then=None):
    """Losses of some steps; ``then(step)`` is called before each."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    model.train()
    for step in range(steps):
        if then is not None:
            then(step)
        text = torch.randint(0, 17, (batch, length + 1), generator=generator)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


class Fault:
    """What stands in the place of F.scaled_dot_product_attention: right until ``on``.

    Args:
        grads: from the right dq, dk, dv ([B, H, S, D]) to wrong ones.
        out: from the right out to a wrong one.
    """

    def __init__(self, grads=None, out=None):
        self.grads, self.out, self.on = grads, out, False

    def __call__(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        return _Planted.apply(self, (attn_mask, dropout_p, is_causal, more), query, key, value)


class _Planted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fault, options, *operands):
        mask, dropout, causal, more = options
        ctx.fault = fault
        with torch.enable_grad():
            ctx.operands = [x.detach().requires_grad_() for x in operands]
            ctx.out = PLAIN["sdpa"](*ctx.operands, mask, dropout, causal, **more)
        out = ctx.out.detach().clone()
        return fault.out(out) if fault.on and fault.out else out

    @staticmethod
    def backward(ctx, dout):
        found = torch.autograd.grad(ctx.out, ctx.operands, dout)
        if ctx.fault.on and ctx.fault.grads:
            found = ctx.fault.grads(*found)
        return None, None, *found
