"""What a backend can do and what it promises: reasons and claims, as data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

import torch

__all__ = ["DEFAULT_CLAIMS", "Claims", "Reason", "ReasonCode", "Support", "anywhere"]


class ReasonCode(StrEnum):
    """What a refusal is about."""

    DTYPE = "dtype"
    HEAD_DIM = "head_dim"
    HEADS = "heads"
    LAYOUT = "layout"
    LENGTHS = "lengths"
    MASK = "mask"
    WINDOW = "window"
    BIAS = "bias"
    ALIBI = "alibi"
    SOFTCAP = "softcap"
    SOFTMAX = "softmax"
    DROPOUT = "dropout"
    MAX_LOGIT = "max_logit"
    LSE_GRAD = "lse_grad"
    SIZE = "size"
    DEVICE = "device"
    GUARANTEE = "guarantee"
    NOT_INSTALLED = "not_installed"
    VERSION = "version"


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason for a refusal. ``text`` states the value and the limit."""

    code: ReasonCode
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Support:
    """The answer of a backend: every reason against, none means yes."""

    reasons: tuple[Reason, ...] = ()

    @property
    def ok(self) -> bool:
        """True when nothing speaks against."""
        return not self.reasons


def anywhere(device: torch.device) -> Support:
    """The answer of a backend that runs wherever tensors have values."""
    if device.type != "meta":
        return Support()
    return Support((Reason(ReasonCode.DEVICE, "device is meta, whose tensors have no values"),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a backend promises for a problem that it supports. Each promise has a check in ``verify``.

    Attributes:
        pure: the result depends on the arguments alone.
        shielded: content of padding, gaps, tails and foreign sequences never reaches a valid place.
        exact_zeros: rows and places that carry nothing are zero bit for bit, their lse -inf.
        deterministic: two runs give the same bits.
        batch_invariant: a sequence's bits do not depend on the rest of the batch.
        global_dropout: the keep mask is the stateless one of ``core.dropout``.
        foreign_lse: the backward accepts out and lse that were made elsewhere.
        no_sync: the host never waits for the device.
        graph_capturable: the call can be captured in a CUDA graph.
    """

    pure: bool = False
    shielded: bool = False
    exact_zeros: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    global_dropout: bool = False
    foreign_lse: bool = False
    no_sync: bool = False
    graph_capturable: bool = False

    def missing(self, wanted: Claims) -> tuple[str, ...]:
        """Names of the promises in ``wanted`` that these claims do not make."""
        return tuple(
            f.name for f in fields(self) if getattr(wanted, f.name) and not getattr(self, f.name)
        )


DEFAULT_CLAIMS = Claims(
    pure=True,
    shielded=True,
    exact_zeros=True,
    deterministic=True,
    global_dropout=True,
    foreign_lse=True,
    no_sync=True,
    graph_capturable=True,
)
