"""Arguments: from what the caller wrote to a Spec and tensors in their one internal form, or a clear error.

Only metadata is read here (``contents`` holds the checks that read values), so this code can be traced by
torch.compile with dynamic shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gradtruth.core.layout import split_packed
from gradtruth.core.mask import Alignment, MaskType, band_of, parse_mask_type
from gradtruth.core.problem import DTYPES
from gradtruth.core.spec import Bias, Layout, Lengths, Packing, Softmax, Spec
from gradtruth.errors import InvalidProblem

__all__ = [
    "BIAS_TYPES",
    "SOFTMAX_TYPES",
    "Options",
    "TensorArguments",
    "check_tensor",
    "inputs_of",
    "max_seqlens",
    "spec_of",
]

BIAS_TYPES: dict[str, Bias] = {"pre_scale_bias": "pre_scale", "post_scale_bias": "post_scale"}
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
_FORMATS = ("bshd", "sbhd", "thd")
_DENSE_DIMS = {"bshd": "[B, S, H, D]", "sbhd": "[S, B, H, D]", "thd": "[tokens, H, D]"}
_FLOATS = tuple(DTYPES.values())


class Options(NamedTuple):
    """What the caller chose beside tensors; the meaning of each is in ``api.attention``."""

    qkv_format: str = "bshd"
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    softmax_scale: float | None = None
    softcap: float | None = None
    bias_type: str = "post_scale_bias"
    softmax_type: str = "vanilla"
    dropout_p: float = 0.0
    deterministic: bool = True
    batch_invariant: bool = False
    max_logit: bool = False
    lse_grad: bool = False
    allow_tf32: bool = False
    packing: Packing = "separate"


class TensorArguments(NamedTuple):
    """The tensors as the caller gave them. For packed input ``query`` (or ``key``) is the packed buffer."""

    query: Tensor
    key: Tensor | None = None
    value: Tensor | None = None
    attention_mask: Tensor | tuple[Tensor, Tensor] | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softmax_offset: Tensor | None = None
    dropout_seed: Tensor | int | None = None


@dataclass(frozen=True, slots=True)
class _Sizes:
    batch: int
    seqlen_q: int
    seqlen_kv: int
    heads: int


# ---------------------------------------------------------------- the Spec


def spec_of(options: Options, tensors: TensorArguments) -> str:
    """Check options and the tensors' metadata against each other and say what is to be computed.

    Returns:
        The canonical string of the Spec.

    Raises:
        InvalidProblem: a contradiction; names the argument, its value and what was expected.
    """
    if options.qkv_format not in _FORMATS:
        raise InvalidProblem(
            f"qkv_format is {options.qkv_format!r}, expected one of 'bshd', 'sbhd', 'thd'"
        )
    mask = parse_mask_type(options.attn_mask_type)
    sizes = _check_qkv(options, tensors)
    lengths = _check_lengths(options, mask, tensors, sizes)
    _check_max_seqlens(options, lengths, sizes)
    _check_mask(options, mask, tensors, sizes)
    _check_bias(options, tensors, sizes)
    _check_slopes(tensors, sizes)
    _check_sink(options, tensors, sizes)
    _check_seed(tensors)
    sizeless = options._replace(
        max_seqlen_q=None,
        max_seqlen_kv=None,
        window_size=_constants(options.window_size),
        softmax_scale=_constant(options.softmax_scale),
        softcap=_constant(options.softcap),
        dropout_p=_constant(options.dropout_p),
    )
    has = (tensors.bias is not None, tensors.alibi_slopes is not None)
    return _encoded_spec(tuple(sizeless), lengths, has)


def _constant(value: Any) -> Any:
    """The number itself: torch.compile with dynamic=True makes symbols of ints and floats."""
    if isinstance(value, float):
        return value.__float__()
    if isinstance(value, int) and not isinstance(value, bool):
        return value.__index__()
    return value


def _constants(window: Any) -> Any:
    if isinstance(window, tuple | list):
        return tuple(_constant(end) for end in window)
    return window


@torch.compiler.assume_constant_result
def _encoded_spec(chosen: tuple, lengths: Lengths, has: tuple[bool, bool]) -> str:
    """The Spec's string, from constants alone, so that torch.compile sees a constant."""
    options = Options(*chosen)
    mask = parse_mask_type(options.attn_mask_type)
    band = band_of(mask, _window(options.window_size))
    has_bias, has_slopes = has
    return Spec(
        layout=cast("Layout", options.qkv_format),
        packing=options.packing,
        lengths=lengths,
        left=band.left,
        right=band.right,
        alignment=_alignment(options, mask, needed=not band.open or has_slopes),
        arbitrary=mask.arbitrary,
        scale=None
        if options.softmax_scale is None
        else _number("softmax_scale", options.softmax_scale),
        softcap=_positive("softcap", options.softcap),
        bias=BIAS_TYPES[options.bias_type] if has_bias else "none",
        alibi=has_slopes,
        softmax=cast("Softmax", options.softmax_type),
        dropout_p=_probability(options.dropout_p),
        max_logit=_flag("max_logit", options.max_logit),
        lse_grad=options.lse_grad,
        deterministic=_flag("deterministic", options.deterministic),
        batch_invariant=_flag("batch_invariant", options.batch_invariant),
        allow_tf32=options.allow_tf32,
    ).encode()


