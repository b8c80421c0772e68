"""The arguments of TransformerEngine's fused_attn_fwd and fused_attn_bwd in gradtruth's terms, or a clear error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtruth.api import AttentionOptions
from gradtruth.calls import Backends
from gradtruth.core.layout import PACKED_DIM, pack_gradients, sequence_dim
from gradtruth.core.mask import MaskType, parse_mask_type
from gradtruth.core.spec import Layout, Packing
from gradtruth.errors import InvalidProblem, UnsupportedProblem
from gradtruth.module import alibi_slopes_of

__all__ = [
    "BACKWARD_NAMES",
    "FORWARD_NAMES",
    "Follows",
    "alignment_of",
    "arrangement",
    "backend_of",
    "bias_of",
    "check_dtype",
    "check_format",
    "check_packable",
    "lengths_of",
    "named",
    "packed",
    "read_aux",
    "refuse",
    "seed_of",
    "sink_of",
    "without_unit",
]

_DTYPES = {"kFloat16": torch.float16, "kBFloat16": torch.bfloat16, "kFloat32": torch.float32}

# ---------------------------------------------------------------- layouts


class _Arrangement(NamedTuple):
    """What a qkv_layout says: the format of each tensor, and which of them share a buffer."""

    form: Layout
    packing: Packing


def _arrangements() -> dict[str, _Arrangement]:
    found = {}
    forms: tuple[tuple[Layout, str], ...] = (("sbhd", "sb"), ("bshd", "bs"), ("thd", "t"))
    for form, lead in forms:
        found[f"{lead}3hd"] = _Arrangement(form, "3hd")
        found[f"{lead}h3d"] = _Arrangement(form, "h3d")
        found[f"{form}_{lead}2hd"] = _Arrangement(form, "2hd")
        found[f"{form}_{lead}h2d"] = _Arrangement(form, "h2d")
        found[f"{form}_{form}_{form}"] = _Arrangement(form, "separate")
    return found


_ARRANGEMENTS = _arrangements()
_MIXED_LAYOUTS = (
    "sbhd_bshd_bshd",
    "bshd_sbhd_sbhd",
    "thd_bshd_bshd",
    "thd_sbhd_sbhd",
    "bhsd_bhsd_bhsd",
)


class Follows(str):
    """A default that TransformerEngine writes as this text. Left alone, it is what ``qkv_layout`` says."""

    __slots__ = ()


def arrangement(name: str, layout: object) -> _Arrangement:
    """What this layout name says; ``name`` is the argument that holds it."""
    found = _ARRANGEMENTS.get(layout) if isinstance(layout, str) else None
    if found is not None:
        return found
    known = ", ".join(map(repr, _ARRANGEMENTS))
    if isinstance(layout, str) and (layout in _MIXED_LAYOUTS or layout.startswith("paged_kv_")):
        raise UnsupportedProblem(
            f"{name} is {layout!r}: layouts of a KV cache and of FP8 (query and key in different formats, pages, "
            f"bhsd) are not available; expected one of {known}"
        )
    raise InvalidProblem(f"{name} is {layout!r}, expected one of {known}")


def check_format(name: str, given: str, qkv_layout: str, form: Layout) -> None:
    """A tensor's format must be that of ``qkv_layout``; a default that was left alone is."""
    if not isinstance(given, Follows) and given != form:
        raise UnsupportedProblem(
            f"{name} is {given!r} with qkv_layout {qkv_layout!r}, expected its format, {form!r}"
        )


# ---------------------------------------------------------------- arguments


FORWARD_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "bias": "attn_bias",
    "bias_type": "attn_bias_type",
    "softmax_scale": "attn_scale",
    "dropout_p": "dropout",
    "backend": "fused_attention_backend",
}
BACKWARD_NAMES = {
    **FORWARD_NAMES,
    "out": "o",
    "dout": "d_o",
    "lse": "aux_ctx_tensors[0] (lse)",
    "dropout_seed": "aux_ctx_tensors[1] (rng_state)",
    "bias": "aux_ctx_tensors[2] (bias)",
    "softmax_offset": "aux_ctx_tensors[-1] (softmax_offset)",
}


@contextmanager
def named(names: dict[str, str]) -> Iterator[None]:
    """Errors name an argument first, as gradtruth spells it; here it has another name."""
    try:
        yield
    except InvalidProblem as error:
        first, space, rest = str(error).partition(" ")
        if first not in names:
            raise
        raise InvalidProblem(f"{names[first]}{space}{rest}") from error


