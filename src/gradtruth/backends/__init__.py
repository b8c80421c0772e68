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
)
PEERS: tuple[str, ...] = tuple(_PEERS)


@cache
def get(name: str) -> Backend:
    """The backend of this name. Its module is imported on first use.

    Raises:
        InvalidProblem: no backend has this name.
    """
    if name not in _PLACES:
        raise InvalidProblem(
            f"backend is {name!r}, expected 'auto' or one of {', '.join(map(repr, ORDER))}"
        )
    return import_module(_PLACES[name]).create(name)
