"""What the regression cases share: the backends they run on, one call through the public surface, and its judge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import gradtruth
from gradtruth.arguments import Options, TensorArguments, inputs_of, max_seqlens, spec_of
from gradtruth.backends import ORDER, PEERS, Backend, get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs, Wanted
from gradtruth.errors import UnsupportedProblem
from gradtruth.verify.suite.conformance import Truth, findings, truth_of
from gradtruth.verify.suite.families import noise
from gradtruth.verify.suite.inputs import Sample

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OWN = tuple(name for name in ORDER if name not in PEERS)
WHOLE = ("reference", "unfused")  # these refuse nothing
GRADIENTS = ("dq", "dk", "dv")

_PLAIN = Problem(
    spec=Spec(right=0),
    batch=1,
    seqlen_q=128,
    seqlen_kv=128,
    num_heads=2,
    num_gqa_groups=2,
    head_dim_qk=128,
    head_dim_v=128,
    dtype="bfloat16",
)


def report(public_id: str, kind: str, right: str) -> pytest.MarkDecorator:
    """Mark a test as the regression case of a public report.

    Its docstring says what was wrong; ``kind`` is the kind of fault, ``right`` the value or property that is right.
    """
    return pytest.mark.report(public_id, kind, right)


def places() -> list[Any]:
    """Own backends and where they run: parameters. What needs a GPU is marked so."""
    found = []
    for name in OWN:
        on_cpu = get(name).supports(_PLAIN, torch.device("cpu")).ok
        if on_cpu:
            found.append(pytest.param(Own(name, torch.device("cpu")), id=name))
        if torch.cuda.is_available() or not on_cpu:
            found.append(
                pytest.param(Own(name, torch.device("cuda", 0)), id=f"{name}-cuda", marks=GPU)
            )
    return found


GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
)


@dataclass(frozen=True)
class Call:
    """What a call returned, by name, and what it was given."""

    own: Own
    sample: Sample
    results: dict[str, Tensor]

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name not in self.results:
            raise AttributeError(name)
        return self.results[name]

    def verify(self, truth: Truth | None = None) -> Call:
        """Hold every result against fp64, within the measured budget."""
        self.own.judge(self.sample, self.results, truth)
        return self


@dataclass(frozen=True)
class Own:
    """An own backend on a device."""

    name: str
    device: torch.device

    @property
    def backend(self) -> Backend:
        return get(self.name)

    def h(self, seed: int, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        """The closed-form noise of the reports, rounded to the dtype."""
        return noise(seed, *shape).float().to(self.device, dtype)

    def zeros(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def full(self, value: float, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def eye(self, rows: int, columns: int, heads: int = 1, *, dtype: torch.dtype = FP32) -> Tensor:
        """The identity as [1, rows, heads, columns]."""
        found = torch.eye(rows, columns, dtype=dtype, device=self.device)
        return found[None, :, None].expand(1, rows, heads, columns).contiguous()

    def cu(self, *offsets: int) -> Tensor:
        return torch.tensor(offsets, dtype=torch.int32, device=self.device)

    def lengths(self, *counts: int) -> dict[str, Tensor]:
        """cu_seqlens of both sides for these lengths."""
        cu = torch.tensor([0, *counts]).cumsum(0).tolist()
        return {"cu_seqlens_q": self.cu(*cu), "cu_seqlens_kv": self.cu(*cu)}

    # ------------------------------------------------------------ a call

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, *,
        dlse: Tensor | None = None, **options: Any,
    ) -> Call:  # fmt: skip
        """Forward and, with ``dout``, backward through ``attention_with_lse`` and autograd; strides as given."""
        options = dict(options)
        leaves = {"q": q, "k": k, "v": v}
        leaves |= {n: options[n] for n in ("bias", "softmax_offset") if options.get(n) is not None}
        leaves = {name: given.detach().requires_grad_() for name, given in leaves.items()}
        options |= {name: given for name, given in leaves.items() if name in options}
        try:
            out, lse = gradtruth.attention_with_lse(
                *(leaves[n] for n in "qkv"), backend=self.name, **options
            )
        except UnsupportedProblem as error:
            self.refused(error)
        results = {"out": out.detach(), "lse": lse.detach()}
        if dout is not None:
            seen = [(out, dout)] + ([] if dlse is None else [(lse, dlse)])
            grads = torch.autograd.grad(
                [y for y, _ in seen], tuple(leaves.values()), [dy for _, dy in seen]
            )
            results |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
        sample = self.sample(q, k, v, out.detach() if dout is None else dout, dlse, **options)
        return Call(self, sample, results)

    def sample(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None, **options: Any
    ) -> Sample:  # fmt: skip
        """The same as a problem and its tensors, for the oracle and for backends."""
        named = {n: options[n] for n in TensorArguments._fields if options.get(n) is not None}
        named = {
            n: given.detach() if isinstance(given, Tensor) else given for n, given in named.items()
        }
        tensors = TensorArguments(q.detach(), k.detach(), v.detach(), **named)
        chosen = Options(**{n: options[n] for n in Options._fields if n in options})
        chosen = chosen._replace(lse_grad=dlse is not None)
        spec = Spec.decode(spec_of(chosen, tensors))
        inputs = Inputs(*inputs_of(chosen, tensors))
        problem = Problem.of(spec, inputs, *max_seqlens(chosen, tensors))
        return Sample(problem=problem, inputs=inputs, dout=dout, dlse=dlse, wanted=Wanted())

    def judge(
        self,
        sample: Sample,
        results: dict[str, Tensor],
        truth: Truth | None = None,
        slack: float = 1.0,
    ) -> None:
        """Hold results against fp64, within ``slack`` times the measured budget."""
        claims = self.backend.claims(sample.problem, self.device)
        truth = truth_of(sample) if truth is None else truth
        wrong = list(findings(sample, truth, results, claims, slack))
        assert not wrong, "\n".join([sample.problem.label(), *wrong])

    def refused(self, error: UnsupportedProblem) -> None:
        """A backend of this project may refuse with reasons, but for the two that compute everything."""
        if self.name in WHOLE:
            raise error
        pytest.skip(str(error).splitlines()[-1])


# ---------------------------------------------------------------- comparisons


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def close(found: Tensor, expected: Tensor | float, units: float = 4.0) -> None:
    """Equal up to some units in the last place of the largest expected value; a GPU adds in other orders."""
    units *= 8 if found.is_cuda and found.dtype == FP32 else 1
    expected = torch.as_tensor(expected, dtype=torch.float64).cpu()
    got = found.detach().double().cpu()
    assert got.isfinite().all(), f"not finite: {got}"
    assert got.shape == expected.shape or expected.dim() == 0, (got.shape, expected.shape)
    bound = (
        units * eps(found.dtype) * max(float(expected.abs().max()) if expected.numel() else 0, 1e-6)
    )
    worst = float((got - expected).abs().max()) if got.numel() else 0.0
    assert worst <= bound, f"off by {worst:.3g}, allowed {bound:.3g}:\n{got}\n{expected}"


def same(found: Tensor, expected: Tensor) -> None:
    """Bit for bit."""
    assert torch.equal(found, expected), f"{found}\n{expected}"


def zero(*tensors: Tensor) -> None:
    """Exactly 0."""
    for tensor in tensors:
        assert not tensor.isnan().any()
        assert not tensor.any(), tensor


def vanishes(call: Call, *names: str) -> None:
    """0 by cancellation: within the rounding of its parts, whose size bounds |dout| |v| |k| |q|.

    The parts of dq are scale * P * (dP - delta) * k; dP and delta are sums over the channels of dout * v.
    """
    inputs, dout = call.sample.inputs, call.sample.dout
    top = {n: float(getattr(inputs, n).abs().max()) for n in ("q", "k", "v")}
    product = float(dout.abs().max()) * top["v"] * dout.shape[-1]
    rows = max(inputs.q.shape[:-2].numel(), 1) * inputs.q.shape[-2]
    for name in names:
        other = top["k"] if name == "dq" else top["q"] * rows
        bound = 8 * eps(FP32) * product * other * call.sample.problem.scale
        assert float(call.results[name].abs().max()) <= bound, (name, call.results[name], bound)


def finite(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        assert tensor.isfinite().all(), tensor


def mask_of(call: Call) -> Tensor:
    """What a mask probe shows, of head 0 in batch item 0: the visible keys, bool [S, T]; dv must show it too.

    Needs q = 0, v and dout the identity.
    """
    length = call.sample.problem.seqlen_q, call.sample.problem.seqlen_kv
    out, dv = call.out[0, :, 0, : length[1]], call.dv[0, :, 0, : length[0]]
    seen = out > 0
    count = seen.sum(1, keepdim=True).clamp(min=1)
    close(out, seen.double() / count)
    close(dv, out.double().t())
    return seen.cpu()


def probe(own: Own, s: int, t: int, *, dtype: torch.dtype = FP32, **options: Any) -> Call:
    """A mask probe of S queries and T keys, with channels for both, one head."""
    dims = max(s, t)
    dims += -dims % 8
    q, k = own.zeros(1, s, 1, dims, dtype=dtype), own.h(2, 1, t, 1, dims, dtype=dtype)
    return own.attend(q, k, own.eye(t, dims, dtype=dtype), own.eye(s, dims, dtype=dtype), **options)


def drawn(
    own: Own, s: int, t: int | None = None, *, batch: int = 1, heads: tuple[int, int] = (2, 2),
    d: int = 16, dv: int | None = None, dtype: torch.dtype = FP32, form: str = "bshd",
) -> list[Tensor]:  # fmt: skip
    """q, k, v, dout = H(1..4), laid out as the format says; for thd the batch is 1 and left away."""
    t, dv = s if t is None else t, d if dv is None else dv
    shapes = ((s, heads[0], d), (t, heads[1], d), (t, heads[1], dv), (s, heads[0], dv))
    found = []
    for seed, (length, number, width) in enumerate(shapes, 1):
        lead = {"bshd": (batch, length), "sbhd": (length, batch), "thd": (length,)}[form]
        found.append(own.h(seed, *lead, number, width, dtype=dtype))
    return found


def negative(tensors: list[Tensor], logit: float) -> list[Tensor]:
    """q, k, v, dout with every score near ``logit``: a tenth of the values, and one channel for the score."""
    q, k, v, dout = (0.1 * x for x in tensors)
    q[..., 0] = 1.0
    k[..., 0] = logit * q.shape[-1] ** 0.5
    return [q, k, v, dout]