def refuse(**arguments: Any) -> None:
    """Raise for the first of these that is not None."""
    for name, value in arguments.items():
        if value is not None:
            shown = type(value).__name__ if isinstance(value, Tensor) else repr(value)
            raise UnsupportedProblem(
                f"{name} is {shown}, expected None: neither FP8 nor paged KV caches are available"
            )


def check_dtype(name: str, given: Any, q: Any) -> None:
    """The dtype that a call states, by whichever name, against q's."""
    if not isinstance(q, Tensor):
        raise InvalidProblem(f"q is {type(q).__name__}, expected a torch.Tensor")
    stated = given if isinstance(given, torch.dtype) else _DTYPES.get(getattr(given, "name", ""))
    if stated != q.dtype:
        raise InvalidProblem(f"{name} is {given!r}, expected q's dtype, {q.dtype}")


def backend_of(given: Any) -> Backends:
    """The backend that is meant: by gradtruth's name, or auto for a kernel of TransformerEngine's."""
    name = given if isinstance(given, str) else getattr(given, "name", None)
    if isinstance(name, str):
        kernel = name.removeprefix("NVTE_")
        if kernel in ("FP8", "No_Backend"):
            raise UnsupportedProblem(
                f"fused_attention_backend is {given!r}, expected F16_arbitrary_seqlen or a backend of gradtruth"
            )
        return name if isinstance(given, str) and not kernel.startswith("F16_") else "auto"
    if given is None or type(given) is int:
        return "auto"
    if isinstance(given, tuple):
        return given  # type: ignore[return-value] - api checks it
    raise InvalidProblem(
        f"fused_attention_backend is {type(given).__name__}, expected a backend's name, a pair of names, None, or "
        "a member of NVTE_Fused_Attn_Backend"
    )


def _mask(name: str) -> MaskType:
    mask = parse_mask_type(name)
    if mask.arbitrary:
        raise InvalidProblem(
            f"attn_mask_type is {name!r}, expected a mask that takes no tensor; pass attn_bias (-inf hides) instead"
        )
    return mask


def lengths_of(
    form: Layout,
    mask_type: str,
    tensors: tuple[Tensor, Tensor],
    cu_seqlens: tuple[Tensor | None, Tensor | None],
) -> AttentionOptions:
    """The format, the mask, and the lengths where this mask reads them. TransformerEngine passes them always."""
    found: AttentionOptions = {"qkv_format": form, "attn_mask_type": mask_type}
    if _mask(mask_type).padding or form == "thd":
        return {**found, "cu_seqlens_q": cu_seqlens[0], "cu_seqlens_kv": cu_seqlens[1]}
    for name, tensor, cu in zip(("q", "kv"), tensors, cu_seqlens, strict=True):
        if not isinstance(cu, Tensor) or cu.device.type != "cpu" or not isinstance(tensor, Tensor):
            continue  # on a GPU reading lengths would wait for it
        places = tensor.shape[sequence_dim(form)]
        if bool((cu.diff() != places).any()):
            raise InvalidProblem(
                f"cu_seqlens_{name} is {cu.tolist()[:12]} with attn_mask_type {mask_type!r}, which attends whole "
                f"sequences of {places}; expected a padding mask, or lengths of {places}"
            )
    return found


def alignment_of(
    mask_type: str, window: tuple[int, int], bottom_right: bool | None
) -> AttentionOptions:
    """The window and its diagonal, which here is top-left unless the mask's name or the caller says otherwise."""
    if bottom_right is None and _mask(mask_type).alignment is None:
        bottom_right = False
    return {"window_size": window, "bottom_right_diagonal": bottom_right}


def bias_of(name: str, kind: str, bias: Tensor | None, q: Tensor) -> AttentionOptions:
    """The bias or the slopes; ``name`` is the argument that holds the bias."""
    kinds = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
    if kind not in kinds:
        raise InvalidProblem(
            f"attn_bias_type is {kind!r}, expected one of {', '.join(map(repr, kinds))}"
        )
    if (bias is None) != (kind in ("no_bias", "alibi")):
        raise InvalidProblem(
            f"{name} has {'no' if bias is None else 'a'} bias with attn_bias_type {kind!r}, expected one with "
            "'pre_scale_bias' and 'post_scale_bias' only"
        )
    if kind == "alibi":
        return {"alibi_slopes": alibi_slopes_of(q.shape[-2], q.device)}
    return {} if bias is None else {"bias": bias, "bias_type": kind}


