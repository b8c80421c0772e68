"""Who computes attention in the benchmarks, in one form: q, k, v [B, S, H, D] and what else gets a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradtruth

Call = Callable[..., Tensor]


@dataclass
class Shape:
    """One row of the table: tensors and who may compute it.

    Attributes:
        name: of the row.
        leaves: q, k, v in [B, S, H, D] (thd: [tokens, H, D]) and what else gets a gradient.
        flops: of a forward.
        names, given: what follows q, k, v among the leaves, and the other arguments of ``gradtruth.attention``.
        peers: by name, each takes the leaves and returns out in ours' layout.
        judged: False where results differ by design (dropout): ours is judged by the suite, nobody here.
        grid: part of the grid of plain attention.
    """

    name: str
    leaves: tuple[Tensor, ...]
    flops: float
    names: tuple[str, ...]
    given: dict
    peers: dict[str, Call] = field(default_factory=dict)
    judged: bool = True
    grid: bool = False

    @property
    def ours(self) -> Call:
        """gradtruth with the Triton kernels."""
        return ours(*self.names, **self.given)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of out."""
        return (*self.leaves[0].shape[:-1], self.leaves[2].shape[-1])


def ours(*names: str, backend: str = "triton", **given) -> Call:
    """gradtruth.attention; what follows q, k, v goes to the arguments ``names``."""

    def call(q, k, v, *more):
        named = dict(zip(names, more, strict=True))
        return gradtruth.attention(q, k, v, backend=backend, check_inputs=False, **given, **named)

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

    # A function per shape: its graph may not be shared, and not be counted against a limit of recompilations.
    torch._dynamo.config.recompile_limit = 256
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
