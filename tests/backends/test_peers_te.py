"""te_module and te_fused over stand-ins with TransformerEngine's signatures (te_fakes): the mapping is judged."""

from __future__ import annotations

import logging
import types
from dataclasses import replace

import pytest
import torch
from tests.backends import te_fakes
from tests.backends.peer_recipes import peer_recipes

from gradtruth.backends import get
from gradtruth.backends.peers.te_fused import TeFused
from gradtruth.backends.peers.te_module import TeModule
from gradtruth.backends.peers.versions import loaded_cudnn, peer_versions
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.support import ReasonCode
from gradtruth.testing import assert_verified, unpoisoned
from gradtruth.verify.suite.conformance import examine, truth_of
from gradtruth.verify.suite.recipe import Recipe

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BACKENDS = {"te_fused": TeFused(), "te_module": TeModule()}
SIZES = {
    "batch": 2, "seqlen_q": 20, "seqlen_kv": 24, "num_heads": 4, "num_gqa_groups": 2, "head_dim_qk": 16,
    "head_dim_v": 16, "dtype": "bfloat16",
}  # fmt: skip
AXES = {
    "source": ("full", "cu_seqlens"),
    "window": ("none", "w,0", "w,w", "0,0"),
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
    te_fakes.install(monkeypatch)
    return te_fakes


def calls(name):
    return [given for called, given in te_fakes.CALLS if called == name]


def verify(recipe, backend):
    sample = unpoisoned(recipe)
    found = examine(sample, backend, truth_of(sample))
    assert not found, "\n".join([sample.problem.label(), recipe.encode(), *found])


@pytest.mark.parametrize(
    ("name", "ragged"),
    [("te_fused", True), ("te_fused", False), ("te_module", True)],
    ids=["te_fused by token", "te_fused by sequence", "te_module"],
)
def test_suite_recipes(name, ragged, library, monkeypatch):
    monkeypatch.setitem(library.STATISTICS, "ragged", ragged)
    backend, done, layouts = BACKENDS[name], 0, set()
    for recipe in peer_recipes(50, seed=1 + ragged, **AXES):
        if backend.supports(recipe.problem, CPU).ok:
            verify(recipe, backend)
            done += 1
            layouts.add(recipe.problem.layout)
    assert done >= 30
    assert layouts == {"bshd", "sbhd", "thd"}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 4, 20, 24), (2, 4, 20, 24), (2, 1, 20, 24), (1, 1, 20, 24)])
def test_bias_and_its_gradient(name, shape, library):
    problem = problem_of(bias="post_scale", bias_shape=shape, bias_dtype="bfloat16", right=0)
    assert_verified(Recipe(problem=problem), BACKENDS[name])
    assert not any(given["deterministic"] for given in calls("fused_attn_bwd") + calls("forward"))


@pytest.mark.parametrize("name", BACKENDS)
def test_max_logit_is_what_the_library_returned(name, library):
    problem = problem_of(max_logit=True, layout="thd", lengths="cu_seqlens")
    sample = unpoisoned(Recipe(problem=problem, places=((0, 7, 0, 9), (9, 5, 12, 12))))
    forward = BACKENDS[name].forward(sample.problem, sample.inputs)
    exact = truth_of(sample).values["max_logit"]
    assert forward.max_logit.dtype == torch.float32
    # In q's dtype, so no further from the truth than rounding to it.
    torch.testing.assert_close(
        forward.max_logit, exact.to(torch.bfloat16).float(), rtol=0, atol=0.01
    )


def test_module_takes_slopes_and_softcap(library, monkeypatch):
    recipe = Recipe(problem=problem_of(alibi=True, right=0, alignment="bottom_right"))
    assert_verified(recipe, BACKENDS["te_module"])
    capped = problem_of(softcap=30.0)
    (reason,) = BACKENDS["te_module"].supports(capped, CPU).reasons
    assert "FusedAttention as it does not support softcap" in reason.text
    # With flash-attn installed the selection takes it, and the module is told.
    monkeypatch.setattr("gradtruth.backends.peers.te_module.selection_reasons", lambda *_: [])
    assert_verified(Recipe(problem=capped), BACKENDS["te_module"])
    assert calls("DotProductAttention")[-1]["softcap"] == 30.0