def sink_of(name: str, kind: str, offset: Tensor | None) -> Tensor | None:
    """The sink's logit [H] where it is one. TransformerEngine passes zeros with "off-by-one"."""
    if not isinstance(offset, Tensor):
        if kind == "learnable":
            raise InvalidProblem(
                f"{name} has no softmax_offset with softmax_type 'learnable', expected fp32 [1, H, 1, 1]"
            )
        return offset
    if kind == "off-by-one":
        if offset.device.type == "cpu" and bool(offset.any()):
            raise InvalidProblem(
                f"{name} has a softmax_offset that is not 0 with softmax_type {kind!r}, expected 'learnable'"
            )
        return None
    plain = offset.dim() == 4 and offset.shape[0] == offset.shape[2] == offset.shape[3] == 1
    return offset.reshape(-1) if plain else offset


# ---------------------------------------------------------------- what the backward is given and returns


class _Aux(NamedTuple):
    """The tensors that a forward leaves for its backward."""

    lse: Tensor
    rng_state: Any
    bias: Tensor | None
    softmax_offset: Tensor | None


def read_aux(given: object, bias_type: str, softmax_type: str) -> _Aux:
    """aux_ctx_tensors taken apart."""
    names = ["lse", "rng_state"]
    if bias_type in ("pre_scale_bias", "post_scale_bias"):
        names.append("bias")
    fewest = len(names) + (softmax_type == "learnable")
    if softmax_type != "vanilla":
        names.append("softmax_offset")
    if not isinstance(given, list | tuple):
        raise InvalidProblem(
            f"aux_ctx_tensors is {type(given).__name__}, expected a list [{', '.join(names)}], after fake_dtype or, "
            "in the older argument order, after fake_dtype and dqkv_dtype"
        )
    if not fewest <= len(given) <= len(names):
        raise InvalidProblem(
            f"aux_ctx_tensors has {len(given)} tensors, expected {len(names)}: {', '.join(names)}"
        )
    found = dict(zip(names, given, strict=False))
    return _Aux(found["lse"], found["rng_state"], found.get("bias"), found.get("softmax_offset"))


def without_unit(lse: Any, form: Layout) -> Any:
    """Lse without TransformerEngine's last dim of 1; what has another shape is named later."""
    rank = 2 if form == "thd" else 3
    unit = isinstance(lse, Tensor) and lse.dim() == rank + 1 and lse.shape[-1] == 1
    return lse.squeeze(-1) if unit else lse


def seed_of(rng_state: Any) -> Tensor:
    """The dropout seed that ``fused_attn_fwd`` left."""
    if not isinstance(rng_state, Tensor) or rng_state.dtype != torch.int64 or not rng_state.numel():
        found = (
            f"{rng_state.dtype} {list(rng_state.shape)}"
            if isinstance(rng_state, Tensor)
            else type(rng_state).__name__
        )
        raise InvalidProblem(
            f"aux_ctx_tensors[1] (rng_state) is {found} with dropout > 0, expected int64 [2] from fused_attn_fwd"
        )
    return rng_state.reshape(-1)[0]


def check_packable(packing: Packing, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Gradients that share a buffer have one shape."""
    if packing == "separate" or not all(isinstance(t, Tensor) for t in (q, k, v)):
        return
    parts = {"k": k, "v": v} if packing in ("2hd", "h2d") else {"q": q, "k": k, "v": v}
    if len({tensor.shape for tensor in parts.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in parts.items())
        raise InvalidProblem(
            f"dqkv_layout (by default qkv_layout) packs tensors of different shapes: {shapes}; expected equal shapes, "
            "or a layout with separate tensors"
        )


def packed(
    packing: Packing, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients as views of the buffers that the layout names."""
    parts = (dq, dk, dv) if packing in ("3hd", "h3d") else (dk, dv)
    if packing == "separate":
        return dq, dk, dv
    views = pack_gradients(packing, parts).unbind(PACKED_DIM[packing])  # type: ignore[arg-type]
    return views if len(parts) == 3 else (dq, *views)
