"""The Triton backend without a GPU: the suite in Triton's interpreter, shielding, schedules, refusals.

The interpreter is switched on before Triton is imported, so these tests run in processes of their own. Whole suites
on a GPU: test_triton_gpu.py; code for GPUs that are not here: test_triton_compiled.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.backends import triton_sample

from gradtruth.backends import get
from gradtruth.backends.triton.schedule import Parts, padded, parts_of, tiles_for
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec

ROOT = Path(__file__).parents[2]
REPORTS_DRAWN = 6  # of some 240 on a GPU
CHUNKS = 2  # processes: they run beside each other under pytest-xdist
HEAD = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
from tests.backends import triton_sample as t
t.mended()
import torch
torch.set_num_threads(1)
from gradtruth.verify.suite.conformance import truth_of
from gradtruth.verify.suite.inputs import make
wrong = []
"""
SUITE = """
chosen = t.selection(220.0)
assert len(chosen) >= 30, len(chosen)
with t.interpreted_backend() as backend:
    for at, recipe in enumerate(chosen):
        if at % int(sys.argv[2]) != int(sys.argv[1]):
            continue
        sample = make(recipe)
        wrong += [f"{recipe.label()}: {x}" for x in t.examined(sample, backend, truth_of(sample))]
"""
SHARED = """
chosen = [r for r in t.selection(220.0) if t.sharing_matters(r.problem)][:8:2]
assert len(chosen) >= 4, len(chosen)
with t.interpreted_backend() as backend, t.shared_out():
    for recipe in chosen:
        sample = make(recipe)
        wrong += [f"{recipe.label()}: {x}" for x in t.examined(sample, backend, truth_of(sample))]
"""
SEQUENCES = """
wrong += [x] if (x := t.sequences_fault()) else []
"""
# A whole neighbour of NaN: out, lse, dq, dk, dv of the other sequences keep their bits, whatever the layout.
NEIGHBOUR = """
from dataclasses import replace
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs, Wanted
def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).half()
def bits(problem, inputs, dout):
    forward = backend.forward(problem, inputs)
    grads = backend.backward(problem, inputs, forward, dout, None, Wanted())
    return {"out": forward.out, "lse": forward.lse, **dict(grads.items())}
lengths = [21, 18, 7]
ends = torch.tensor([0, 21, 39, 46], dtype=torch.int32)
with t.interpreted_backend() as backend:
    for kind, right in (("thd", 0), ("bshd", None)):
        if kind == "thd":
            q, k, v, dout = draw(46, 2, 20), draw(46, 1, 20), draw(46, 1, 12), draw(46, 2, 12)
        else:
            q, k, v, dout = (draw(3, 21, h, d) for h, d in ((2, 20), (1, 20), (1, 12), (2, 12)))
        given = Inputs(q=q, k=k, v=v, cu_seqlens_q=ends, cu_seqlens_kv=ends)
        spec = Spec(layout=kind, lengths="cu_seqlens", right=right)
        clean = bits(Problem.of(spec, given), given, dout)
        for bad in range(3):
            place = slice(int(ends[bad]), int(ends[bad + 1])) if kind == "thd" else bad
            tensors = [x.clone() for x in (q, k, v, dout)]
            for x in tensors:
                x[place] = float("nan")
            given = replace(given, q=tensors[0], k=tensors[1], v=tensors[2])
            found = bits(Problem.of(spec, given), given, tensors[3])
            for name, x in found.items():
                for n in range(3):
                    here = slice(int(ends[n]), int(ends[n + 1])) if kind == "thd" else n
                    mine, other = x[here], clean[name][here]
                    if n != bad and not torch.equal(mine, other):
                        wrong.append(f"{kind} right={right}: NaN of sequence {bad} reached {name} of {n}")
                    if n == bad and not mine.isnan().any():
                        wrong.append(f"{kind} right={right}: {name} of the NaN sequence is finite")
"""
# batch_invariant: alone, in a batch, beside longer ones, whatever the grid; without it the grid may decide.
INVARIANT = """
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs, Wanted
torch.manual_seed(0)
q, k, v, dout = (torch.randn(3, 50, h, 16).half() for h in (2, 1, 1, 2))
def bits(invariant, batch):
    given = Inputs(q=q[batch], k=k[batch], v=v[batch])
    problem = Problem.of(Spec(batch_invariant=invariant), given)
    assert backend.claims(problem, torch.device("cpu")).batch_invariant == invariant
    forward = backend.forward(problem, given)
    grads = backend.backward(problem, given, forward, dout[batch], None, Wanted())
    return [forward.out, forward.lse, grads.dq, grads.dk, grads.dv]
def same(invariant):
    whole = bits(invariant, slice(0, 3))
    alone = [bits(invariant, slice(n, n + 1)) for n in range(3)]
    return all(torch.equal(x[n], one[0]) for n in range(3) for x, one in zip(whole, alone[n]))
from gradtruth.backends.triton import arguments, schedule
from unittest.mock import patch
with t.interpreted_backend() as backend, patch.object(schedule, "_LEAST_BLOCKS", 1):
    with patch.object(arguments, "processors", lambda _: 5):
        wrong += [] if same(True) else ["batch_invariant=True: bits depend on the batch"]
        wrong += [] if not same(False) else ["the test does not tell: no work was shared out"]
"""
DOCUMENTS = """
with t.interpreted_backend() as backend:
    wrong += t.documents_faults(backend) + t.hostile_faults(backend)
"""
# The checks on two cases, but for those of a GPU, and those that call so often that the interpreter takes minutes.
CHECKS = """
from tests.checks.small_cases import dense, packed
from gradtruth.verify.checks import CHECKS, Judged, Subject
from gradtruth.verify.standard import Standard
LEFT_OUT = {"call_order", "strides", "compile_equals_eager", "allocator_churn", "mask_equivalents"}
ONCE = {"tile_merge", "shift_invariance", "gqa_expand", "shielded", "autograd_contract", "determinism"}
ONCE |= {"poisoned_memory", "batch_slice", "batch_permutation", "head_slice", "outside_unchanged", "inputs_unchanged"}
ONCE |= {"exact_zeros", "backward-from-oracle"}
LEFT_OUT |= {"graph_stream", "large_offsets", "launch_limits"}
answered = set()
with t.interpreted_backend() as backend, t.quiet():
    for case in (packed(), dense(torch.float32, lse_grad=True, s=9)):
        standard = Standard(case)
        for check in CHECKS:
            if check.name in LEFT_OUT or (case.inputs.q.dtype == torch.float32 and check.name in ONCE):
                continue
            found = list(check.run(Subject(case, backend, standard)))
            answered |= {check.name} if not found or any(isinstance(x, Judged) for x in found) else set()
            wrong += [f"{check.name}: {x}" for x in found if isinstance(x, Judged) and x.kind]
assert len(answered) >= 17, answered
"""
# Regression cases of public reports, drawn once: with the interpreter the backend is one that runs on the CPU.
REPORTS = """
import random
import gradtruth.backends.triton as room
import pytest
room._device_reasons = lambda *_: []
class Draw:
    @staticmethod
    def pytest_collection_modifyitems(config, items):
        own = [x for x in items if "-triton" in x.name.replace("-triton-lang", "").replace("-triton#", "")]
        own = [x for x in own if x.path.stem not in ("test_sizes", "test_strides")]  # minutes here
        random.Random(1).shuffle(own)
        items[:] = own[:int(sys.argv[1])]
        print(len(items), "drawn")
with t.quiet():
    rc = pytest.main(
        ["tests/reports", "-q", "-rfE", "-p", "no:randomly", "-p", "no:cacheprovider", "-W", "ignore"],
        plugins=[Draw],
    )
wrong += [] if rc == 0 else [f"pytest ended with {rc}"]
"""
TAIL = """
print("\\n".join(wrong) or "right")
"""


