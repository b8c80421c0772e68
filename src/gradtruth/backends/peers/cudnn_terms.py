"""A problem as cuDNN's attention graphs: tensors with dims, strides and ragged offsets, and attributes.

Frozen and without tensors: what is built and kept for later calls depends on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gradtruth.backends.peers.bands import is_full
from gradtruth.core.problem import Problem

__all__ = [
    "GraphTerms",
    "Half",
    "Strides",
    "TensorTerms",
    "graph_terms",
    "is_deterministic",
    "metadata_strides",
    "strides_of",
]

Half = Literal["forward", "backward"]
Strides = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTerms:
    """One tensor of a graph.

    Attributes:
        name: q, k, v, o, stats, ..., and in the backward do, dq, ...
        dim: [B, heads, longest, dim], or what a scalar, a length or a bias has.
        stride: in elements, in the order of ``dim``.
        dtype: a name of torch's.
        offset: name of the int [B + 1] tensor with the place of every sequence in elements; None when dense.
        output: the graph writes it.
    """

    name: str
    dim: Strides
    stride: Strides
    dtype: str
    offset: str | None = None
    output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTerms:
    """One graph.

    Attributes:
        half: forward or backward.
        tensors: all that the caller hands in, in the order of the arguments.
        dtype: of q, k and v.
        scale: attn_scale.
        padding: seq_len_q and seq_len_kv say how much of every sequence there is.
        left: keys this far left of the diagonal are the first that are hidden; None shows all.
        right: keys this far right of the diagonal are the last that are seen; None shows all.
        bottom_right: the diagonal starts at lk - lq.
        dropout_p: drawn by cuDNN's Philox from the tensors seed and philox_offset.
        deterministic: the backward repeats its bits.
        wide_offsets: ragged offsets are int64.
    """

    half: Half
    tensors: tuple[TensorTerms, ...]
    dtype: str
    scale: float
    padding: bool
    left: int | None
    right: int | None
    bottom_right: bool
    dropout_p: float
    deterministic: bool
    wide_offsets: bool

    def has(self, name: str) -> bool:
        """Whether the graph has a tensor of this name."""
        return any(tensor.name == name for tensor in self.tensors)


def strides_of(tensor: Tensor, problem: Problem, longest: int) -> Strides:
    """The strides [B, heads, places, dim] of a stored q, k, v, out or gradient.

    With ragged offsets the first one is not followed.
    """
    if problem.layout == "bshd":
        b, s, h, d = tensor.stride()
    elif problem.layout == "sbhd":
        s, b, h, d = tensor.stride()
    else:
        s, h, d = tensor.stride()
        b = longest * s
    return b, h, s, d


def metadata_strides(problem: Problem) -> dict[str, Strides]:
    """The strides of q, k and v as if they were contiguous, with any number of tokens to a thd sequence."""
    found = {}
    for name, heads, dim, places in (
        ("q", problem.num_heads, problem.head_dim_qk, problem.seqlen_q),
        ("k", problem.num_gqa_groups, problem.head_dim_qk, problem.seqlen_kv),
        ("v", problem.num_gqa_groups, problem.head_dim_v, problem.seqlen_kv),
    ):
        found[name] = _contiguous(problem, heads, dim, places)
    return found


def graph_terms(
    problem: Problem,
    half: Half,
    strides: dict[str, Strides],
    longest: tuple[int, int],
) -> GraphTerms:
    """Describe one half of a problem.

    Args:
        problem: one that the adapter supports.
        half: which.
        strides: of q, k, v, and in the backward of do: [B, heads, places, dim].
        longest: no sequence has more queries, more keys.
    """
    spec = problem.spec
    return GraphTerms(
        half=half,
        tensors=tuple(_tensors(problem, half, strides, longest)),
        dtype=problem.dtype,
        scale=problem.scale,
        padding=not is_full(problem),
        left=None if spec.left is None else spec.left + 1,
        right=spec.right,
        bottom_right=spec.alignment == "bottom_right" and not spec.band.open,
        dropout_p=spec.dropout_p,
        deterministic=is_deterministic(problem),
        wide_offsets=_elements(problem, strides) >= 2**31,
    )


def is_deterministic(problem: Problem) -> bool:
    """Whether a deterministic backward is asked for: cuDNN has none for bias gradients and sinks."""
    return problem.spec.deterministic and problem.spec.bias == "none" and not problem.spec.sink


def _elements(problem: Problem, strides: dict[str, Strides]) -> int:
    places = {"q": problem.seqlen_q, "do": problem.seqlen_q}
    return max(stride[2] * places.get(name, problem.seqlen_kv) for name, stride in strides.items())


def _tensors(
    problem: Problem, half: Half, strides: dict[str, Strides], longest: tuple[int, int]
) -> list[TensorTerms]:
    B, H, G = problem.batch, problem.num_heads, problem.num_gqa_groups
    D, Dv, (S, T) = problem.head_dim_qk, problem.head_dim_v, longest
    thd, dtype = problem.layout == "thd", problem.dtype
    places = (problem.seqlen_q, problem.seqlen_kv)

    def attended(
        name: str, heads: int, dim: int, side: int, *, output: bool = False
    ) -> TensorTerms:
        fresh = _contiguous(problem, heads, dim, places[side], longest[side])
        return TensorTerms(
            name=name,
            dim=(B, heads, longest[side], dim),
            stride=strides.get(name, fresh),
            dtype=dtype,
            offset=f"offset_{name}" if thd else None,
            output=output,
        )

    def row(name: str, *, output: bool) -> TensorTerms:
        # [B, H, S, 1], for thd [tokens, H, 1].
        stride = (S * H, 1, H, 1) if thd else (H * S, S, 1, 1)
        offset = "offset_stats" if thd else None
        return TensorTerms(
            name=name,
            dim=(B, H, S, 1),
            stride=stride,
            dtype="float32",
            offset=offset,
            output=output,
        )

    backward = half == "backward"
    found = [attended("q", H, D, 0), attended("k", G, D, 1), attended("v", G, Dv, 1)]
    found.append(attended("o", H, Dv, 0, output=not backward))
    found.append(row("stats", output=not backward))
    if backward:
        found += [
            attended("do", H, Dv, 0),
            attended("dq", H, D, 0, output=True),
            attended("dk", G, D, 1, output=True),
            attended("dv", G, Dv, 1, output=True),
        ]
    elif problem.spec.max_logit:
        found.append(row("max", output=True))
    if problem.spec.bias != "none":
        b, h, s, t = problem.bias_shape or (1, 1, S, T)
        bias = {"dim": (b, h, s, t), "stride": (h * s * t, s * t, t, 1), "dtype": dtype}
        found.append(TensorTerms(name="bias", **bias))
        if backward:
            found.append(TensorTerms(name="dbias", output=True, **bias))
    if problem.spec.sink:
        sink = {"dim": (1, H, 1, 1), "stride": (H, 1, 1, 1), "dtype": "float32"}
        found.append(TensorTerms(name="sink", **sink))
        if backward:
            found.append(TensorTerms(name="dsink", output=True, **sink))
    if not is_full(problem):
        found += [_numbers(f"length_{side}", B, "int32") for side in ("q", "kv")]
    if problem.spec.dropout_p:
        found += [_numbers(name, 1, "int64") for name in ("seed", "philox_offset")]
    return found


def _numbers(name: str, count: int, dtype: str) -> TensorTerms:
    return TensorTerms(name=name, dim=(count, 1, 1, 1), stride=(1, 1, 1, 1), dtype=dtype)


def _contiguous(
    problem: Problem, heads: int, dim: int, places: int, longest: int | None = None
) -> Strides:
    """Strides of a fresh tensor in the storage layout."""
    row = heads * dim
    if problem.layout == "sbhd":
        return row, dim, problem.batch * row, 1
    return (places if longest is None or problem.layout == "bshd" else longest) * row, dim, row, 1
