"""Problem: a Spec with its sizes. Everything that changes the result or the choice of a kernel, no tensor."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gradtruth.core.spec import Layout, Spec
from gradtruth.core.strict import json_object, shown
from gradtruth.core.tensors import Inputs
from gradtruth.errors import InvalidProblem

__all__ = ["DTYPES", "Problem", "StrideClass"]

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True, slots=True)
class StrideClass:
    """What a kernel must know about a tensor's strides.

    Attributes:
        unit: the last dim has stride 1 (or size 1).
        aligned: storage start and every other stride are multiples of 16 bytes.
        expanded: some dim longer than 1 has stride 0.
    """

    unit: bool = True
    aligned: bool = True
    expanded: bool = False

    @staticmethod
    def of(tensor: Tensor) -> StrideClass:
        """The class of a tensor, from metadata (and the address for alignment)."""
        sizes, strides = tensor.shape, tensor.stride()
        if not sizes:
            return StrideClass()
        item = tensor.element_size()
        aligned = tensor.data_ptr() % 16 == 0
        expanded = sizes[-1] > 1 and strides[-1] == 0
        for size, stride in zip(sizes[:-1], strides[:-1], strict=True):
            if size > 1:
                aligned = aligned and stride * item % 16 == 0
                expanded = expanded or stride == 0
        return StrideClass(strides[-1] == 1 or sizes[-1] == 1, aligned, expanded)

    def encode(self) -> str:
        """One letter per property that holds: u, a, e."""
        return "u" * self.unit + "a" * self.aligned + "e" * self.expanded

    @staticmethod
    def decode(text: str) -> StrideClass:
        """The inverse of ``encode``."""
        if not isinstance(text, str) or text not in _STRIDE_CODES:
            raise InvalidProblem(
                f"strides is {shown(text)}, expected one of {sorted(_STRIDE_CODES)}"
            )
        return _STRIDE_CODES[text]


_DENSE = StrideClass()
_STRIDE_CODES = {
    s.encode(): s
    for s in (
        StrideClass(u, a, e) for u in (False, True) for a in (False, True) for e in (False, True)
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A Spec, sizes, dtypes and stride classes. Frozen, hashable, without tensors.

    Serves as cache key, test id (``label``), table row and file header (``encode``).

    Attributes:
        spec: the size-free part.
        batch: number of sequences B.
        seqlen_q, seqlen_kv: storage places S and T; all tokens for thd.
        max_seqlen_q, max_seqlen_kv: the caller's bound on the length of a sequence, None when not given.
            Sequences are clamped to it; no kernel needs it.
        num_heads, num_gqa_groups: H query and G KV heads, H % G == 0.
        head_dim_qk, head_dim_v: D and Dv.
        dtype: of q, k, v: a name in ``DTYPES``.
        bias_shape, mask_shape: 4-d shapes of bias and attention_mask.
        bias_dtype: of the bias.
        slopes_batched: ALiBi slopes are [B, H], not [H].
        strides: stride class per tensor name, in one order; a name that is not listed is aligned and dense.

    Raises:
        InvalidProblem: a field has the wrong type or size, or the shapes contradict the Spec.
    """

    spec: Spec
    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_heads: int
    num_gqa_groups: int
    head_dim_qk: int
    head_dim_v: int
    dtype: str
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    bias_shape: tuple[int, int, int, int] | None = None
    bias_dtype: str | None = None
    mask_shape: tuple[int, int, int, int] | None = None
    slopes_batched: bool = False
    strides: tuple[tuple[str, StrideClass], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.spec, Spec):
            raise InvalidProblem(f"spec is {shown(self.spec)}, expected a Spec")
        for name, least in _SIZES.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= _INT32_MAX:
                raise InvalidProblem(
                    f"{name} is {shown(value)}, expected an int in [{least}, {_INT32_MAX}]"
                )
        if self.num_heads % self.num_gqa_groups:
            raise InvalidProblem(
                f"num_heads is {self.num_heads}, expected a multiple of num_gqa_groups, {self.num_gqa_groups}"
            )
        if type(self.dtype) is not str or self.dtype not in DTYPES:
            raise InvalidProblem(
                f"dtype is {shown(self.dtype)}, expected one of {', '.join(DTYPES)}"
            )
        for name in ("max_seqlen_q", "max_seqlen_kv"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise InvalidProblem(
                    f"{name} is {shown(value)}, expected a non-negative int or None"
                )
        self._check_tensors()
        if self.strides != ():
            object.__setattr__(self, "strides", _canonical_strides(self.strides))

    def _check_tensors(self) -> None:
        """bias, mask and slopes are described exactly when the Spec has them."""
        spec = self.spec
        self._check_shape("bias_shape", wanted=spec.bias != "none")
        self._check_shape("mask_shape", wanted=spec.arbitrary)
        bias_dtypes = (self.dtype, "float32") if spec.bias != "none" else (None,)
        if self.bias_dtype not in bias_dtypes:
            raise InvalidProblem(
                f"bias_dtype is {shown(self.bias_dtype)}, expected one of {bias_dtypes} "
                f"for bias {spec.bias!r} and dtype {self.dtype!r}"
            )
        if type(self.slopes_batched) is not bool or self.slopes_batched > spec.alibi:
            raise InvalidProblem(
                f"slopes_batched is {shown(self.slopes_batched)}, expected a bool, True only with alibi"
            )

    def _check_shape(self, name: str, *, wanted: bool) -> None:
        shape = getattr(self, name)
        if (shape is not None) != wanted:
            expected = "four ints" if wanted else "None, for the Spec has none"
            raise InvalidProblem(f"{name} is {shown(shape)}, expected {expected}")
        if shape is None:
            return
        if type(shape) is not tuple or len(shape) != 4 or any(type(n) is not int for n in shape):
            raise InvalidProblem(f"{name} is {shown(shape)}, expected a tuple of four ints")
        full = (self.batch, self.num_heads, self.seqlen_q, self.seqlen_kv)
        # thd: S and T of bias and mask count within a sequence, and only tensors know how far.
        places = 2 if self.layout == "thd" else 4
        fits = all(n in (1, size) for n, size in zip(shape[:places], full, strict=False))
        if not fits or min(shape) < 0:
            raise InvalidProblem(
                f"{name} is {shape}, expected 1 or the full size per dim of {full}"
            )

    @property
    def layout(self) -> Layout:
        """bshd, sbhd or thd."""
        return self.spec.layout

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_gqa_groups

    @property
    def scale(self) -> float:
        """The resolved softmax scale."""
        return self.spec.scale if self.spec.scale is not None else 1.0 / math.sqrt(self.head_dim_qk)

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype of q, k, v."""
        return DTYPES[self.dtype]

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """dtype of scores, lse and sums: fp32, fp64 for fp64 inputs."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def stride_class(self, name: str) -> StrideClass:
        """The stride class of a tensor by its name in ``Inputs``."""
        return dict(self.strides).get(name, _DENSE)

    @staticmethod
    def of(
        spec: Spec,
        inputs: Inputs,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
    ) -> Problem:
        """The Problem of validated tensors, from their metadata only."""
        q, k, v = inputs.q, inputs.k, inputs.v
        thd = spec.layout == "thd"
        if spec.layout == "bshd":
            batch, seqlen_q, seqlen_kv = q.shape[0], q.shape[1], k.shape[1]
        else:
            batch, seqlen_q, seqlen_kv = q.shape[0 if thd else 1], q.shape[0], k.shape[0]
        if thd:
            batch = _sequences(inputs)
        bias, mask, slopes = inputs.bias, inputs.attention_mask, inputs.alibi_slopes
        return Problem(
            spec=spec,
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            num_heads=q.shape[-2],
            num_gqa_groups=k.shape[-2],
            head_dim_qk=q.shape[-1],
            head_dim_v=v.shape[-1],
            dtype=_name(q.dtype),
            bias_shape=None if bias is None else _four("bias", bias),
            bias_dtype=None if bias is None else _name(bias.dtype),
            mask_shape=None if mask is None else _four("attention_mask", mask),
            slopes_batched=slopes is not None and slopes.dim() == 2,
            strides=tuple(
                (name, found)
                for name, tensor in inputs.items()
                if name in _STRIDED and (found := StrideClass.of(tensor)) != _DENSE
            ),
        )

    def encode(self) -> str:
        """The canonical string: JSON with sorted keys, absent fields left out."""
        return _encode(self)

    @staticmethod
    def decode(text: str) -> Problem:
        """The Problem of a canonical string.

        Raises:
            InvalidProblem: not a JSON object of the known fields with legal values.
        """
        if not isinstance(text, str):
            raise InvalidProblem(f"problem is {shown(text)}, expected a string with a JSON object")
        return _decode(text)

    def label(self) -> str:
        """A short unique-enough name: "b2 s4096 t4096 h16/2 d256 bf16 sbhd causal"."""
        spec = self.spec
        dims = f"d{self.head_dim_qk}"
        if self.head_dim_v != self.head_dim_qk:
            dims += f"/{self.head_dim_v}"
        parts = [
            f"b{self.batch}",
            f"s{self.seqlen_q}"
            + (f" t{self.seqlen_kv}" if self.seqlen_kv != self.seqlen_q else ""),
            f"h{self.num_heads}/{self.num_gqa_groups}",
            dims,
            _SHORT[self.dtype],
            spec.layout if spec.packing == "separate" else f"{spec.layout}({spec.packing})",
            spec.mask_label(),
        ]
        if spec.lengths == "extents":
            parts.append("tile")
        if spec.bias != "none":
            parts.append(f"{spec.bias}{list(self.bias_shape or ())}".replace(" ", ""))
        if spec.alibi:
            parts.append("alibi")
        if spec.softcap is not None:
            parts.append(f"softcap{spec.softcap:g}")
        if spec.sink:
            parts.append(spec.softmax)
        if spec.dropout_p:
            parts.append(f"dropout{spec.dropout_p:g}")
        return " ".join(parts)


# Each size with the least that is legal; indices are int32.
_SIZES = {
    "batch": 0,
    "seqlen_q": 0,
    "seqlen_kv": 0,
    "num_heads": 1,
    "num_gqa_groups": 1,
    "head_dim_qk": 1,
    "head_dim_v": 1,
}
_INT32_MAX = 2**31 - 1
_STRIDED = ("q", "k", "v", "bias", "attention_mask")
_FIELDS = frozenset(f.name for f in fields(Problem))


def _canonical_strides(strides: Any) -> tuple[tuple[str, StrideClass], ...]:
    """The stride classes that differ from the default, in one order."""
    try:
        found: dict[Any, Any] = dict(strides)
    except (TypeError, ValueError) as error:
        raise InvalidProblem(
            f"strides is {shown(strides)}, expected (name, StrideClass) pairs"
        ) from error
    if not found.keys() <= set(_STRIDED) or not all(
        isinstance(value, StrideClass) for value in found.values()
    ):
        raise InvalidProblem(
            f"strides is {shown(strides)}, expected a StrideClass for some of {_STRIDED}"
        )
    return tuple((n, found[n]) for n in _STRIDED if n in found and found[n] != _DENSE)


def _name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype, str(dtype))