def test_dropout_of_the_functions_is_drawn_from_the_seed(library):
    problem = problem_of(dropout_p=0.3, layout="thd", lengths="cu_seqlens", right=0)
    backend = BACKENDS["te_fused"]
    assert not backend.claims(problem, CUDA).global_dropout
    # The stand-in draws what gradtruth draws from one seed, so both halves must have got it.
    assert_verified(Recipe(problem=problem), backend)
    seed = calls("fused_attn_bwd")[-1]["aux_ctx_tensors"][1]
    assert seed[0] != 0
    assert seed[1] == 0


def test_dropout_of_the_module_repeats_and_leaves_the_generator_alone(library):
    sample = unpoisoned(Recipe(problem=problem_of(dropout_p=0.3, dtype="float16")))
    backend, problem, inputs = BACKENDS["te_module"], sample.problem, sample.inputs
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = (backend.forward(problem, inputs).out for _ in range(2))
    grads = backend.backward(problem, inputs, None, sample.dout, None, sample.wanted)
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())
    other = replace(inputs, dropout_seed=inputs.dropout_seed + 1)
    assert not torch.equal(first, backend.forward(problem, other).out)
    # out is linear in v, so the backward dropped what the forward dropped.
    a, b = (sample.dout.double() * first).sum(), (grads.dv.double() * inputs.v).sum()
    assert abs(a - b) <= 0.01 * abs(a)


def test_second_report_reaches_the_functions_as_it_was_filed(library):
    problem = problem_of(
        layout="thd", lengths="cu_seqlens", scale=0.1, dtype="float16", seqlen_q=12, seqlen_kv=12, num_heads=2,
        num_gqa_groups=1, head_dim_qk=8, head_dim_v=8, max_seqlen_q=8, max_seqlen_kv=8,
    )  # fmt: skip
    recipe = Recipe(problem=problem, places=((0, 0, 0, 3), (4, 3, 4, 6)))
    sample = unpoisoned(recipe)
    padded = torch.tensor([0, 4, 12], dtype=torch.int32)
    sample = replace(
        sample,
        inputs=replace(sample.inputs, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded),
    )
    assert not examine(sample, BACKENDS["te_fused"], truth_of(sample))
    given = calls("fused_attn_bwd")[-1]
    assert given["cu_seqlens_q"].tolist() == [0, 0, 3]
    assert given["cu_seqlens_kv"].tolist() == [0, 3, 9]
    assert (
        given["cu_seqlens_q_padded"].tolist()
        == given["cu_seqlens_kv_padded"].tolist()
        == [0, 4, 12]
    )
    assert (given["max_seqlen_q"], given["max_seqlen_kv"], given["attn_scale"]) == (8, 8, 0.1)
    assert given["deterministic"] is True
    assert (given["qkv_layout"], given["attn_mask_type"]) == ("thd_thd_thd", "padding")
    assert given["aux_ctx_tensors"][0].shape == (12, 2, 1)


@pytest.mark.parametrize("ragged", [True, False], ids=["by token", "by sequence"])
def test_statistics_outside_every_sequence(ragged, library, monkeypatch):
    monkeypatch.setitem(library.STATISTICS, "ragged", ragged)
    problem = problem_of(layout="thd", lengths="cu_seqlens")
    sample = unpoisoned(Recipe(problem=problem, places=((0, 7, 0, 9), (9, 5, 12, 9))))
    backend = BACKENDS["te_fused"]
    forward = backend.forward(sample.problem, sample.inputs)
    assert (forward.lse[7:9] == -torch.inf).all()
    assert (forward.lse[14:] == -torch.inf).all()
    assert forward.lse[:7].isfinite().all()
    # Without max_seqlen the longest slot is the bound.
    assert calls("fused_attn_fwd")[-1]["max_seqlen_q"] == 9
    assert calls("fused_attn_fwd")[-1]["max_seqlen_kv"] == 12
    backend.backward(sample.problem, sample.inputs, forward, sample.dout, None, sample.wanted)
    stats = calls("fused_attn_bwd")[-1]["aux_ctx_tensors"][0]
    assert not (stats[7:9] if ragged else stats[0, :, 7:]).any()