def max_seqlens(options: Options, tensors: TensorArguments) -> tuple[int | None, int | None]:
    """The bounds on a sequence's lengths: as given, or for thd what bias and attention_mask can index."""
    bounds = [options.max_seqlen_q, options.max_seqlen_kv]
    if options.qkv_format == "thd":
        for dim in (0, 1):
            for name in ("attention_mask", "bias"):
                size = 1 if (given := getattr(tensors, name)) is None else given.shape[2 + dim]
                if size == 1:
                    continue
                if bounds[dim] is not None and bounds[dim] != size:
                    raise InvalidProblem(
                        f"{name} has shape {list(given.shape)}, expected {bounds[dim]} or 1 in dim {2 + dim}, as "
                        f"attention_mask has or max_seqlen_{'q' if dim == 0 else 'kv'} says"
                    )
                bounds[dim] = size
    return bounds[0], bounds[1]


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidProblem(f"{name} is {value!r}, expected True or False")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InvalidProblem(f"{name} is {value!r}, expected a finite number")
    return float(value)


def _positive(name: str, value: object) -> float | None:
    if value is None:
        return None
    number = _number(name, value)
    if number <= 0:
        raise InvalidProblem(f"{name} is {value!r}, expected a positive number or None")
    return number


def _probability(value: object) -> float:
    p = _number("dropout_p", value)
    if not 0.0 <= p <= 1.0:
        raise InvalidProblem(f"dropout_p is {value!r}, expected a number in [0, 1]")
    return p


def _window(window: object) -> tuple[int, int]:
    if window is None:
        return (-1, -1)
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise InvalidProblem(f"window_size is {window!r}, expected (left, right) or None")
    left, right = window
    for end in (left, right):
        if isinstance(end, bool) or not isinstance(end, int) or end < -1:
            raise InvalidProblem(
                f"window_size is {window!r}, expected two ints of at least -1 (-1 is unlimited)"
            )
    return left, right


def _alignment(options: Options, mask: MaskType, *, needed: bool) -> Alignment:
    asked = options.bottom_right_diagonal
    if asked is not None and not isinstance(asked, bool):
        raise InvalidProblem(f"bottom_right_diagonal is {asked!r}, expected True, False or None")
    if mask.alignment is not None:
        if asked is not None and asked != (mask.alignment == "bottom_right"):
            raise InvalidProblem(
                f"bottom_right_diagonal is {asked}, but attn_mask_type {options.attn_mask_type!r} is aligned "
                f"{mask.alignment.replace('_', '-')}; expected None or {not asked}"
            )
        return mask.alignment
    return "bottom_right" if needed and asked is not False else "top_left"


# ---------------------------------------------------------------- query, key, value


