"""reference: blocks, memory, precision. What it shares with unfused is in test_own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradtruth.backends import get
from gradtruth.backends.reference import backward as reference_backward
from gradtruth.backends.reference import forward as reference_forward
from gradtruth.backends.reference.schedule import Schedule, schedule
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Forward, Inputs, Wanted

CPU = torch.device("cpu")
REFERENCE = get("reference")


def problem(S, T=None, dtype=torch.float32, H=2, terms=None, **spec):
    """q, k, v of one sequence, dout and the problem, with the terms and the seed that the spec needs."""
    T, generator = T or S, torch.Generator().manual_seed(S)
    q, k, v, dout = (torch.randn(1, n, H, 16, generator=generator).to(dtype) for n in (S, T, T, S))
    seed = torch.tensor(5) if spec.get("dropout_p") else None
    inputs = Inputs(q=q, k=k, v=v, dropout_seed=seed, **(terms or {}))
    return Problem.of(Spec(**spec), inputs), inputs, dout


def run(problem, inputs, dout, forward=None):
    found = REFERENCE.forward(problem, inputs)
    grads = REFERENCE.backward(problem, inputs, forward or found, dout, None, Wanted())
    return {"out": found.out, "lse": found.lse, **dict(grads.items())}


@pytest.mark.parametrize(("S", "T"), [(63, 150), (64, 64), (65, 200), (200, 130)])
@pytest.mark.parametrize("band", [(None, None), (None, 0), (17, 0), (70, 70), (5, None), (0, 0)])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_any_number_of_rows_gives_the_same(monkeypatch, S, T, band, alignment):
    given = problem(S, T, torch.float64, left=band[0], right=band[1], alignment=alignment)
    found = []
    for rows in (1000, 64, 7):
        for module in (reference_forward, reference_backward):
            monkeypatch.setattr(
                module, "schedule", lambda *_, n=rows: Schedule(rows=n, scores=1 << 30)
            )
        found.append(run(*given))
    assert found[0]["out"].any()
    for other in found[1:]:
        for name, right in found[0].items():
            torch.testing.assert_close(other[name], right, rtol=0, atol=1e-13, msg=name)


class Largest(TorchDispatchMode):
    """The largest number of elements, and of bytes, that any operator returned in memory of its own."""

    elements = 0
    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(
                    self.elements, tensor.untyped_storage().nbytes() // tensor.element_size()
                )
        if func is torch.ops.aten.bmm.default:
            self.products += args[0].numel() * args[1].shape[2]
        return found


HIDDEN = (torch.arange(640) % 7 == 3)[None]
TERMS = {
    "bias": {"bias": torch.linspace(-1, 1, 640).view(1, 1, 1, 640)},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "lengths": {"padding_mask_q": HIDDEN, "padding_mask_kv": HIDDEN},
    "softmax": {"softmax_offset": torch.tensor([0.5, 0.25])},
}


@pytest.mark.parametrize(
    "feature",
    [
        {},
        {"right": 0},
        {"softcap": 2.0},
        {"dropout_p": 0.2},
        {"bias": "post_scale"},
        {"bias": "pre_scale"},
        {"softmax": "learnable"},
        {"alibi": True},
        {"lengths": "padding_mask"},
    ],
    ids=str,
)
def test_no_tensor_of_queries_by_keys(feature):
    S = 640
    given = problem(S, terms=TERMS.get(next(iter(feature), "")), **feature)
    with Largest() as seen:
        run(*given)
    block = 2 * 64 * S  # H x rows x T
    assert (
        block <= seen.elements <= block + 64 * 64 < S * S
    )  # dropout draws in whole groups of four


def test_a_window_costs_its_width():
    S, width = 1024, 32
    with Largest() as full:
        run(*problem(S))
    with Largest() as banded:
        run(*problem(S, left=width, right=0))
    assert banded.products <= full.products * (64 + width) / S
    assert banded.elements < full.elements


def test_a_packed_batch_costs_the_sum_of_its_squares():
    n, length = 8, 64
    _, inputs, dout = problem(n * length)
    cu = torch.arange(n + 1, dtype=torch.int32) * length
    packed = Inputs(q=inputs.q[0], k=inputs.k[0], v=inputs.v[0], cu_seqlens_q=cu, cu_seqlens_kv=cu)
    with Largest() as seen:
        run(Problem.of(Spec(layout="thd", lengths="cu_seqlens"), packed), packed, dout[0])
    products = 5  # as bmm: q.k and p.v, then q.k, dout.v and dS.k; dk and dv are added to in place
    assert seen.products == products * n * 2 * length * length * 16


PEAK = """
import torch
from gradtruth.backends import get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs, Wanted

torch.set_num_threads(1)
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
def run(S):
    q, k, v, dout = (torch.randn(1, S, 2, 64) for _ in range(4))
    inputs, backend = Inputs(q=q, k=k, v=v), get("reference")
    problem = Problem.of(Spec(right=0), inputs)
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak starts anew
    before = peak()
    forward = backend.forward(problem, inputs)
    backend.backward(problem, inputs, forward, dout, None, Wanted())
    return (peak() - before) / 1024
run(64)
print(run(8192))
"""


def test_peak_memory_at_8192():
    """Resident memory beyond the inputs, in MB. S x S scores in fp32 alone would be 512 for two heads."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert 1 < float(done.stdout) < 120


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "feature", [{}, {"right": 0}, {"dropout_p": 0.4}, {"softcap": 1.0}], ids=str
)
def test_low_precision_is_rounded_once(dtype, feature):
    """The same values in fp64, from the same out and lse, rounded at the end: P and dS never are."""
    given, inputs, dout = problem(100, 130, dtype, **feature)
    found = REFERENCE.forward(given, inputs)
    single = run(given, inputs, dout, found)
    wide = replace(inputs, q=inputs.q.double(), k=inputs.k.double(), v=inputs.v.double())
    forward = Forward(out=found.out.double(), lse=found.lse.double())
    double = run(Problem.of(given.spec, wide), wide, dout.double(), forward)
    half = torch.finfo(dtype).eps / 2
    for name in ("out", "dq", "dk", "dv"):
        assert single[name].dtype == dtype
        error = (single[name].double() - double[name]).abs()
        assert (error <= half * double[name].abs() + 2e-6).all(), name
        assert error.max() > 1e-5, name  # the values are not all representable


def test_schedule_knows_no_batch():
    given, _, _ = problem(8)
    plan = schedule(given, CPU)
    assert plan == schedule(replace(given, batch=7, seqlen_q=10**6, seqlen_kv=10**6), CPU)
    assert plan.rows_for(2, 8192) == plan.rows == 64
    assert plan.rows_for(64, 1 << 17) == 1
    assert [plan.rows_for(heads, 0) for heads in (0, 1)] == [64, 64]
    assert all(
        h * t * plan.rows_for(h, t) <= plan.scores for h in (1, 8, 32) for t in (64, 8192, 1 << 17)
    )
