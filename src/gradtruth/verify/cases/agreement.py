"""Do the tensors of a case agree with its problem? Ranks, shapes, dtypes, presence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradtruth.core.extents import Extents
from gradtruth.core.problem import DTYPES, Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.errors import InvalidProblem

__all__ = ["problem_of"]

_MAX_SEQLEN = 2**31 - 1
_PRESENT: dict[str, Callable[[Spec], tuple[bool, bool]]] = {
    # name: (must be there, may be there)
    "cu_seqlens_q": lambda s: (s.lengths == "cu_seqlens", s.lengths in ("cu_seqlens", "extents")),
    "cu_seqlens_kv": lambda s: (s.lengths == "cu_seqlens", s.lengths in ("cu_seqlens", "extents")),
    "cu_seqlens_q_padded": lambda s: (False, s.layout == "thd"),
    "cu_seqlens_kv_padded": lambda s: (False, s.layout == "thd"),
    "padding_mask_q": lambda s: (False, s.lengths in ("padding_mask", "extents")),
    "padding_mask_kv": lambda s: (False, s.lengths in ("padding_mask", "extents")),
    "extents": lambda s: (s.lengths == "extents", s.lengths == "extents"),
    "attention_mask": lambda s: (s.arbitrary, s.arbitrary),
    "bias": lambda s: (s.bias != "none", s.bias != "none"),
    "alibi_slopes": lambda s: (s.alibi, s.alibi),
    "softmax_offset": lambda s: (s.softmax == "learnable", s.softmax == "learnable"),
    "dropout_seed": lambda s: (s.dropout_p > 0, True),
}


def problem_of(
    spec: Spec,
    inputs: Inputs,
    dout: Tensor,
    dlse: Tensor | None,
    bounds: tuple[int | None, int | None] = (None, None),
) -> Problem:
    """The Problem of these tensors, after a check that they are one.

    Only metadata and, of a tile, the content of ``extents`` is read; what cu_seqlens hold is clamped wherever
    they are used.

    Args:
        spec: what is computed.
        inputs: tensors of any strides on one device.
        dout: gradient of out.
        dlse: gradient of lse, or None.
        bounds: max_seqlen_q and max_seqlen_kv.

    Raises:
        InvalidProblem: a tensor that is missing, not expected, or of the wrong rank, shape, dtype or device.
    """
    for bound in bounds:
        if bound is not None and not (type(bound) is int and 0 <= bound <= _MAX_SEQLEN):
            raise InvalidProblem(
                f"max_seqlen is {bound!r}, expected an int in [0, {_MAX_SEQLEN}] or None"
            )
    for name, rule in _PRESENT.items():
        must, may = rule(spec)
        there = getattr(inputs, name) is not None
        if there != must and not (there and may):
            raise InvalidProblem(
                f"{name} is {'given' if there else 'None'}, the problem expects otherwise"
            )
    _check_qkv(spec, inputs)
    _check_integers(spec, inputs)
    _check_four(inputs)
    problem = Problem.of(spec, inputs, *bounds)
    _check_sized(problem, inputs, dout, dlse)
    devices = {str(t.device) for _, t in inputs.items()} | {str(dout.device)}
    if len(devices) > 1:
        raise InvalidProblem(f"the tensors are on {sorted(devices)}, expected one device")
    return problem


def _check_qkv(spec: Spec, inputs: Inputs) -> None:
    q, k, v = inputs.q, inputs.k, inputs.v
    rank = 3 if spec.layout == "thd" else 4
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != rank:
            raise InvalidProblem(
                f"{name} has shape {list(tensor.shape)}, expected {rank} dims for {spec.layout}"
            )
        if tensor.dtype != q.dtype or tensor.dtype not in DTYPES.values():
            raise InvalidProblem(
                f"{name} is {tensor.dtype}, expected one of {', '.join(DTYPES)}, the same for q, k, v"
            )
    batch_dim = {"bshd": 0, "sbhd": 1, "thd": None}[spec.layout]
    same = [("k's last dim", k.shape[-1], q.shape[-1]), ("v's heads", v.shape[-2], k.shape[-2])]
    same += [("v's places", tuple(v.shape[:-2]), tuple(k.shape[:-2]))]
    if batch_dim is not None:
        same += [("k's batch", k.shape[batch_dim], q.shape[batch_dim])]
    for what, found, expected in same:
        if found != expected:
            raise InvalidProblem(f"{what} is {found}, expected {expected}")


def _check_integers(spec: Spec, inputs: Inputs) -> None:
    batch = None if spec.layout == "thd" else inputs.q.shape[0 if spec.layout == "bshd" else 1]
    for name, tensor in inputs.items():
        if not name.startswith("cu_seqlens"):
            continue
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or tensor.shape[0] < 1:
            raise InvalidProblem(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, expected int32 [B + 1]"
            )
        _check_dense(name, tensor)
        if spec.lengths == "extents":
            continue  # what a tile was cut from
        if batch is None:
            batch = tensor.shape[0] - 1
        if tensor.shape[0] != batch + 1:
            raise InvalidProblem(f"{name} has {tensor.shape[0]} entries, expected {batch + 1}")
    extents = inputs.extents
    if extents is None:
        return
    if extents.dtype != torch.int32 or extents.dim() != 2 or extents.shape[0] != 11:
        raise InvalidProblem(
            f"extents is {extents.dtype} {list(extents.shape)}, expected int32 [11, B]"
        )
    _check_dense("extents", extents)
    if batch is not None and extents.shape[1] != batch:
        raise InvalidProblem(f"extents has {extents.shape[1]} columns, expected {batch}")


def _check_dense(name: str, tensor: Tensor) -> None:
    """Not expanded: with as many entries as memory, its size is one that memory holds."""
    if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise InvalidProblem(f"{name} is expanded to {list(tensor.shape)}, expected a value each")


def _check_four(inputs: Inputs) -> None:
    for name, dtypes in (
        ("attention_mask", (torch.bool,)),
        ("bias", (inputs.q.dtype, torch.float32)),
    ):
        tensor = getattr(inputs, name)
        if tensor is None:
            continue
        if tensor.dim() != 4:
            raise InvalidProblem(f"{name} has shape {list(tensor.shape)}, expected 4 dims")
        if tensor.dtype not in dtypes:
            raise InvalidProblem(
                f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}"
            )


def _check_sized(problem: Problem, inputs: Inputs, dout: Tensor, dlse: Tensor | None) -> None:
    B, S, T, H = problem.batch, problem.seqlen_q, problem.seqlen_kv, problem.num_heads
    thd = problem.layout == "thd"
    _expect("dout", dout, (*inputs.q.shape[:-1], problem.head_dim_v), problem.torch_dtype)
    if dlse is not None:
        if not problem.spec.lse_grad:
            raise InvalidProblem("dlse is given, expected a Spec with lse_grad")
        _expect("dlse", dlse, (S, H) if thd else (B, H, S), problem.accumulate_dtype)
    slopes = (B, H) if problem.slopes_batched else (H,)
    _expect("alibi_slopes", inputs.alibi_slopes, slopes, torch.float32)
    _expect("softmax_offset", inputs.softmax_offset, (H,), problem.accumulate_dtype)
    _expect("dropout_seed", inputs.dropout_seed, (), torch.int64)
    _expect("padding_mask_q", inputs.padding_mask_q, (B, S), torch.bool)
    _expect("padding_mask_kv", inputs.padding_mask_kv, (B, T), torch.bool)
    for name in ("bias", "attention_mask"):
        tensor = getattr(inputs, name)
        if tensor is None:
            continue
        full = (B, H, None, None) if thd else (B, H, S, T)
        if any(
            n not in (1, whole)
            for n, whole in zip(tensor.shape, full, strict=True)
            if whole is not None
        ):
            raise InvalidProblem(
                f"{name} has shape {list(tensor.shape)}, expected 1 or {list(full)} in every dim"
            )
        _check_index(problem, inputs, name, tensor)


def _expect(name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
        raise InvalidProblem(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}"
        )


def _check_index(problem: Problem, inputs: Inputs, name: str, tensor: Tensor) -> None:
    """Of a tile: rows and columns of bias and mask that the extents name are inside."""
    if inputs.extents is None:
        return
    rows = Extents.unpack(inputs.extents.cpu().long())
    for side, dim, places in (("q", 2, problem.seqlen_q), ("kv", 3, problem.seqlen_kv)):
        index, start, length = (
            getattr(rows, f"{what}_{side}") for what in ("index", "start", "length")
        )
        reach = torch.minimum(length, places - start.clamp(0, places)).clamp(min=0)
        used = reach > 0
        outside = used & ((index < 0) | (index + reach > tensor.shape[dim]))
        if tensor.shape[dim] != 1 and bool(outside.any()):
            raise InvalidProblem(
                f"index_{side} of extents leaves {name} of shape {list(tensor.shape)}"
            )
