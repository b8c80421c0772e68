"""Conformance: one sample through one backend, everything it returned against the oracle and the contract."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtruth.backends import Backend, get
from gradtruth.core.problem import Problem
from gradtruth.core.support import Claims
from gradtruth.core.tensors import Forward, Grads, Inputs
from gradtruth.verify.same_bits import same_bits
from gradtruth.verify.suite.inputs import Sample
from gradtruth.verify.suite.poison import poison_forward
from gradtruth.verify.truth import oracle
from gradtruth.verify.truth.budget import Row, compare
from gradtruth.verify.truth.rounding import Magnitude

__all__ = ["Truth", "examine", "findings", "judge", "named", "run", "truth_of"]

_YARDSTICK = "unfused"
_BY_PLACE = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True)
class Truth:
    """What is right for a sample, and how far off a result may be.

    Attributes:
        values: the oracle's results by name, fp64.
        magnitudes: size of the rounding errors of each.
        yardstick: the results of the plain low-precision backend.
    """

    values: dict[str, Tensor]
    magnitudes: dict[str, Magnitude]
    yardstick: dict[str, Tensor]


def truth_of(sample: Sample) -> Truth:
    """The oracle's results and the yardstick's, on the sample's device."""
    device = sample.inputs.q.device
    forward, backward = oracle.evaluate(
        sample.problem, sample.inputs, sample.dout, sample.dlse, sample.wanted, device=device
    )
    yardstick = get(_YARDSTICK)
    return Truth(
        values={**dict(forward.items()), **dict(backward.items())},
        magnitudes={**forward.magnitudes, **backward.magnitudes},
        yardstick=run(sample, yardstick, yardstick.claims(sample.problem, device)),
    )


def run(sample: Sample, backend: Backend, claims: Claims) -> dict[str, Tensor]:
    """Forward and backward of a backend: all it returned, by name.

    Where it claims to take any (out, lse), these are NaN outside every sequence, for they must not matter.
    """
    problem, inputs = sample.problem, sample.inputs
    with torch.no_grad():
        forward = backend.forward(problem, inputs)
        given = poison_forward(problem, inputs, forward) if claims.foreign_lse else forward
        grads = backend.backward(problem, inputs, given, sample.dout, sample.dlse, sample.wanted)
    return named(forward, grads)


def named(forward: Forward, grads: Grads) -> dict[str, Tensor]:
    """The tensors of both halves by name."""
    found = {"out": forward.out, "lse": forward.lse, **dict(grads.items())}
    return found if forward.max_logit is None else found | {"max_logit": forward.max_logit}


def judge(sample: Sample, truth: Truth, name: str, measured: Tensor, claims: Claims) -> list[Row]:
    """One tensor against its budget, per (sequence, head).

    Rows about places outside every sequence count only where the backend claims exact zeros.
    """
    rows = compare(
        sample.problem,
        sample.inputs,
        name,
        measured,
        truth.values[name],
        truth.magnitudes[name],
        truth.yardstick[name],
    )
    if claims.exact_zeros or name not in _BY_PLACE:
        return rows
    return [row for row in rows if row.sequence is not None]


def findings(
    sample: Sample, truth: Truth, results: dict[str, Tensor], claims: Claims, slack: float = 1.0
) -> Iterator[str]:
    """What is wrong with results, in words: a missing tensor, a wrong form, a budget that is exceeded.

    Args:
        sample, truth: what was asked and what is right.
        results: what was found, by name.
        claims: of the backend.
        slack: how many budgets a result may use: 1, more where it was put together from rounded parts.
    """
    for name in sorted(set(results) ^ set(truth.values)):
        yield f"{name} is {'not wanted' if name in results else 'missing'}"
    expected = _forms(sample.problem, sample.inputs)
    for name, found in results.items():
        if name not in truth.values:
            continue
        dtype, shape = expected[name]
        if found.dtype != dtype or tuple(found.shape) != shape:
            yield f"{name} is {found.dtype} {list(found.shape)}, expected {dtype} {list(shape)}"
            continue
        memory = found.t() if name == "lse" and sample.problem.layout == "thd" else found
        if not memory.is_contiguous():
            yield f"{name} has strides {found.stride()}, expected contiguous memory"
        bad = [row for row in judge(sample, truth, name, found, claims) if row.used > slack]
        if bad:
            worst = max(bad, key=lambda row: row.used)
            where = f"sequence {worst.sequence}, head {worst.head}"
            yield f"{name} is wrong in {len(bad)} places, most in {where}: {worst.finding}"


def examine(sample: Sample, backend: Backend, truth: Truth) -> list[str]:
    """Run a backend that supports the problem, and say what is wrong: nothing, if it is right.

    Beside the numbers: inputs are not written, results are fresh memory of the right shape, dtype and strides,
    exactly the wanted gradients are returned.
    """
    claims = backend.claims(sample.problem, sample.inputs.q.device)
    before = {name: tensor.clone() for name, tensor in _given(sample)}
    results = run(sample, backend, claims)
    found = [
        f"the backend wrote its input {name}"
        for name, tensor in _given(sample)
        if not same_bits(tensor, before[name])
    ]
    storages = {
        tensor.untyped_storage().data_ptr() for _, tensor in _given(sample) if tensor.numel()
    }
    found += [
        f"{name} shares memory with an input"
        for name, tensor in results.items()
        if tensor.numel() and tensor.untyped_storage().data_ptr() in storages
    ]
    return found + list(findings(sample, truth, results, claims))


def _given(sample: Sample) -> Iterator[tuple[str, Tensor]]:
    yield from sample.inputs.items()
    yield "dout", sample.dout
    if sample.dlse is not None:
        yield "dlse", sample.dlse


def _forms(problem: Problem, inputs: Inputs) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of every result."""
    B, S, H = problem.batch, problem.seqlen_q, problem.num_heads
    dtype, wide = problem.torch_dtype, problem.accumulate_dtype
    found = {
        "out": (dtype, (*inputs.q.shape[:-1], problem.head_dim_v)),
        "lse": (wide, (S, H) if problem.layout == "thd" else (B, H, S)),
        "max_logit": (torch.float32, (H,)),
    }
    for name in ("q", "k", "v", "bias", "softmax_offset"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            found[f"d{name}"] = (tensor.dtype, tuple(tensor.shape))
    return found