@pytest.mark.parametrize(
    ("packing", "layout", "named"),
    [
        ("3hd", "bshd", "bs3hd"), ("h3d", "sbhd", "sbh3d"), ("2hd", "bshd", "bshd_bs2hd"), ("h2d", "thd", "thd_th2d"),
        ("3hd", "thd", "t3hd"),
    ],
)  # fmt: skip
def test_packed_buffers_are_named_and_not_copied(packing, layout, named, library):
    sizes = {"seqlen_q": 20, "seqlen_kv": 20}
    if packing in ("3hd", "h3d"):
        sizes["num_gqa_groups"] = 4
    lengths = "cu_seqlens" if layout == "thd" else "full"
    problem = problem_of(layout=layout, packing=packing, lengths=lengths, **sizes)
    recipe = Recipe(problem=problem, arrangement=packing)
    verify(recipe, BACKENDS["te_fused"])
    sample = unpoisoned(recipe)
    library.CALLS.clear()
    BACKENDS["te_fused"].forward(sample.problem, sample.inputs)
    (given,) = calls("fused_attn_fwd")
    assert given["qkv_layout"] == named
    assert given["v"].data_ptr() == sample.inputs.v.data_ptr()
    # A Spec that names a buffer beside tensors that do not share one, or not in this order: separate tensors.
    inputs, other = sample.inputs, unpoisoned(recipe).inputs
    for apart in (
        replace(inputs, k=inputs.k.clone()),
        replace(inputs, k=other.k),
        replace(inputs, k=inputs.v, v=inputs.k),
    ):
        out = BACKENDS["te_fused"].forward(sample.problem, apart).out
        assert calls("fused_attn_fwd")[-1]["qkv_layout"].count("_") == 2
        assert torch.equal(out, get("reference").forward(sample.problem, apart).out)


def test_determinism_is_asked_for_where_the_library_has_it(library):
    plain, sink = problem_of(), problem_of(softmax="learnable")
    for backend in BACKENDS.values():
        assert backend.claims(plain, CUDA).deterministic
        assert not backend.claims(problem_of(deterministic=False), CUDA).deterministic
        assert not backend.claims(sink, CUDA).deterministic
    assert_verified(Recipe(problem=sink), BACKENDS["te_module"])
    assert not torch.are_deterministic_algorithms_enabled()
    verify(Recipe(problem=plain), BACKENDS["te_module"])
    assert calls("forward")[-1]["deterministic"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_reports_name_a_cudnn_older_than_torch_was_built_with(monkeypatch):
    library = types.SimpleNamespace(getRuntimeVersion=lambda: (9, 14, 0))
    monkeypatch.setattr(torch._C, "_cudnn", library, raising=False)
    assert loaded_cudnn() == 91400
    assert peer_versions()["cudnn"] == "9.14.0"
    monkeypatch.delattr(torch._C, "_cudnn")
    assert loaded_cudnn() is None


def test_claims_are_few():
    problem = problem_of()
    fused, module = (BACKENDS[name].claims(problem, CUDA) for name in ("te_fused", "te_module"))
    assert fused.foreign_lse
    assert not module.foreign_lse
    for claims in (fused, module):
        assert not (claims.pure)
        assert not (claims.shielded)
        assert not (claims.exact_zeros)
        assert not (claims.no_sync)


REFUSED = [
    ({"dtype": "float32"}, ReasonCode.DTYPE, "dtype is float32"),
    ({"head_dim_qk": 20}, ReasonCode.HEAD_DIM, "head_dim_qk is 20"),
    ({"head_dim_v": 264}, ReasonCode.HEAD_DIM, "head_dim_v is 264, a multiple of 8 up to 256"),
    ({"lengths": "padding_mask"}, ReasonCode.LENGTHS, "padding mask"),
    ({"arbitrary": True, "mask_shape": (1, 1, 20, 24)}, ReasonCode.MASK, "attention_mask is"),
    ({"left": 3}, ReasonCode.WINDOW, "window is (3, -1)"),
    ({"right": 3}, ReasonCode.WINDOW, "window is (-1, 3)"),
    ({"bias": "pre_scale", "bias_shape": (1, 4, 20, 24), "bias_dtype": "bfloat16"}, ReasonCode.BIAS, "pre_scale"),
    ({"bias": "post_scale", "bias_shape": (1, 4, 20, 24), "bias_dtype": "float32"}, ReasonCode.BIAS, "float32"),
    ({"bias": "post_scale", "bias_shape": (1, 1, 1, 24), "bias_dtype": "bfloat16"}, ReasonCode.BIAS, "20 x 24"),
    ({"lse_grad": True}, ReasonCode.LSE_GRAD, "lse may receive a gradient"),
    ({"dropout_p": 1.0}, ReasonCode.DROPOUT, "dropout_p is 1"),
    ({"max_logit": True, "softmax": "off-by-one"}, ReasonCode.MAX_LOGIT, "includes the sink"),
    ({"scale": -0.2}, ReasonCode.SOFTMAX, "must be positive"),
    ({"seqlen_kv": 0, "softmax": "learnable"}, ReasonCode.SIZE, "nothing to attend"),
]  # fmt: skip


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("given", "code", "text"), REFUSED, ids=[str(r[2]) for r in REFUSED])
def test_refusals_name_value_and_limit(name, given, code, text, library):
    (reason,) = BACKENDS[name].supports(problem_of(**given), CPU).reasons
    assert reason.code == code
    assert text in reason.text


