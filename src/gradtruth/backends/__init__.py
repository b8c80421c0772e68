"""Backends: the order in which ``auto`` tries them, and how a name becomes one."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from gradtruth.backends.protocol import Backend
from gradtruth.errors import InvalidProblem

__all__ = ["ORDER", "PEERS", "Backend", "get"]

# Fastest first; ``auto`` takes the first that supports the problem and makes the wanted claims.
_OWN = {
    "triton": "gradtruth.backends.triton",
    "reference": "gradtruth.backends.reference",
    "unfused": "gradtruth.backends.unfused",
}
_PEERS = {
    "sdpa_flash": "gradtruth.backends.peers.sdpa",
    "sdpa_efficient": "gradtruth.backends.peers.sdpa",
    "sdpa_cudnn": "gradtruth.backends.peers.sdpa",
    "sdpa_math": "gradtruth.backends.peers.sdpa",
    "flex": "gradtruth.backends.peers.flex",
    "torch_varlen": "gradtruth.backends.peers.torch_varlen",
    "aten_flash_varlen": "gradtruth.backends.peers.aten_varlen",
    "aten_cudnn_varlen": "gradtruth.backends.peers.aten_varlen",
    "sdpa_nested": "gradtruth.backends.peers.sdpa_nested",
    "flash_attn_2": "gradtruth.backends.peers.flash_attn",
    "flash_attn_3": "gradtruth.backends.peers.flash_attn",
    "flash_attn_4": "gradtruth.backends.peers.flash_attn",
    "te_module": "gradtruth.backends.peers.te",
    "te_fused": "gradtruth.backends.peers.te",
    "cudnn": "gradtruth.backends.peers.cudnn_frontend",
    "xformers": "gradtruth.backends.peers.xformers",
    "fla": "gradtruth.backends.peers.fla",
}
_PLACES = _OWN | _PEERS
ORDER: tuple[str, ...] = (
    "triton",
    "sdpa_flash",
    "reference",
    "unfused",
    "sdpa_efficient",
    "sdpa_cudnn",
    "sdpa_math",
    "flex",
    "torch_varlen",
    "aten_flash_varlen",
    "aten_cudnn_varlen",
    "sdpa_nested",
    "flash_attn_2",
    "flash_attn_3",
    "flash_attn_4",
    "te_module",
    "te_fused",
    "cudnn",
    "xformers",
    "fla",
)
PEERS: tuple[str, ...] = tuple(_PEERS)


@cache
def get(name: str) -> Backend:
    """The backend of this name, or of "module:function" (see ``peers.callable``). Imported on first use.

    Raises:
        InvalidProblem: no backend has this name, or no object is where it says.
    """
    if ":" in name:
        return import_module("gradtruth.backends.peers.callable").of(name)
    if name not in _PLACES:
        raise InvalidProblem(
            f"backend is {name!r}, expected 'auto' or one of {', '.join(map(repr, ORDER))}, or module:function"
        )
    return import_module(_PLACES[name]).create(name)
