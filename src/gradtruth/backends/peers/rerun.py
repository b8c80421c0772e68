"""Gradients of a peer that only has autograd: run its forward again, recorded, and differentiate it.

Such a peer ignores the out and lse that the backward is given, so it does not claim foreign_lse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.backends.peers.views import to_lse
from gradtruth.core.precision import full_precision
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Grads, Inputs, Wanted

__all__ = ["Run", "differentiate", "widened"]

Run = Callable[[Problem, Inputs], tuple[Tensor, Tensor | None]]


def widened(problem: Problem, inputs: Inputs) -> Inputs:
    """The same inputs with q, k, v and bias in the accumulation dtype (themselves where they are in it)."""
    dtype = problem.accumulate_dtype
    return replace(
        inputs,
        q=inputs.q.to(dtype),
        k=inputs.k.to(dtype),
        v=inputs.v.to(dtype),
        bias=None if inputs.bias is None else inputs.bias.to(dtype),
    )


def differentiate(
    run: Run,
    problem: Problem,
    inputs: Inputs,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Grads:
    """The wanted gradients of a recorded run.

    Args:
        run: computes out, in the storage layout, and lse [B', H, S] with autograd's operators (None when it
            gives lse no gradient); it widens its inputs itself, so that autograd rounds each gradient once.
        problem, inputs: passed to ``run``.
        dout: like out.
        dlse: in lse's public form; None is zero.
        wanted: which gradients.
    """
    names = {
        "q": wanted.dq,
        "k": wanted.dk,
        "v": wanted.dv,
        "bias": wanted.dbias,
        "softmax_offset": wanted.dsoftmax_offset,
    }
    # Leaving inference_mode also undoes that an operator's implementation runs below autograd.
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        full_precision(problem, inputs.q.device),
    ):
        given = {name: tensor for name, tensor in inputs.items() if name in names}
        leaves = {name: _leaf(tensor, grad=names[name]) for name, tensor in given.items()}
        asked = [name for name in leaves if names[name]]
        if not asked:
            return Grads()
        out, lse = run(problem, replace(inputs, **leaves))
        outputs, cotangents = [out], [dout.to(out.dtype)]
        if dlse is not None and lse is not None:
            outputs.append(lse)
            cotangents.append(to_lse(dlse, problem.spec.layout).to(lse.dtype))
        found = torch.autograd.grad(
            outputs,
            [leaves[name] for name in asked],
            cotangents,
            allow_unused=True,
            materialize_grads=True,
        )
    return Grads(**{f"d{name}": grad.contiguous() for name, grad in zip(asked, found, strict=True)})


def _leaf(tensor: Tensor, *, grad: bool) -> Tensor:
    # A tensor made under inference_mode cannot be recorded; a copy can.
    leaf = tensor.clone() if tensor.is_inference() else tensor.detach()
    return leaf.requires_grad_(grad)
