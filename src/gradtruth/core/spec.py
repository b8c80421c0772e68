"""Spec: the size-free part of an attention problem, as one canonical string."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal, get_args

from gradtruth.core.mask import BAND_LIMIT, Alignment, Band
from gradtruth.core.strict import json_object, shown
from gradtruth.errors import InvalidProblem

__all__ = ["Bias", "Layout", "Lengths", "Packing", "Softmax", "Spec"]

Layout = Literal["bshd", "sbhd", "thd"]
Packing = Literal["separate", "3hd", "h3d", "2hd", "h2d"]
Lengths = Literal["full", "cu_seqlens", "padding_mask", "extents"]
Bias = Literal["none", "pre_scale", "post_scale"]
Softmax = Literal["vanilla", "off-by-one", "learnable"]

_CHOICES = {
    "layout": get_args(Layout),
    "packing": get_args(Packing),
    "lengths": get_args(Lengths),
    "alignment": get_args(Alignment),
    "bias": get_args(Bias),
    "softmax": get_args(Softmax),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Everything that decides what is computed and has no size. Frozen, hashable, without tensors.

    Its string form (``encode``) is an argument of the operators, so one compiled graph serves every
    length. It does not know whether gradients are wanted: forward bits never depend on that.

    Attributes:
        layout: bshd [B, S, H, D], sbhd [S, B, H, D] or thd [tokens, H, D].
        packing: how q, k, v share one buffer: "3hd" is [..., 3, H, D], "h3d" is [..., H, 3, D], "2hd" and
            "h2d" the same for k and v; "separate" is none.
        lengths: where sequences come from: "full" tensors, "cu_seqlens", a boolean "padding_mask", or
            "extents" (a tile; see ``core.extents``).
        left, right: the band, causal included, under ``mask.BAND_LIMIT``; None is unlimited.
        alignment: the diagonal starts at 0 (top_left) or at lk - lq (bottom_right), by actual lengths.
        arbitrary: an attention_mask tensor hides more.
        scale: multiplies the scores; None is 1 / sqrt(D).
        softcap: bound of the scores (Gemma 2), None is none.
        bias: where a bias tensor enters.
        alibi: slopes are given.
        softmax: what the denominator has besides the visible keys.
        dropout_p: probability that a weight is dropped.
        max_logit: the largest score per head is returned too.
        lse_grad: lse may receive a gradient.
        deterministic: two runs must give the same bits.
        batch_invariant: a sequence's bits must not depend on the batch.
        allow_tf32: fp32 products may use plain TF32.
    """

    layout: Layout = "bshd"
    packing: Packing = "separate"
    lengths: Lengths = "full"
    left: int | None = None
    right: int | None = None
    alignment: Alignment = "top_left"
    arbitrary: bool = False
    scale: float | None = None
    softcap: float | None = None
    bias: Bias = "none"
    alibi: bool = False
    softmax: Softmax = "vanilla"
    dropout_p: float = 0.0
    max_logit: bool = False
    lse_grad: bool = False
    deterministic: bool = True
    batch_invariant: bool = False
    allow_tf32: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise InvalidProblem(
                    f"{name} is {shown(value)}, expected one of {', '.join(map(repr, allowed))}"
                )
        if self.layout == "thd" and self.lengths not in ("cu_seqlens", "extents"):
            raise InvalidProblem(
                f"lengths is {self.lengths!r}, expected 'cu_seqlens' for layout 'thd'"
            )
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value < BAND_LIMIT):
                raise InvalidProblem(
                    f"{name} is {shown(value)}, expected an int in [0, {BAND_LIMIT}) or None"
                )
        for name in _FLAGS:
            value = getattr(self, name)
            if type(value) is not bool:
                raise InvalidProblem(f"{name} is {shown(value)}, expected a bool")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name in ("scale", "softcap", "dropout_p"):
            value = getattr(self, name)
            if value is None and name != "dropout_p":
                continue
            if not isinstance(value, float) or not math.isfinite(value):
                raise InvalidProblem(f"{name} is {shown(value)}, expected a finite float")
            # Equal Specs have one string: neither -0.0 nor a subclass of float stays.
            object.__setattr__(self, name, float(value) + 0.0)
        if self.softcap is not None and self.softcap <= 0:
            raise InvalidProblem(f"softcap is {self.softcap!r}, expected a positive float or None")
        if not 0.0 <= self.dropout_p <= 1.0:
            raise InvalidProblem(f"dropout_p is {self.dropout_p!r}, expected a float in [0, 1]")

    @property
    def band(self) -> Band:
        """The band of the mask."""
        return Band(self.left, self.right)

    @property
    def ragged(self) -> bool:
        """True when sequences may be shorter than the tensors."""
        return self.lengths != "full"

    @property
    def sink(self) -> bool:
        """True when the softmax has a denominator term besides the keys."""
        return self.softmax != "vanilla"

    def encode(self) -> str:
        """The canonical string: JSON with sorted keys, defaults left out."""
        return _encode(self)

    @staticmethod
    def decode(text: str) -> Spec:
        """The Spec of a canonical string; the same object for the same string.

        Raises:
            InvalidProblem: not a JSON object of known fields with legal values.
        """
        if not isinstance(text, str):
            raise InvalidProblem(f"spec is {shown(text)}, expected a string with a JSON object")
        return _decode(text)

    @staticmethod
    def from_fields(found: object) -> Spec:
        """The Spec of a decoded JSON object.

        Raises:
            InvalidProblem: not a dict of known fields with legal values.
        """
        if not isinstance(found, dict):
            raise InvalidProblem(f"spec is {shown(found)}, expected a JSON object")
        unknown = sorted(set(found) - set(_DEFAULTS))
        if unknown:
            raise InvalidProblem(
                f"spec has unknown fields {shown(unknown)}, expected some of {sorted(_DEFAULTS)}"
            )
        return Spec(**found)

    def mask_label(self) -> str:
        """A short name of the mask: "causal", "window(128,0)", "padding causal br"."""
        parts = []
        if self.arbitrary:
            parts.append("arbitrary")
        if self.ragged and self.layout != "thd":
            parts.append("padding")
        if self.left is not None or self.right not in (None, 0):
            parts.append(f"window({_bound(self.left)},{_bound(self.right)})")
        elif self.right == 0:
            parts.append("causal")
        if not self.band.open and self.alignment == "bottom_right":
            parts.append("br")
        return " ".join(parts) or "full"


def _bound(value: int | None) -> str:
    return "-1" if value is None else str(value)


@lru_cache(maxsize=4096)
def _encode(spec: Spec) -> str:
    given = {f.name: getattr(spec, f.name) for f in fields(spec)}
    kept = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), allow_nan=False)


@lru_cache(maxsize=4096)
def _decode(text: str) -> Spec:
    return Spec.from_fields(json_object("spec", text))


_DEFAULTS = {f.name: f.default for f in fields(Spec)}
_FLAGS = tuple(f.name for f in fields(Spec) if f.type == "bool")