def interpreted(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script + TAIL, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=900,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_pairwise_sample_of_the_suite(chunk):
    assert interpreted(SUITE, chunk, CHUNKS) == "right"


def test_checks_in_the_interpreter():
    assert interpreted(CHECKS) == "right"


def test_reports_in_the_interpreter():
    found = interpreted(REPORTS, REPORTS_DRAWN)
    assert f"{REPORTS_DRAWN} drawn" in found
    assert f"{REPORTS_DRAWN} passed" in found, found
    assert found.endswith("right")


def test_grids_foreign_content_and_bits_in_the_interpreter():
    """Work shared out, hostile lengths, a neighbour of NaN, bits alone and in a batch, hidden tiles: a process takes
    seconds to start, so all in one."""
    assert interpreted(SHARED + SEQUENCES + NEIGHBOUR + INVARIANT + DOCUMENTS) == "right"


def test_the_sample_covers_what_it_is_for():
    """Every dtype, layout, mask, bias shape class, softmax and family, and most pairs of them."""
    chosen = triton_sample.selection(220.0)
    seen = {}
    for recipe in chosen:
        for name, value in triton_sample.features(recipe).items():
            seen.setdefault(name, set()).add(value)
    for name in ("arbitrary", "alibi", "softcap", "dropout", "dlse", "holes", "longer", "odd"):
        assert seen[name] == {False, True}, name
    assert seen["dtype"] == {"float16", "bfloat16", "float32"}
    assert seen["layout"] == {"bshd", "sbhd", "thd"}
    assert seen["softmax"] == {"vanilla", "off-by-one", "learnable"}
    assert seen["bias"] == {"none", "pre_scale", "post_scale"}
    assert len(seen["bias_shape"]) >= 10
    assert len(seen["family"]) >= 6


def problem(**given) -> Problem:
    sizes = {
        "batch": 2, "seqlen_q": 8, "seqlen_kv": 8, "num_heads": 2, "num_gqa_groups": 1,
        "head_dim_qk": 64, "head_dim_v": 64, "dtype": "float16",
    }  # fmt: skip
    spec = given.pop("spec", Spec())
    return Problem(spec=spec, **{**sizes, **given})


def test_refusals_name_value_and_limit():
    device = torch.device("cpu")
    found = get("triton").supports(
        problem(dtype="float64", head_dim_qk=577, head_dim_v=600), device
    )
    text = "\n".join(map(str, found.reasons))
    assert "dtype is float64" in text
    assert "head_dim_qk is 577, at most 576" in text
    assert "head_dim_v is 600, at most 576" in text
    found = get("triton").supports(problem(dtype="float32", head_dim_qk=257), device)
    assert "head_dim_qk is 257, at most 256 fits the shared memory in fp32" in str(found.reasons)


@pytest.mark.parametrize(("shared", "limit"), [(101_376, 256), (166_912, 576), (232_448, 576)])
def test_wide_head_dims_need_shared_memory(monkeypatch, shared, limit):
    from gradtruth.backends import triton as room

    monkeypatch.setattr(room, "_shared_memory", lambda _: shared)
    monkeypatch.setattr(room, "_capability", lambda _: (9, 0))
    for dim in (256, 257, 576, 577):
        found = get("triton").supports(problem(head_dim_qk=dim), torch.device("cuda", 0))
        assert found.ok == (dim <= limit)
        if not found.ok and limit == 256:
            assert f"at most 256 fits the {shared} bytes of shared memory" in str(found.reasons[0])


def test_other_devices_are_refused():
    for kind in ("meta", "mps"):
        assert f"device is {kind}" in str(get("triton").supports(problem(), torch.device(kind)))


@pytest.mark.parametrize(
    ("dim", "expected"), [(1, 16), (16, 16), (17, 32), (80, 128), (192, 256), (576, 1024)]
)
def test_padded_head_dims(dim, expected):
    assert padded(dim) == expected


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dim", [1, 64, 65, 128, 192, 256])
def test_schedules_do_not_look_at_the_batch(dim, dtype, large):
    one = problem(head_dim_qk=dim, dtype=dtype)
    many = replace(one, batch=64, seqlen_q=4096, seqlen_kv=4096)
    assert tiles_for(one, large=large) == tiles_for(many, large=large)
    for tile in (found := tiles_for(one, large=large)).forward, found.keys, found.queries:
        assert tile.block_m >= 16 <= tile.block_n


def test_small_grids_are_shared_out():
    one = problem(batch=1, seqlen_q=64, seqlen_kv=8192, num_heads=16, num_gqa_groups=2)
    # 16 programs on 132 processors: as many parts as give two waves.
    assert parts_of(one, 132, 16, 64, 8192, by_heads=False) == Parts(16, 512, 1)
    # Heads of a group first, then queries as far as every part has four blocks.
    assert parts_of(one, 132, 32, 32, 64, by_heads=True) == Parts(8, 64, 8)
    assert parts_of(one, 132, 16, 32, 4096, by_heads=True) == Parts(16, 2048, 8)
    assert parts_of(one, 132, 132, 64, 8192, by_heads=False) == Parts()
    assert parts_of(one, 0, 1, 64, 8192, by_heads=False) == Parts()
    forbidden = replace(one, spec=Spec(batch_invariant=True))
    assert parts_of(forbidden, 132, 16, 64, 8192, by_heads=False) == Parts()
    for length in (0, 2**30):
        assert parts_of(one, 132, 1, 64, length, by_heads=False) == Parts()


@pytest.mark.parametrize("length", [257, 1000, 8192, 10_001])
@pytest.mark.parametrize("programs", [1, 3, 40, 131])
def test_parts_cover_every_place_in_whole_blocks(length, programs):
    one = problem(batch=1, seqlen_q=64, seqlen_kv=length, num_heads=8, num_gqa_groups=2)
    for by_heads in (False, True):
        found = parts_of(one, 132, programs, 32, length, by_heads=by_heads)
        if found.count > 1:
            assert found.count % found.shares == 0
            assert found.chunk % 32 == 0
            assert found.count // found.shares * found.chunk >= length
