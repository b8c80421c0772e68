"""reference and unfused on a GPU: the values, and the guarantees that only mean something there."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tests.backends.definition import Drawn, define, draw
from tests.backends.test_own import compare, results, same_bits

from gradtruth.backends import get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs, Wanted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GPU = torch.device("cuda", 0)


@pytest.fixture(params=["reference", "unfused"])
def backend(request):
    return get(request.param)


@contextmanager
def no_sync():
    """The host may not wait for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype, says torch
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(drawn: Drawn) -> Drawn:
    inputs = Inputs(**{name: tensor.to(GPU) for name, tensor in drawn.inputs.items()})
    dlse = None if drawn.dlse is None else drawn.dlse.to(GPU)
    return replace(drawn, inputs=inputs, dout=drawn.dout.to(GPU), dlse=dlse)


def run(drawn: Drawn, backend) -> dict[str, torch.Tensor]:
    forward = backend.forward(drawn.problem, drawn.inputs)
    grads = drawn.backward(backend, forward)
    return {"out": forward.out, "lse": forward.lse, **dict(grads.items())}


@pytest.mark.parametrize("seed", range(40))
def test_definition(backend, seed):
    drawn = draw(seed)
    found = {name: x.cpu() for name, x in results(on_gpu(drawn), backend).items()}
    compare(found, define(drawn), 1e-13, 1e-6)


@pytest.mark.parametrize("seed", range(40, 60))
def test_no_sync_and_same_bits(backend, seed):
    drawn = on_gpu(draw(seed, dtype=torch.bfloat16))
    first = run(drawn, backend)
    with no_sync():
        second = run(drawn, backend)
    assert same_bits(first, second)


def large(dtype: torch.dtype, B: int = 3, S: int = 200, **spec) -> Drawn:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(B, S, h, 64, generator=generator).to(GPU, dtype) for h in (4, 2, 2, 4)
    )
    inputs = Inputs(q=q, k=k, v=v)
    return Drawn(Problem.of(Spec(**spec), inputs), inputs, dout, None, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_sequences_do_not_depend_on_the_batch(backend, dtype):
    whole = large(dtype, right=0)
    assert backend.claims(whole.problem, GPU).batch_invariant
    expected = run(whole, backend)
    for n in range(3):
        part = slice(n, n + 1)
        inputs = Inputs(**{name: x[part] for name, x in whole.inputs.items()})
        alone = Drawn(Problem.of(whole.problem.spec, inputs), inputs, whole.dout[part], None, [])
        assert same_bits(run(alone, backend), {name: x[part] for name, x in expected.items()})


@pytest.mark.parametrize("seed", [60, 61, 62, 63])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_captured_in_a_graph_and_replayed_with_other_content(backend, seed, layout):
    drawn = on_gpu(draw(seed, dtype=torch.float16, layout=layout, lengths="cu_seqlens"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(drawn, backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(drawn, backend)
    drawn.inputs.q.mul_(0.5)
    for cu in (drawn.inputs.cu_seqlens_q, drawn.inputs.cu_seqlens_kv):
        cu.copy_(cu // 2)
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(captured, run(drawn, backend))


@pytest.mark.parametrize("standing", [False, True])
def test_tf32_only_where_the_spec_allows_it(backend, standing):
    exact, loose = large(torch.float32), large(torch.float32, allow_tf32=True)
    expected = run(exact, backend)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = standing
    try:
        assert same_bits(run(exact, backend), expected)
        assert same_bits(run(loose, backend), expected) == (not standing)
        assert torch.backends.cuda.matmul.allow_tf32 == standing
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_reference_memory_at_8192():
    """Bytes beyond the inputs. The scores of two heads would be 512 MB."""
    drawn = large(torch.float32, B=1, S=8192)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward = get("reference").forward(drawn.problem, drawn.inputs)
    get("reference").backward(drawn.problem, drawn.inputs, forward, drawn.dout, None, Wanted())
    assert 1 << 20 < torch.cuda.max_memory_allocated() - before < 400 << 20