def _check_qkv(options: Options, tensors: TensorArguments) -> _Sizes:
    for name in ("query", "key", "value"):
        tensor = getattr(tensors, name)
        if tensor is None and options.packing != "separate":
            continue
        tensor = check_tensor(name, tensor)
        if tensor.dtype not in _FLOATS:
            raise InvalidProblem(
                f"{name} has dtype {tensor.dtype}, expected float16, bfloat16, float32 or float64"
            )
        if tensor.device != tensors.query.device:
            raise InvalidProblem(
                f"{name} is on {tensor.device}, expected query's device, {tensors.query.device}"
            )
        if tensor.dtype != tensors.query.dtype:
            raise InvalidProblem(
                f"{name} has dtype {tensor.dtype}, expected query's dtype, {tensors.query.dtype}"
            )
    q, k, v = split_packed(options.packing, tensors.query, tensors.key, tensors.value)
    form = options.qkv_format
    _check_shapes(form, q, k, v)
    heads = q.shape[-2]
    if form == "thd":
        return _Sizes(_thd_batch(tensors), q.shape[0], k.shape[0], heads)
    batch_dim, seq_dim = (0, 1) if form == "bshd" else (1, 0)
    if q.shape[batch_dim] != k.shape[batch_dim]:
        raise InvalidProblem(
            f"key has batch {k.shape[batch_dim]}, expected query's batch, {q.shape[batch_dim]}"
        )
    return _Sizes(q.shape[batch_dim], q.shape[seq_dim], k.shape[seq_dim], heads)


