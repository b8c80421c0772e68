"""TransformerEngine's attention: its module and its low-level functions."""

from __future__ import annotations

from gradtruth.backends.peers.te_fused import TeFused
from gradtruth.backends.peers.te_module import TeModule
from gradtruth.backends.protocol import Backend

__all__ = ["create"]


def create(name: str) -> Backend:
    """The backend of this name: te_module or te_fused."""
    return TeModule() if name == "te_module" else TeFused()
