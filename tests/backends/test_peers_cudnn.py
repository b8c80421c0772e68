"""cudnn over a stand-in that runs graphs on the CPU (cudnn_fake): dims, strides, offsets, attributes and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.backends import cudnn_fake
from tests.backends.peer_recipes import peer_recipes

from gradtruth.backends import get
from gradtruth.backends.peers.cudnn_frontend import CudnnFrontend
from gradtruth.backends.peers.cudnn_terms import graph_terms, metadata_strides, strides_of
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.support import ReasonCode
from gradtruth.core.tensors import Wanted
from gradtruth.testing import assert_verified, unpoisoned
from gradtruth.verify.suite.conformance import examine, truth_of
from gradtruth.verify.suite.recipe import Recipe

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BACKEND = CudnnFrontend()
SIZES = {
    "batch": 2, "seqlen_q": 20, "seqlen_kv": 24, "num_heads": 4, "num_gqa_groups": 2, "head_dim_qk": 16,
    "head_dim_v": 16, "dtype": "bfloat16",
}  # fmt: skip
AXES = {
    "source": ("full", "cu_seqlens"),
    "window": ("none", "w,0", "w,w", "0,0", "w,-1", "-1,w"),
    "dims": ("8", "32", "64", "96", "256", "192/128", "64/128"),
    "softmax": ("vanilla", "vanilla", "off-by-one", "learnable"),
    "wanted": ("all", "dq", "dk", "dk,dv", "dsoftmax_offset"),
    "size": ("small",),
}


def problem_of(**given):
    spec = {name: given.pop(name) for name in list(given) if name in Spec.__dataclass_fields__}
    return Problem(spec=Spec(**spec), **{**SIZES, **given})


@pytest.fixture
def library(monkeypatch):
    cudnn_fake.install(monkeypatch)
    return cudnn_fake


def graph_of(problem, half="forward", longest=None):
    terms = graph_terms(
        problem, half, metadata_strides(problem), longest or (problem.seqlen_q, problem.seqlen_kv)
    )
    return terms, {tensor.name: tensor for tensor in terms.tensors}


def test_suite_recipes(library):
    done, layouts = 0, set()
    for recipe in peer_recipes(50, seed=4, **AXES):
        if BACKEND.supports(recipe.problem, CPU).ok:
            sample = unpoisoned(recipe)
            found = examine(sample, BACKEND, truth_of(sample))
            assert not found, "\n".join([sample.problem.label(), recipe.encode(), *found])
            done += 1
            layouts.add(recipe.problem.layout)
    assert done >= 35
    assert layouts == {"bshd", "sbhd", "thd"}
    assert all(run["stream"] == 77 for run in library.RUNS)


@pytest.mark.parametrize("shape", [(1, 4, 20, 24), (2, 4, 20, 24), (2, 1, 20, 24), (1, 1, 20, 24)])
def test_bias_and_its_gradient(shape, library):
    problem = problem_of(bias="post_scale", bias_shape=shape, bias_dtype="bfloat16", right=0)
    assert_verified(Recipe(problem=problem), BACKEND)
    assert library.GRAPHS[-1].options["use_deterministic_algorithm"] is False


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_max_logit(layout, library):
    lengths = "cu_seqlens" if layout == "thd" else "full"
    places = ((0, 7, 0, 9), (9, 5, 12, 12)) if layout == "thd" else ()
    problem = problem_of(max_logit=True, layout=layout, lengths=lengths)
    garbage = CudnnFrontend(results=lambda *a: torch.full(a[0], 1e4, dtype=a[1]))
    assert_verified(Recipe(problem=problem, places=places), garbage)


def test_dropout_is_drawn_from_the_seed_without_looking_at_it(library):
    # The stand-in drops as gradtruth does, one sequence at a time.
    problem = problem_of(dropout_p=0.3, batch=1)
    assert not BACKEND.claims(problem, CUDA).global_dropout
    assert_verified(Recipe(problem=problem), BACKEND)
    terms, tensors = graph_of(problem)
    assert terms.dropout_p == 0.3
    assert tensors["seed"].dtype == tensors["philox_offset"].dtype == "int64"


def test_dense_graphs():
    _, bshd = graph_of(problem_of())
    assert bshd["q"].dim == (2, 4, 20, 16)
    assert bshd["q"].stride == (20 * 64, 16, 64, 1)
    assert bshd["k"].dim == (2, 2, 24, 16)
    assert bshd["stats"].dim == (2, 4, 20, 1)
    assert bshd["stats"].stride == (80, 20, 1, 1)
    assert bshd["stats"].dtype == "float32"
    assert bshd["o"].output
    assert not any(tensor.offset for tensor in bshd.values())
    _, sbhd = graph_of(problem_of(layout="sbhd"), "backward")
    assert sbhd["v"].stride == (32, 16, 64, 1)
    assert sbhd["dv"].stride == (32, 16, 64, 1)
    assert sbhd["dv"].output
    assert not sbhd["o"].output


def test_thd_graphs():
    problem = problem_of(layout="thd", lengths="cu_seqlens", head_dim_v=32)
    terms, found = graph_of(problem, "backward", (8, 9))
    assert terms.padding
    assert found["q"].dim == (2, 4, 8, 16)
    assert found["q"].stride[1:] == (16, 64, 1)
    assert found["dv"].dim == (2, 2, 9, 32)
    assert found["stats"].stride[1:] == (1, 4, 1)
    offsets = {name: tensor.offset for name, tensor in found.items() if tensor.offset}
    assert offsets == {
        "q": "offset_q", "k": "offset_k", "v": "offset_v", "o": "offset_o", "stats": "offset_stats",
        "do": "offset_do", "dq": "offset_dq", "dk": "offset_dk", "dv": "offset_dv",
    }  # fmt: skip
    assert found["length_q"].dim == (2, 1, 1, 1)
    assert strides_of(torch.empty(20, 4, 16), problem, 8) == (512, 16, 64, 1)
    assert not terms.wide_offsets
    wide = problem_of(layout="thd", lengths="cu_seqlens", seqlen_q=2**26, head_dim_qk=64)
    assert graph_of(wide, "backward", (8, 9))[0].wide_offsets


@pytest.mark.parametrize(
    ("given", "left", "right", "bottom_right"),
    [
        ({}, None, None, False), ({"alignment": "bottom_right"}, None, None, False), ({"right": 0}, None, 0, False),
        ({"left": 3, "right": 0, "alignment": "bottom_right"}, 4, 0, True), ({"left": 0}, 1, None, False),
        ({"right": 2}, None, 2, False),
    ],
)  # fmt: skip
def test_bands(given, left, right, bottom_right):
    terms, _ = graph_of(problem_of(**given))
    assert (terms.left, terms.right, terms.bottom_right) == (left, right, bottom_right)


def test_ragged_offsets_are_in_elements(library):
    problem = problem_of(layout="thd", lengths="cu_seqlens", head_dim_v=32)
    sample = unpoisoned(Recipe(problem=problem, places=((2, 0, 0, 3), (4, 3, 5, 6))))
    padded = torch.tensor([2, 4, 20], dtype=torch.int32)
    sample = replace(sample, inputs=replace(sample.inputs, cu_seqlens_q_padded=padded))
    seen = {}

    def remember(self, pack, workspace, handle=None):
        seen.update({tensor.name: data for tensor, data in pack.items()})

    library.Graph.execute, kept = remember, library.Graph.execute
    try:
        BACKEND.forward(sample.problem, sample.inputs)
    finally:
        library.Graph.execute = kept
    assert seen["offset_q"].tolist() == [2 * 64, 4 * 64, 20 * 64]
    assert seen["offset_o"].tolist() == [2 * 128, 4 * 128, 20 * 128]
    assert seen["offset_stats"].tolist() == [2 * 4, 4 * 4, 20 * 4]
    assert seen["offset_v"].tolist()[:2] == [0, 5 * 64]
    assert seen["length_q"].tolist() == [0, 3]
    assert seen["length_kv"].tolist() == [3, 6]


def test_deterministic_only_where_cudnn_has_it(library):
    for given, wanted in (
        ({}, True), ({"deterministic": False}, False), ({"softmax": "learnable"}, False),
    ):  # fmt: skip
        problem = problem_of(**given)
        assert BACKEND.claims(problem, CUDA).deterministic is wanted
        assert_verified(Recipe(problem=problem), BACKEND)
        assert library.GRAPHS[-1].options["use_deterministic_algorithm"] is wanted


def test_claims_are_few():
    claims = BACKEND.claims(problem_of(), CUDA)
    assert claims.foreign_lse
    assert not (claims.pure)
    assert not (claims.shielded)
    assert not (claims.exact_zeros)
    assert not (claims.no_sync)


def test_memory_is_handed_in(library):
    made = []

    def workspace(size, device):
        made.append(torch.full((size,), 255, dtype=torch.uint8, device=device))
        return made[-1]

    filled = []

    def results(shape, dtype, device):
        filled.append(torch.full(shape, torch.nan, dtype=dtype, device=device))
        return filled[-1]

    sample = unpoisoned(
        Recipe(
            problem=problem_of(layout="thd", lengths="cu_seqlens"),
            places=((0, 7, 0, 9), (9, 5, 12, 9)),
        )
    )
    backend = CudnnFrontend(workspace=workspace, results=results)
    forward = backend.forward(sample.problem, sample.inputs)
    grads = backend.backward(sample.problem, sample.inputs, forward, sample.dout, None, Wanted())
    assert [
        run["workspace"] is scratch for run, scratch in zip(library.RUNS, made, strict=True)
    ] == [True, True]
    assert [scratch.numel() for scratch in made] == [library.SCRATCH] * 2
    assert {x.data_ptr() for x in filled} >= {forward.out.data_ptr(), grads.dk.data_ptr()}
    # The gap keeps what was handed in; by default it is 0 there.
    assert forward.out[7:9].isnan().all()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        plain = BACKEND.forward(sample.problem, sample.inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not plain.out[7:9].any()
    assert (forward.lse[7:9] == -torch.inf).all()
    assert (plain.lse[7:9] == -torch.inf).all()


def test_backward_of_foreign_halves_sees_nothing_outside(library):
    problem = problem_of(layout="thd", lengths="cu_seqlens")
    sample = unpoisoned(Recipe(problem=problem, places=((0, 7, 0, 9), (9, 5, 12, 9))))
    own = get("reference").forward(sample.problem, sample.inputs)
    own.out[7:9] = torch.nan
    seen = {}
    kept = library.Graph.execute

    def remember(self, pack, workspace, handle=None):
        seen.update({tensor.name: data.clone() for tensor, data in pack.items()})
        kept(self, pack, workspace, handle)

    library.Graph.execute = remember
    try:
        BACKEND.backward(sample.problem, sample.inputs, own, sample.dout, None, Wanted())
    finally:
        library.Graph.execute = kept
    assert not seen["o"][7:9].any()
    assert not seen["stats"][7:9].any()
    torch.testing.assert_close(seen["stats"][:7, :, 0], own.lse[:7], rtol=0, atol=0)


def test_graphs_are_kept_by_terms_alone(library):
    first, second = (unpoisoned(Recipe(problem=problem_of(), seed=seed)) for seed in (1, 2))
    for sample in (first, second):
        BACKEND.forward(sample.problem, sample.inputs)
    assert len(library.GRAPHS) == 1
    assert library.GRAPHS[0].io is library.data_type.BFLOAT16
    assert library.GRAPHS[0].compute is library.GRAPHS[0].intermediate is library.data_type.FLOAT
    scaled = replace(first.problem, spec=replace(first.problem.spec, scale=0.5))
    BACKEND.forward(scaled, first.inputs)
    assert len(library.GRAPHS) == 2


REFUSED = [
    ({"dtype": "float32"}, ReasonCode.DTYPE, "dtype is float32"),
    ({"head_dim_qk": 20}, ReasonCode.HEAD_DIM, "head_dim_qk is 20"),
    ({"lengths": "padding_mask"}, ReasonCode.LENGTHS, "padding mask"),
    ({"arbitrary": True, "mask_shape": (1, 1, 20, 24)}, ReasonCode.MASK, "attention_mask is"),
    ({"bias": "pre_scale", "bias_shape": (1, 4, 20, 24), "bias_dtype": "bfloat16"}, ReasonCode.BIAS, "pre_scale"),
    ({"bias": "post_scale", "bias_shape": (1, 4, 20, 24), "bias_dtype": "float32"}, ReasonCode.BIAS, "float32"),
    ({"bias": "post_scale", "bias_shape": (1, 1, 1, 24), "bias_dtype": "bfloat16"}, ReasonCode.BIAS, "20 x 24"),
    ({"alibi": True}, ReasonCode.ALIBI, "alibi_slopes"),
    ({"softcap": 30.0}, ReasonCode.SOFTCAP, "softcap is 30"),
    ({"lse_grad": True}, ReasonCode.LSE_GRAD, "lse may receive a gradient"),
    ({"dropout_p": 1.0}, ReasonCode.DROPOUT, "dropout_p is 1"),
    ({"max_logit": True, "softmax": "off-by-one"}, ReasonCode.MAX_LOGIT, "includes the sink"),
    ({"seqlen_kv": 0, "softmax": "learnable"}, ReasonCode.SIZE, "nothing to attend"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "code", "text"), REFUSED, ids=[str(r[2]) for r in REFUSED])
def test_refusals_name_value_and_limit(given, code, text, library):
    (reason,) = BACKEND.supports(problem_of(**given), CPU).reasons
    assert reason.code == code
    assert text in reason.text


def test_refusals_of_cudnn_are_in_its_words(library):
    problem = problem_of(
        bias="post_scale",
        bias_shape=(1, 4, 20, 24),
        bias_dtype="bfloat16",
        right=0,
        alignment="bottom_right",
    )
    reasons = BACKEND.supports(problem, CPU).reasons
    assert [reason.text for reason in reasons] == [
        f"cuDNN refuses the {half}: Bottom right causal mask is only supported with is_bias=False"
        for half in ("forward", "backward")
    ]


def test_absence_is_a_reason():
    reasons = {r.code: r.text for r in get("cudnn").supports(problem_of(), CPU).reasons}
    assert reasons[ReasonCode.DEVICE] == "device is cpu, a CUDA device is needed"
    assert "nvidia-cudnn-frontend is not installed" in reasons[ReasonCode.NOT_INSTALLED]


@pytest.mark.parametrize("empty", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_kv": 0}], ids=str)
def test_nothing_to_attend(empty, library):
    assert_verified(Recipe(problem=problem_of(**empty)), BACKEND)
    assert not library.RUNS