def _sequences(inputs: Inputs) -> int:
    if inputs.extents is not None:
        return inputs.extents.shape[1]
    if inputs.cu_seqlens_q is None:
        raise InvalidProblem("cu_seqlens_q is None, expected int32 [B + 1] for thd")
    return inputs.cu_seqlens_q.shape[0] - 1


def _four(name: str, tensor: Tensor) -> tuple[int, int, int, int]:
    if tensor.dim() != 4:
        raise InvalidProblem(f"{name} has shape {list(tensor.shape)}, expected 4 dims")
    a, b, c, d = tensor.shape
    return a, b, c, d


@lru_cache(maxsize=4096)
def _encode(problem: Problem) -> str:
    given: dict[str, Any] = {f.name: getattr(problem, f.name) for f in fields(problem)}
    given["spec"] = json.loads(problem.spec.encode())
    given["strides"] = {name: found.encode() for name, found in problem.strides}
    kept = {k: v for k, v in given.items() if v is not None and v is not False and v != {}}
    kept["spec"] = given["spec"]
    return json.dumps(kept, sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=4096)
def _decode(text: str) -> Problem:
    found = json_object("problem", text)
    if set(found) - _FIELDS or "spec" not in found:
        raise InvalidProblem(
            f"problem has fields {shown(sorted(found))}, expected spec and some of {sorted(_FIELDS)}"
        )
    found["spec"] = Spec.from_fields(found["spec"])
    for name in ("bias_shape", "mask_shape"):
        if isinstance(found.get(name), list):
            found[name] = tuple(found[name])
    strides = found.get("strides", {})
    if not isinstance(strides, dict):
        raise InvalidProblem(
            f"strides is {shown(strides)}, expected an object with some of {_STRIDED}"
        )
    found["strides"] = tuple((name, StrideClass.decode(code)) for name, code in strides.items())
    try:
        return Problem(**found)
    except TypeError as error:
        raise InvalidProblem(f"problem has fields {sorted(found)}: {error}") from error