def test_functions_take_no_slopes_and_no_softcap(library):
    for given, code in (
        ({"alibi": True}, ReasonCode.ALIBI),
        ({"softcap": 30.0}, ReasonCode.SOFTCAP),
    ):
        (reason,) = BACKENDS["te_fused"].supports(problem_of(**given), CPU).reasons
        assert reason.code == code


@pytest.mark.parametrize("name", BACKENDS)
def test_refusals_of_the_selection_are_in_its_words(name, library):
    logger = logging.getLogger("DotProductAttention")
    before = (
        list(logger.handlers),
        logger.level,
        logger.propagate,
        library.AttentionLogging._log_level,
    )
    (reason,) = BACKENDS[name].supports(problem_of(head_dim_v=72), CPU).reasons
    assert reason.code == ReasonCode.VERSION
    assert "hidden_dim d_v is 72 (a refusal of cuDNN)" in reason.text
    after = (
        list(logger.handlers),
        logger.level,
        logger.propagate,
        library.AttentionLogging._log_level,
    )
    assert before == after


def test_selection_is_asked_about_the_problem(library):
    problem = problem_of(
        layout="thd",
        lengths="cu_seqlens",
        right=0,
        left=5,
        alignment="bottom_right",
        softmax="learnable",
    )
    assert BACKENDS["te_fused"].supports(problem, CPU).ok
    (asked,) = calls("get_attention_backend")
    assert asked["qkv_layout"] == "thd_thd_thd"
    assert asked["attn_mask_type"] == "padding_causal_bottom_right"
    assert (asked["window_size"], asked["bottom_right_diagonal"]) == ((5, 0), True)
    assert (asked["num_tokens_q"], asked["num_tokens_kv"]) == (20, 24)
    assert (asked["softmax_type"], asked["deterministic"]) == ("learnable", False)
    assert (asked["num_heads"], asked["num_gqa_groups"]) == (4, 2)


@pytest.mark.parametrize("name", BACKENDS)
def test_absence_is_a_reason(name):
    reasons = {reason.code: reason.text for reason in get(name).supports(problem_of(), CPU).reasons}
    assert reasons[ReasonCode.DEVICE] == "device is cpu, a CUDA device is needed"
    assert "transformer_engine is not installed" in reasons[ReasonCode.NOT_INSTALLED]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("empty", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_kv": 0}], ids=str)
def test_nothing_to_attend(name, empty, library):
    assert_verified(Recipe(problem=problem_of(**empty)), BACKENDS[name])
    assert not calls("fused_attn_fwd")
    assert not calls("forward")