def _check_shapes(form: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    rank = 3 if form == "thd" else 4
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        if tensor.dim() != rank:
            raise InvalidProblem(
                f"{name} has shape {list(tensor.shape)}, expected {rank} dims, {_DENSE_DIMS[form]}, "
                f"for qkv_format {form!r}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise InvalidProblem(
            f"value has shape {list(v.shape)}, expected {list(k.shape[:-1])} + [Dv] as key has"
        )
    if q.shape[-1] != k.shape[-1]:
        raise InvalidProblem(
            f"key has head dim {k.shape[-1]}, expected query's head dim, {q.shape[-1]}"
        )
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise InvalidProblem(f"head dims are {q.shape[-1]} and {v.shape[-1]}, expected at least 1")
    heads, groups = q.shape[-2], k.shape[-2]
    if groups == 0 or heads == 0 or heads % groups:
        raise InvalidProblem(
            f"query has {heads} heads, expected a positive multiple of key's {groups} heads"
        )


def check_tensor(name: str, given: object) -> Tensor:
    """A strided tensor, or InvalidProblem."""
    if not isinstance(given, Tensor):
        raise InvalidProblem(f"{name} is {type(given).__name__}, expected a torch.Tensor")
    tensor = cast("Tensor", given)
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InvalidProblem(
            f"{name} has layout {tensor.layout}{' (nested)' if tensor.is_nested else ''}, expected a strided tensor; "
            "for sequences of different lengths use qkv_format 'thd' with cu_seqlens"
        )
    return tensor


def _thd_batch(tensors: TensorArguments) -> int:
    cu = tensors.cu_seqlens_q
    if not isinstance(cu, Tensor) or cu.dim() != 1 or cu.shape[0] < 1:
        return 0  # reported by _check_lengths
    return cu.shape[0] - 1


# ---------------------------------------------------------------- lengths


def _check_lengths(
    options: Options, mask: MaskType, tensors: TensorArguments, sizes: _Sizes
) -> Lengths:
    thd = options.qkv_format == "thd"
    name = options.attn_mask_type
    if thd and not mask.padding:
        raise InvalidProblem(
            f"attn_mask_type is {name!r} with qkv_format 'thd', expected a padding mask: {_with_padding(mask)!r}"
        )
    given = [side for side in ("q", "kv") if getattr(tensors, f"cu_seqlens_{side}") is not None]
    _check_padded(tensors, thd=thd)
    if not mask.padding:
        if given:
            raise InvalidProblem(
                f"cu_seqlens_{given[0]} is given with attn_mask_type {name!r}, which has no sequence lengths; "
                f"expected attn_mask_type {_with_padding(mask)!r}, or no cu_seqlens"
            )
        return "full"
    if not given:
        return _check_padding_masks(options, mask, tensors, sizes)
    if len(given) == 1:
        lacking = "kv" if given == ["q"] else "q"
        raise InvalidProblem(
            f"cu_seqlens_{lacking} is None, expected int32 [B + 1] beside cu_seqlens_{given[0]}"
        )
    if tensors.attention_mask is not None and not mask.arbitrary:
        raise InvalidProblem(
            f"attention_mask and cu_seqlens are both given with attn_mask_type {name!r}; expected one of them, "
            f"or attn_mask_type {'arbitrary,' + name!r} for a mask of pairs beside the lengths"
        )
    for side in ("q", "kv"):
        for suffix in ("", "_padded"):
            _check_cu_seqlens(
                f"cu_seqlens_{side}{suffix}",
                getattr(tensors, f"cu_seqlens_{side}{suffix}"),
                tensors,
                sizes,
            )
    return "cu_seqlens"


def _with_padding(mask: MaskType) -> str:
    name = "padding"
    if mask.causal:
        name += "_causal" + ("_bottom_right" if mask.alignment == "bottom_right" else "")
    return f"arbitrary,{name}" if mask.arbitrary else name


def _check_padded(tensors: TensorArguments, *, thd: bool) -> None:
    for side in ("q", "kv"):
        if getattr(tensors, f"cu_seqlens_{side}_padded") is None:
            continue
        if not thd:
            raise InvalidProblem(
                f"cu_seqlens_{side}_padded is given, expected it only with qkv_format 'thd'"
            )
        if getattr(tensors, f"cu_seqlens_{side}") is None:
            raise InvalidProblem(
                f"cu_seqlens_{side} is None, expected int32 [B + 1] beside cu_seqlens_{side}_padded"
            )


def _check_cu_seqlens(name: str, given: object, tensors: TensorArguments, sizes: _Sizes) -> None:
    if given is None and name.endswith("_padded"):
        return
    if not isinstance(given, Tensor):
        raise InvalidProblem(
            f"{name} is {type(given).__name__}, expected an int32 tensor [B + 1] of cumulated lengths on "
            f"{tensors.query.device}"
        )
    cu = cast("Tensor", given)
    if cu.dtype != torch.int32:
        raise InvalidProblem(f"{name} has dtype {cu.dtype}, expected torch.int32")
    if cu.dim() != 1 or cu.shape[0] != sizes.batch + 1:
        raise InvalidProblem(
            f"{name} has shape {list(cu.shape)}, expected [{sizes.batch + 1}] (batch + 1)"
        )
    if cu.device != tensors.query.device:
        raise InvalidProblem(
            f"{name} is on {cu.device}, expected query's device, {tensors.query.device}"
        )


def _check_padding_masks(
    options: Options, mask: MaskType, tensors: TensorArguments, sizes: _Sizes
) -> Lengths:
    name = options.attn_mask_type
    if options.qkv_format == "thd" or mask.arbitrary:
        raise InvalidProblem(
            f"cu_seqlens_q and cu_seqlens_kv are None with attn_mask_type {name!r} and qkv_format "
            f"{options.qkv_format!r}, expected int32 [B + 1] each"
        )
    given = tensors.attention_mask
    if given is None:
        raise InvalidProblem(
            f"attn_mask_type is {name!r} but there are no lengths; expected cu_seqlens_q and cu_seqlens_kv, or a "
            "boolean attention_mask [B, 1, 1, S] (True = padding), or a pair of them for query and key"
        )
    if isinstance(given, tuple | list):
        if len(given) != 2:
            raise InvalidProblem(
                f"attention_mask has {len(given)} parts, expected two: for query and for key"
            )
        sides = [
            ("attention_mask[0]", given[0], sizes.seqlen_q),
            ("attention_mask[1]", given[1], sizes.seqlen_kv),
        ]
    else:
        if sizes.seqlen_q != sizes.seqlen_kv:
            raise InvalidProblem(
                f"attention_mask is one tensor with {sizes.seqlen_q} queries and {sizes.seqlen_kv} keys, expected a "
                "pair: (mask of the query [B, 1, 1, S], mask of the key [B, 1, 1, T])"
            )
        sides = [("attention_mask", given, sizes.seqlen_q)]
    for label, part, length in sides:
        _check_bool(label, part, tensors)
        if tuple(part.shape) not in ((sizes.batch, 1, 1, length), (sizes.batch, length)):
            raise InvalidProblem(
                f"{label} has shape {list(part.shape)}, expected [{sizes.batch}, 1, 1, {length}] or "
                f"[{sizes.batch}, {length}] for attn_mask_type {name!r}"
            )
    return "padding_mask"


def _check_max_seqlens(options: Options, lengths: Lengths, sizes: _Sizes) -> None:
    for side, places in (("q", sizes.seqlen_q), ("kv", sizes.seqlen_kv)):
        name = f"max_seqlen_{side}"
        bound = getattr(options, name)
        if bound is None:
            continue
        if isinstance(bound, bool) or not isinstance(bound, int | torch.SymInt):
            raise InvalidProblem(f"{name} is {bound!r}, expected an int or None")
        if bound < 0:
            raise InvalidProblem(f"{name} is {bound}, expected a non-negative int or None")
        if lengths == "full" and bound < places:
            raise InvalidProblem(
                f"{name} is {bound}, expected at least the sequence length, {places}"
            )


# ---------------------------------------------------------------- masks, bias and the rest


def _check_bool(name: str, mask: object, tensors: TensorArguments) -> None:
    given = check_tensor(name, mask)
    if given.dtype != torch.bool:
        raise InvalidProblem(
            f"{name} has dtype {given.dtype}, expected torch.bool (True = masked out)"
        )
    _check_device(name, given, tensors)


def _check_device(name: str, tensor: Tensor, tensors: TensorArguments) -> None:
    if tensor.device != tensors.query.device:
        raise InvalidProblem(
            f"{name} is on {tensor.device}, expected query's device, {tensors.query.device}"
        )


def _check_mask(options: Options, mask: MaskType, tensors: TensorArguments, sizes: _Sizes) -> None:
    given = tensors.attention_mask
    if not mask.arbitrary:
        if given is not None and not mask.padding:
            raise InvalidProblem(
                f"attention_mask is given with attn_mask_type {options.attn_mask_type!r}, which does not read it; "
                "expected 'arbitrary' (or 'arbitrary,' before the name), or no attention_mask"
            )
        return
    if given is None:
        raise InvalidProblem(
            f"attention_mask is None, expected a bool tensor [1|B, 1|H, 1|S, 1|T] for attn_mask_type "
            f"{options.attn_mask_type!r}"
        )
    _check_bool("attention_mask", given, tensors)
    _check_pairs("attention_mask", cast("Tensor", given), options, sizes)


def _check_pairs(name: str, tensor: Tensor, options: Options, sizes: _Sizes) -> None:
    """The shape of a tensor over pairs (i, j): each dim full or 1."""
    thd = options.qkv_format == "thd"
    if tensor.dim() != 4:
        raise InvalidProblem(
            f"{name} has shape {list(tensor.shape)}, expected four dims [1|B, 1|H, 1|S, 1|T]"
        )
    full: tuple[int | None, ...] = (sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_kv)
    if thd:
        # Without max_seqlen the tensor's own size bounds the sequences.
        full = (sizes.batch, sizes.heads, options.max_seqlen_q, options.max_seqlen_kv)
    for have, want in zip(tensor.shape, full, strict=True):
        if have != 1 and want is not None and have != want:
            shown = ", ".join("1|max_seqlen" if n is None else f"1|{n}" for n in full)
            raise InvalidProblem(f"{name} has shape {list(tensor.shape)}, expected [{shown}]")


def _check_bias(options: Options, tensors: TensorArguments, sizes: _Sizes) -> None:
    if options.bias_type not in BIAS_TYPES:
        known = ", ".join(map(repr, BIAS_TYPES))
        raise InvalidProblem(f"bias_type is {options.bias_type!r}, expected one of {known}")
    bias = tensors.bias
    if bias is None:
        return
    check_tensor("bias", bias)
    if bias.dtype not in (tensors.query.dtype, torch.float32):
        raise InvalidProblem(
            f"bias has dtype {bias.dtype}, expected query's dtype, {tensors.query.dtype}, or torch.float32"
        )
    _check_device("bias", bias, tensors)
    _check_pairs("bias", bias, options, sizes)


def _check_slopes(tensors: TensorArguments, sizes: _Sizes) -> None:
    slopes = tensors.alibi_slopes
    if slopes is None:
        return
    check_tensor("alibi_slopes", slopes)
    if slopes.dtype != torch.float32:
        raise InvalidProblem(f"alibi_slopes has dtype {slopes.dtype}, expected torch.float32")
    _check_device("alibi_slopes", slopes, tensors)
    if tuple(slopes.shape) not in ((sizes.heads,), (sizes.batch, sizes.heads)):
        raise InvalidProblem(
            f"alibi_slopes has shape {list(slopes.shape)}, expected [{sizes.heads}] or [{sizes.batch}, {sizes.heads}]"
        )


def _check_sink(options: Options, tensors: TensorArguments, sizes: _Sizes) -> None:
    kind, offset = options.softmax_type, tensors.softmax_offset
    if kind not in SOFTMAX_TYPES:
        raise InvalidProblem(
            f"softmax_type is {kind!r}, expected one of {', '.join(map(repr, SOFTMAX_TYPES))}"
        )
    if kind != "learnable":
        if offset is not None:
            raise InvalidProblem(
                f"softmax_offset is given with softmax_type {kind!r}, expected it only with 'learnable'"
            )
        return
    if offset is None:
        raise InvalidProblem(
            f"softmax_offset is None, expected float32 [{sizes.heads}] for softmax_type 'learnable'"
        )
    check_tensor("softmax_offset", offset)
    if tuple(offset.shape) != (sizes.heads,):
        raise InvalidProblem(
            f"softmax_offset has shape {list(offset.shape)}, expected [{sizes.heads}]"
        )
    if offset.dtype not in _FLOATS:
        raise InvalidProblem(f"softmax_offset has dtype {offset.dtype}, expected torch.float32")
    _check_device("softmax_offset", offset, tensors)


def _check_seed(tensors: TensorArguments) -> None:
    seed = tensors.dropout_seed
    if seed is None or (
        isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 2**63
    ):
        return
    if not isinstance(seed, Tensor):
        raise InvalidProblem(
            f"dropout_seed is {seed!r}, expected a 64-bit int or an int64 scalar tensor"
        )
    seed = cast("Tensor", seed)
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise InvalidProblem(
            f"dropout_seed is {seed.dtype} {list(seed.shape)}, expected one torch.int64 element"
        )
    _check_device("dropout_seed", seed, tensors)


# ---------------------------------------------------------------- the tensors in their internal form


def inputs_of(options: Options, tensors: TensorArguments) -> tuple[Tensor | None, ...]:
    """The tensors in the order of ``Inputs``'s fields, k and v None where packed.

    Padding masks become bool [B, S]; the sink and the seed get their dtype; with dropout and no seed given,
    one is drawn from PyTorch's generator of the device.
    """
    q, mask = tensors.query, tensors.attention_mask
    mask_q = mask_kv = pairs = None
    if mask is not None:
        if parse_mask_type(options.attn_mask_type).arbitrary:
            pairs = cast("Tensor", mask)
        else:
            mask_q, mask_kv = mask if isinstance(mask, tuple | list) else (mask, mask)
            mask_q, mask_kv = _rows(mask_q), _rows(mask_kv)
    offset = tensors.softmax_offset
    if offset is not None:
        offset = offset.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    return (
        q,
        tensors.key,
        tensors.value,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_kv,
        tensors.cu_seqlens_q_padded,
        tensors.cu_seqlens_kv_padded,
        mask_q,
        mask_kv,
        None,
        pairs,
        tensors.bias,
        tensors.alibi_slopes,
        offset,
        _seed(options, tensors),
    )


def _rows(mask: Tensor) -> Tensor:
    return mask if mask.dim() == 2 else mask[:, 0, 0, :]


def _seed(options: Options, tensors: TensorArguments) -> Tensor | None:
    if options.dropout_p == 0.0:
        return None
    seed, device = tensors.dropout_seed, tensors.query.device
    if seed is None:
        # Outside the operator, so that manual_seed, RNG trackers, checkpointing and CUDA graphs work.
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, int):
        return torch.full((), seed, dtype=torch.int64, device=device)
    return seed.reshape(())
