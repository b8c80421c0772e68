"""unfused: it rounds exactly where the contract allows. What it shares with reference is in test_own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradtruth.backends import get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Forward, Inputs, Wanted

UNFUSED = get("unfused")
TENSORS = ("out", "dq", "dk", "dv")


def made(dtype: torch.dtype) -> tuple[Inputs, Tensor]:
    """Two KV heads of two query heads each, [B, S, H, D] = [1, 24, 4, 8]."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, dout = (
        torch.randn(1, n, h, 8, generator=generator).to(dtype)
        for n, h in ((24, 4), (20, 2), (20, 2), (24, 4))
    )
    return Inputs(q=q, k=k, v=v), dout


def emulated(
    inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, rounded: frozenset[str]
) -> dict[str, Tensor]:
    """fp64 with a rounding to the input dtype at each of the named points: P, dS, out, and what is added."""
    dtype, scale = inputs.q.dtype, 8**-0.5

    def at(point: str, x: Tensor) -> Tensor:
        return x.to(dtype).double() if point in rounded else x

    def heads(x: Tensor) -> Tensor:
        return x[0].transpose(0, 1).double()

    def of_group(x: Tensor) -> Tensor:
        """The sum of a group's two heads."""
        return at("group", x).unflatten(0, (2, 2)).sum(1)

    q, dout = heads(inputs.q), heads(dout)
    k, v = (heads(x).repeat_interleave(2, 0) for x in (inputs.k, inputs.v))
    p = torch.exp(at("scores", q @ k.mT * scale) - lse[0, ..., None].double())
    delta = (dout * (heads(out) if "delta" in rounded else p @ v)).sum(-1, keepdim=True)
    ds = p * (at("dP", dout @ v.mT) - delta)
    found = {
        "out": at("P", p) @ v,
        "dq": at("dS", ds) @ k * scale,
        "dk": of_group(at("dS", ds).mT @ q * scale),
        "dv": of_group(at("P", p).mT @ dout),
    }
    return {name: x.transpose(0, 1)[None].to(dtype) for name, x in found.items()}


def distance(left: Tensor, right: Tensor) -> float:
    """How many elements differ; a sum in another order may flip a rounding here and there."""
    return (left != right).double().mean().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_points(dtype):
    inputs, dout = made(dtype)
    problem = Problem.of(Spec(), inputs)
    forward = UNFUSED.forward(problem, inputs)
    grads = UNFUSED.backward(problem, inputs, forward, dout, None, Wanted())
    found = {"out": forward.out, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    right = frozenset({"P", "dS", "delta"})
    expected = emulated(inputs, forward.out, forward.lse, dout, right)
    for name in TENSORS:
        assert distance(found[name], expected[name]) <= 0.02, name
    # Every other choice of points is told apart, in the tensors that it concerns.
    others = {
        right - {"P"}: ("out", "dv"),
        right - {"dS"}: ("dq", "dk"),
        right - {"delta"}: ("dq", "dk"),
        right | {"scores"}: TENSORS,
        right | {"dP"}: ("dq", "dk"),
        right | {"group"}: ("dk", "dv"),
    }
    for points, concerned in others.items():
        wrong = emulated(inputs, forward.out, forward.lse, dout, points)
        for name in concerned:
            assert distance(found[name], wrong[name]) > 0.04, (sorted(points), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_dtypes_are_not_rounded(dtype):
    inputs, dout = made(dtype)
    problem = Problem.of(Spec(), inputs)
    forward = UNFUSED.forward(problem, inputs)
    grads = UNFUSED.backward(problem, inputs, forward, dout, None, Wanted())
    expected = emulated(inputs, forward.out, forward.lse, dout, frozenset())
    for name, left in {"out": forward.out, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}.items():
        assert left.dtype == dtype
        torch.testing.assert_close(
            left, expected[name], rtol=0, atol=16 * torch.finfo(dtype).eps, msg=name
        )


def test_delta_uses_the_out_that_is_given():
    inputs, dout = made(torch.bfloat16)
    problem = Problem.of(Spec(), inputs)
    forward = UNFUSED.forward(problem, inputs)
    moved = Forward(out=forward.out + 1, lse=forward.lse)
    grads = UNFUSED.backward(problem, inputs, moved, dout, None, Wanted())
    expected = emulated(inputs, moved.out, moved.lse, dout, frozenset({"P", "dS", "delta"}))
    for name in ("dq", "dk", "dv"):
        assert distance(getattr(grads, name), expected[name]) <= 0.02, name


def test_scores_of_low_precision_operands_are_exact():
    """257 * 257 needs 17 bits: a score rounded to bf16, or operands rounded on the way, would miss it."""
    q = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16).view(1, 1, 1, 2)
    k = torch.tensor([[256.0, 1.0], [256.0, 0.0]], dtype=torch.bfloat16).view(1, 2, 1, 2)
    inputs = Inputs(q=q, k=k, v=torch.ones_like(k))
    found = UNFUSED.forward(Problem.of(Spec(scale=1.0), inputs), inputs)
    expected = 65536 + torch.logaddexp(torch.tensor(1.0).double(), torch.tensor(0.0).double())
    assert abs(found.lse.item() - expected.item()) <= 65536 * 2**-24
