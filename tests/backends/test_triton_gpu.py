"""The Triton backend on a GPU: what neither the suite nor the checks look at.

The whole suite: ``python -m benchmarks.conformance``; checks: ``gradtruth doctor --backend triton``; reports:
tests/reports.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gradtruth
from gradtruth.backends import get
from gradtruth.backends.triton.schedule import parts_of, schedule
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs, Wanted
from gradtruth.verify.suite.conformance import examine, truth_of
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.recipe import Recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16


def drawn(*shape, dtype=BF16, seed=0):
    generator = torch.Generator(GPU).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=GPU).to(dtype)


def qkvo(b, s, t, h, g, d, dv=None, dtype=BF16):
    shapes = ((b, s, h, d), (b, t, g, d), (b, t, g, dv or d), (b, s, h, dv or d))
    return [drawn(*shape, dtype=dtype, seed=at) for at, shape in enumerate(shapes)]


def both(spec, inputs, dout, wanted=None):
    problem, backend = Problem.of(spec, inputs), get("triton")
    forward = backend.forward(problem, inputs)
    grads = backend.backward(problem, inputs, forward, dout, None, wanted or Wanted())
    return {"out": forward.out, "lse": forward.lse, **dict(grads.items())}


def same(one, other):
    return all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.parametrize(("d", "dv"), [(576, 512), (512, 512), (320, 64), (192, 128), (1, 3)])
def test_head_dims(d, dv):
    problem = Problem(
        spec=Spec(right=0), batch=2, seqlen_q=70, seqlen_kv=70, num_heads=2, num_gqa_groups=1,
        head_dim_qk=d, head_dim_v=dv, dtype="bfloat16",
    )  # fmt: skip
    assert get("triton").supports(problem, GPU).ok
    sample = make(Recipe(problem=problem), GPU)
    assert examine(sample, get("triton"), truth_of(sample)) == []


def test_a_new_length_compiles_nothing():
    import triton

    compiled = []
    saved = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(given["key"])
    try:

        def once(s, t):
            q, k, v, dout = qkvo(2, s, t, 64, 32, 48)
            both(Spec(right=0), Inputs(q=q, k=k, v=v), dout)

        once(1024, 1024)
        assert len(compiled) >= 4
        compiled.clear()
        for s, t in ((1040, 1024), (17, 2064), (999, 1001), (1, 16)):
            once(s, t)
        # Small grids are shared out, which is another kernel: at most once each.
        assert len(compiled) <= 4, compiled
        compiled.clear()
        for s, t in ((2048, 1999), (33, 3000), (5, 17)):
            once(s, t)
        assert compiled == []
    finally:
        triton.knobs.runtime.jit_post_compile_hook = saved


def test_a_graph_of_thd_takes_other_lengths():
    """Nothing about the lengths is fixed when a graph is captured."""
    q, k, v, dout = (drawn(300, h, 64, seed=at) for at, h in enumerate((4, 2, 2, 4)))
    cu = torch.tensor([0, 100, 100, 300], dtype=torch.int32, device=GPU)
    inputs = Inputs(q=q, k=k, v=v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    spec = Spec(layout="thd", lengths="cu_seqlens", right=0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both(spec, inputs, dout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = both(spec, inputs, dout)
    for ends in ([0, 100, 100, 300], [0, 7, 250, 260], [0, 0, 0, 0], [0, 300, 300, 300]):
        cu.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        found = {name: x.clone() for name, x in captured.items()}
        assert same(found, both(spec, inputs, dout)), ends


def test_the_same_bits_alone_and_in_a_batch():
    q, k, v, dout = qkvo(5, 700, 700, 4, 1, 64)
    for invariant in (True, False):
        spec = Spec(right=0, batch_invariant=invariant)
        whole = both(spec, Inputs(q=q, k=k, v=v), dout)
        alone = [
            both(spec, Inputs(q=q[n : n + 1], k=k[n : n + 1], v=v[n : n + 1]), dout[n : n + 1])
            for n in range(5)
        ]
        equal = all(
            torch.equal(x[n], one[name][0])
            for n, one in enumerate(alone)
            for name, x in whole.items()
        )
        assert equal or not invariant
    one = Problem.of(Spec(right=0), Inputs(q=q[:1], k=k[:1], v=v[:1]))
    assert parts_of(one, 132, 11, schedule(one, GPU).keys.block_m, 700, by_heads=True).count > 1


def test_memory_is_what_the_formula_says():
    """Beyond results: level and delta, 8 B H S bytes, for a grid that is not shared out."""
    b, s, h, d = 2, 4096, 32, 64
    q, k, v, dout = qkvo(b, s, s, h, h, d)
    inputs = Inputs(q=q, k=k, v=v)
    problem, backend = Problem.of(Spec(right=0), inputs), get("triton")

    def peak():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward = backend.forward(problem, inputs)
        held = forward.out.nbytes + forward.lse.nbytes
        assert torch.cuda.max_memory_allocated() - before <= held + 4096
        grads = backend.backward(problem, inputs, forward, dout, None, Wanted())
        held += sum(x.nbytes for _, x in grads.items())
        return torch.cuda.max_memory_allocated() - before - held

    peak()
    assert peak() <= 8 * b * h * s + 4096


def test_wanted_changes_no_bit():
    q, k, v, dout = qkvo(1, 500, 300, 8, 2, 128)
    inputs = Inputs(q=q, k=k, v=v, bias=drawn(1, 8, 1, 300))
    spec = Spec(bias="post_scale")
    whole = both(spec, inputs, dout)
    for name in ("dq", "dk", "dv", "dbias"):
        wanted = replace(Wanted(False, False, False, False, False), **{name: True})
        found = both(spec, inputs, dout, wanted)
        assert set(found) == {"out", "lse", name}
        assert torch.equal(found[name], whole[name])


def test_compiled_with_dynamic_shapes():
    """One graph for all lengths, without a break."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    def attend(q, k, v):
        return gradtruth.attention(q, k, v, attn_mask_type="causal", backend="triton").square()

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=count)
    for s in (64, 130, 257):
        q, k, v, _ = (x.requires_grad_() for x in qkvo(2, s, s, 4, 2, 64))
        found = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
        expected = torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert len(graphs) == 1


def test_hostile_lengths_stay_inside():
    """Under compute-sanitizer this shows that nothing outside is touched; here, that it ends."""
    from benchmarks.conformance import hostile

    hostile()
