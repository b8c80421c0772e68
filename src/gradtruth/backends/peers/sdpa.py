"""The four backends of torch.nn.functional.scaled_dot_product_attention, called one by one."""

from __future__ import annotations

from gradtruth.backends.peers.sdpa_fused import SdpaFused
from gradtruth.backends.peers.sdpa_math import SdpaMath
from gradtruth.backends.protocol import Backend

__all__ = ["create"]


def create(name: str) -> Backend:
    """The backend of this name: sdpa_math, sdpa_flash, sdpa_efficient or sdpa_cudnn."""
    return SdpaMath() if name == "sdpa_math" else SdpaFused(name)
