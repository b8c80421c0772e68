"""xformers: memory_efficient_attention, with a bias tensor or one of its mask objects.

The objects are told by the names of their classes, so xformers is not imported. A window of w in them lets a query
see w keys, itself among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from gradtruth.arguments import Options, TensorArguments
from gradtruth.verify.interception.call import Translation, meaning_of
from gradtruth.verify.interception.entry import Entry, autocast, bound, loaded, only, rerun

__all__ = ["XFORMERS"]

_NAMES = ("query", "key", "value")
_READ = (*_NAMES, "attn_bias", "p", "scale", "op")


class _Kind(NamedTuple):
    """What a class of masks means: sequences of its own, and the corner of its diagonal ("" for no band)."""

    thd: bool
    corner: str


_KINDS = {
    "LowerTriangularMask": _Kind(thd=False, corner="top_left"),
    "LowerTriangularMaskWithTensorBias": _Kind(thd=False, corner="top_left"),
    "LowerTriangularFromBottomRightMask": _Kind(thd=False, corner="bottom_right"),
    "LowerTriangularFromBottomRightLocalAttentionMask": _Kind(thd=False, corner="bottom_right"),
    "BlockDiagonalMask": _Kind(thd=True, corner=""),
    "BlockDiagonalCausalMask": _Kind(thd=True, corner="top_left"),
    "BlockDiagonalCausalFromBottomRightMask": _Kind(thd=True, corner="bottom_right"),
    "BlockDiagonalCausalLocalAttentionMask": _Kind(thd=True, corner="top_left"),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _Kind(thd=True, corner="bottom_right"),
}


def _translate(original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Translation:
    arguments = bound(original, args, kwargs)
    given = arguments.arguments
    only(given, _READ, {})
    mask: Any = given["attn_bias"]
    plain = type(mask) is Tensor or mask is None
    kind = _Kind(thd=False, corner="") if plain else _KINDS.get(type(mask).__name__)
    if kind is None:
        raise NotImplementedError(f"attn_bias is a {type(mask).__name__}, which is not understood")
    q, k, v = autocast(*(given[name] for name in _NAMES))
    bias = mask if isinstance(mask, Tensor) and plain else getattr(mask, "_bias", None)
    form = _Form(q.dim(), kind.thd)
    lengths = {}
    if kind.thd:
        lengths = {f"cu_seqlens_{side}": _starts(mask, side, q) for side in ("q", "kv")}
    tensors = TensorArguments(*(form.view(x) for x in (q, k, v)), bias=form.bias(bias), **lengths)
    operands: dict[str, Tensor] = dict(zip(_NAMES, (q, k, v), strict=True))
    if bias is not None and plain:
        operands["attn_bias"] = bias

    def gradients(found: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        named = {
            f"d{n[0]}": form.view(x) for n, x in found.items() if x is not None and n in _NAMES
        }
        dbias = form.bias(found.get("attn_bias"))
        return named if dbias is None else named | {"dbias": dbias}

    return Translation(
        meaning=meaning_of(tensors, _options(given, kind, mask)),
        operands=operands,
        run=rerun(original, arguments),
        gradients=gradients,
        outputs=lambda result: (result, None),
        out=form.view,
    )


class _Form(NamedTuple):
    """How tensors of a call become [B, S, H, D] or [tokens, H, D], as views."""

    dims: int
    thd: bool

    def view(self, x: Tensor) -> Tensor:
        """q, k, v, out or a gradient: [B, S, H, D], or [B, S, D] with one head."""
        if self.dims not in (3, 4):
            raise NotImplementedError(f"query has {self.dims} dims, 3 and 4 are seen")
        four = x.unsqueeze(2) if self.dims == 3 else x
        if not self.thd:
            return four
        if four.shape[0] != 1:
            raise NotImplementedError(f"query has {four.shape[0]} batch entries for one mask")
        return four[0]

    def bias(self, x: Tensor | None) -> Tensor | None:
        """[B, H, S, T]; of a call without heads [B, S, T]."""
        if x is None or x.dim() == 4:
            return x
        if x.dim() != 3 or self.dims != 3:
            raise NotImplementedError(f"attn_bias has {x.dim()} dims for a query of {self.dims}")
        return x.unsqueeze(1)


def _starts(mask: Any, side: str, q: Tensor) -> Tensor:
    """Cumulated lengths on q's device."""
    info = mask.q_seqinfo if side == "q" else mask.k_seqinfo
    found = getattr(info, "seqstart", None)
    if not isinstance(found, Tensor):
        raise NotImplementedError("attn_bias has no seqstart, the cumulated lengths")
    return found.to(q.device)


def _options(given: dict[str, Any], kind: _Kind, mask: Any) -> Options:
    lengths = "padding" if kind.thd else ""
    causal = {"": "", "top_left": "causal", "bottom_right": "causal_bottom_right"}[kind.corner]
    window = getattr(mask, "_window_size", None) if kind.corner else None
    return Options(
        qkv_format="thd" if kind.thd else "bshd",
        attn_mask_type="_".join(part for part in (lengths, causal) if part) or "no_mask",
        window_size=(int(window) - 1, -1) if window else None,
        softmax_scale=given["scale"],
        dropout_p=float(given["p"]),
        deterministic=False,
    )


XFORMERS = Entry(
    "xformers.ops.memory_efficient_attention",
    lambda: loaded("xformers.ops.fmha", "memory_efficient_attention"),
    _translate,
)
