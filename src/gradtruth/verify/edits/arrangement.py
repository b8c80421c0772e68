"""The same values in other memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.verify.cases.case import Case
from gradtruth.verify.edits.edited import edited
from gradtruth.verify.suite.arrangement import arrange, arrange_dout

__all__ = ["contiguous", "is_contiguous", "restrided", "strided"]

_STRIDED = ("q", "k", "v", "bias", "attention_mask", "dout", "dlse")
_ALIGNMENT = 16  # bytes


def contiguous(case: Case) -> Case:
    """Every tensor in memory of its own, contiguous."""
    tensors = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in case.tensors().items()
    }
    return edited(case, dict(tensors), "contiguous")


def is_contiguous(case: Case) -> bool:
    """Every tensor is contiguous and starts on a boundary of 16 bytes."""
    return all(
        tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0
        for tensor in case.tensors().values()
    )


def strided(case: Case, arrangement: str, dout: str = "contiguous") -> Case:
    """The values in memory as ``suite.arrangement`` puts them.

    Args:
        case: any.
        arrangement: of q, k, v, bias and attention_mask, one of ``ARRANGEMENTS``.
        dout: of dout, one of ``DOUT_ARRANGEMENTS``.

    Raises:
        InvalidProblem: an unknown name, or shapes that cannot be packed.
    """
    plain = contiguous(case)
    inputs = arrange(plain.inputs, arrangement)
    tensors: dict[str, Tensor | None] = dict(inputs.items())
    tensors["dout"] = arrange_dout(plain.dout, dout)
    made = edited(case, tensors, f"memory {arrangement}, dout {dout}")
    return replace(made, history=(*case.history, made.history[-1]))


def restrided(case: Case, like: Case) -> Case:
    """The values in memory like another case's: the order of dims, room between them, expanded dims, alignment.

    What lies between the elements is NaN (True of a mask). A dim stays expanded only where its values are equal.

    Args:
        case: an edit of ``like``, in the same layout.
        like: the case whose strides are taken.
    """
    tensors: dict[str, Tensor | None] = {}
    models = like.tensors()
    for name, tensor in case.tensors().items():
        model = models.get(name)
        if model is None or name not in _STRIDED or model.dim() != tensor.dim():
            tensors[name] = tensor
        else:
            tensors[name] = _like(tensor, model) if tensor.numel() else tensor
    made = edited(case, tensors, "")
    return replace(made, history=case.history)


def _like(tensor: Tensor, model: Tensor) -> Tensor:
    order = sorted(range(model.dim()), key=lambda dim: (model.stride(dim), -dim))
    strides, reach, before = [0] * model.dim(), 1, 1
    for dim in order:
        step, size = model.stride(dim), model.shape[dim]
        if step == 0 and size > 1:
            if not bool((tensor == tensor.narrow(dim, 0, 1)).all()):
                return tensor.contiguous()
            continue
        room = max(0, step - before) if size > 1 else 0
        strides[dim] = reach + room
        reach = strides[dim] * (tensor.shape[dim] - 1) + strides[dim]
        before = step * size if size > 1 else before
    item = tensor.element_size()
    early = model.data_ptr() % _ALIGNMENT // item
    filler = True if tensor.dtype == torch.bool else float("nan")
    buffer = torch.full((early + reach,), filler, dtype=tensor.dtype, device=tensor.device)
    view = torch.as_strided(buffer, tensor.shape, strides, early)
    part = tensor
    for dim in range(model.dim()):
        if strides[dim] == 0:
            part = part.narrow(dim, 0, 1)
    torch.as_strided(buffer, part.shape, strides, early).copy_(part)
    return view
