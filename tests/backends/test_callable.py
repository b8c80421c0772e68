"""``module:function`` as a backend."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import gradtruth
from gradtruth.backends import get
from gradtruth.backends.peers.callable import Function, of
from gradtruth.backends.peers.keywords import KEYWORD_CODES
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.support import ReasonCode
from gradtruth.errors import InvalidProblem, UnsupportedProblem
from gradtruth.testing import assert_verified, unpoisoned
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import CHECKS
from gradtruth.verify.engine import find, verify_case
from gradtruth.verify.findings import Row, Verdict
from gradtruth.verify.suite.conformance import examine, truth_of
from gradtruth.verify.suite.recipe import Recipe
from gradtruth.verify.suite.suite import suite

CPU = torch.device("cpu")


def problem(**fields):
    spec = {k: fields.pop(k) for k in list(fields) if k in Spec.__dataclass_fields__}
    sizes = {"batch": 2, "seqlen_q": 9, "seqlen_kv": 9, "num_heads": 2, "num_gqa_groups": 2}
    sizes |= {"head_dim_qk": 8, "head_dim_v": 8, "dtype": "float32"}
    return Problem(spec=Spec(**spec), **sizes | fields)


def plain(query, key, value, *, attn_mask_type="no_mask", softmax_scale=None):
    """SDPA, which knows a mask type and a scale."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = attn_mask_type == "causal"
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale).transpose(
        1, 2
    )


class Spy:
    """What a function was called with."""

    def __init__(self):
        self.keywords = None

    def __call__(self, query, key, value, **keywords):
        self.keywords = keywords
        return torch.zeros_like(query)


def test_every_problem_of_the_suite_in_words():
    # Our own public function through the adapter: a keyword that is lost, or means something else, is a finding.
    said: set[str] = set()

    def function(query, key, value, **keywords):
        said.update(keywords)
        pair = gradtruth.attention_with_lse(
            query, key, value, backend="reference", check_inputs=False, **keywords
        )
        return pair if with_lse else pair[0]

    backend, taken, wrong = Function("own", function), 0, []
    for recipe in suite().recipes[3::23]:
        sample = unpoisoned(recipe)
        if not backend.supports(sample.problem, CPU).ok:
            continue
        taken += 1
        truth = truth_of(sample)
        for with_lse in {True, sample.problem.spec.lse_grad}:
            found = examine(sample, backend, truth)
            wrong += [f"{recipe.label()} with lse {with_lse}: {line}" for line in found]
    assert not wrong, "\n".join(wrong[:8])
    assert taken > 40
    assert said == set(KEYWORD_CODES) - {"deterministic", "batch_invariant"}


def test_only_what_is_no_default_is_said():
    spy = Spy()
    backend = Function("spy", spy)
    for fields, keywords in (
        ({}, {}),
        ({"right": 0}, {"attn_mask_type": "causal"}),
        ({"left": 3, "right": 0}, {"attn_mask_type": "causal", "window_size": (3, 0)}),
        (
            {"right": 0, "alignment": "bottom_right"},
            {"attn_mask_type": "causal_bottom_right"},
        ),
        ({"left": 3, "alignment": "bottom_right"}, {"window_size": (3, -1)}),
        ({"left": 3}, {"window_size": (3, -1), "bottom_right_diagonal": False}),
        ({"scale": 0.5, "softcap": 2.0}, {"softmax_scale": 0.5, "softcap": 2.0}),
        ({"softmax": "off-by-one"}, {"softmax_type": "off-by-one"}),
        ({"deterministic": False}, {"deterministic": False}),
        ({"batch_invariant": True, "layout": "sbhd"}, {"batch_invariant": True, "qkv_format": "sbhd"}),
    ):  # fmt: skip
        sample = unpoisoned(Recipe(problem=problem(**fields)))
        backend.forward(sample.problem, sample.inputs)
        assert spy.keywords == keywords


def test_a_function_that_knows_some_keywords():
    backend = Function("plain", plain)
    for fields in ({}, {"right": 0}, {"scale": 0.3}):
        assert_verified(problem(**fields), backend)
    for fields, keyword, code, value in (
        ({"left": 2, "right": 0}, "window_size", "window", "(2, 0)"),
        ({"layout": "sbhd"}, "qkv_format", "layout", "'sbhd'"),
        ({"softcap": 3.0}, "softcap", "softcap", "3.0"),
        ({"lengths": "cu_seqlens"}, "cu_seqlens_q", "lengths", ""),
        ({"alibi": True}, "alibi_slopes", "alibi", ""),
        ({"dropout_p": 0.5}, "dropout_p", "dropout", "0.5"),
    ):
        reasons = backend.supports(problem(**fields), CPU).reasons
        (found,) = [r for r in reasons if f"takes no {keyword}" in r.text and value in r.text][:1]
        assert found.code is ReasonCode(code)
        with pytest.raises(UnsupportedProblem, match=keyword):
            assert_verified(problem(**fields), backend)


def test_what_no_keyword_says():
    backend = Function("spy", Spy())
    for fields, code in (
        ({"max_logit": True}, "max_logit"),
        ({"lengths": "extents"}, "lengths"),
        ({"lengths": "padding_mask", "arbitrary": True, "mask_shape": (1, 1, 9, 9)}, "mask"),
    ):
        (reason,) = backend.supports(problem(**fields), CPU).reasons
        assert reason.code is ReasonCode(code)
    (reason,) = backend.supports(problem(), torch.device("meta")).reasons
    assert reason.code is ReasonCode.DEVICE


def test_storage_offsets_are_known_from_tensors_only():
    def function(query, key, value, *, qkv_format, attn_mask_type, cu_seqlens_q, cu_seqlens_kv):
        raise AssertionError("not to be called")

    thd = problem(layout="thd", lengths="cu_seqlens")
    sample = unpoisoned(Recipe(problem=thd, places=((0, 3, 0, 3), (5, 4, 5, 4))))
    backend = Function("f", function)
    assert backend.supports(sample.problem, CPU).ok
    reasons = backend.supports_content(sample.problem, sample.inputs).reasons
    assert [r.text for r in reasons] == [
        f"the function takes no cu_seqlens_{side}_padded" for side in ("q", "kv")
    ]
    with pytest.raises(UnsupportedProblem, match="cu_seqlens_q_padded"):
        backend.forward(sample.problem, sample.inputs)


def test_a_wrong_gradient_is_found():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.1

    def function(query, key, value):
        return plain(query, Wrong.apply(key), value)

    with pytest.raises(AssertionError, match="dk is wrong") as caught:
        assert_verified(problem(), Function("f", function))
    assert "dq is wrong" not in str(caught.value)


def test_lse_beside_out():
    function = partial(gradtruth.attention_with_lse, backend="reference")
    assert_verified(Recipe(problem=problem(lse_grad=True), dlse=True), Function("f", function))

    def shifted(query, key, value):
        out, lse = function(query, key, value)
        return out, lse + 1

    with pytest.raises(AssertionError, match="lse is wrong"):
        assert_verified(problem(), Function("f", shifted))
    with pytest.raises(UnsupportedProblem, match="returns out alone"):
        assert_verified(Recipe(problem=problem(lse_grad=True), dlse=True), Function("p", plain))


def test_what_is_returned_is_looked_at():
    sample = unpoisoned(Recipe(problem=problem()))
    for returned, text in (
        (None, "NoneType, expected out or"),
        ((1, 2, 3), r"\(int, int, int\), expected out or"),
        (torch.zeros(2, 9, 16), r"shape \[2, 9, 16\], expected \[2, 9, 2, 8\]"),
    ):
        backend = Function("f", lambda *_, returned=returned: returned)
        with pytest.raises(InvalidProblem, match=text):
            backend.forward(sample.problem, sample.inputs)


def test_a_signature_that_cannot_be_called():
    def function(query, key, value, block_size):
        raise AssertionError("not to be called")

    (reason,) = Function("f", function).supports(problem(), CPU).reasons
    assert "block_size" in reason.text


def test_modules_are_functions():
    class Attention(torch.nn.Module):
        def forward(self, query, key, value):
            return plain(query, key, value)

    backend = Function("m", Attention())
    assert_verified(problem(), backend)
    assert not backend.supports(problem(right=0), CPU).ok


def test_dropout_claims_the_mask_only_when_the_seed_is_told():
    def without(query, key, value, dropout_p=0.0): ...

    dropped = problem(dropout_p=0.5)
    assert not Function("f", without).claims(dropped, CPU).global_dropout
    assert Function("f", without).claims(problem(), CPU).global_dropout
    assert Function("s", Spy()).claims(dropped, CPU).global_dropout


SOURCE = """
import gradtruth
from gradtruth.backends import get
reference = get("reference")
number = 3
class Kind: pass
class Space:
    @staticmethod
    def attend(query, key, value):
        return gradtruth.attention(query, key, value, backend="reference")
def attend(query, key, value):
    return gradtruth.attention(query, key, value, backend="reference")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "gt_users_module.py").write_text(SOURCE)
    (tmp_path / "gt_broken_module.py").write_text("import gt_missing_dependency\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    for name in ("gt_users_module", "gt_broken_module"):
        sys.modules.pop(name, None)
    assert sys.path == before


def test_how_it_is_named(folder):
    for text in (
        "gt_users_module:attend",
        "gt_users_module:Space.attend",
        "gt_users_module.py:attend",
        f"{folder}/gt_users_module.py:attend",
    ):
        backend = of(text)
        assert backend.name == text
        assert_verified(problem(), backend)
    assert of("gt_users_module:reference") is get("reference")
    assert get("gt_users_module:attend") is get("gt_users_module:attend")
    sample = unpoisoned(Recipe(problem=problem()))
    out = gradtruth.attention(
        sample.inputs.q, sample.inputs.k, sample.inputs.v, backend="gt_users_module:attend"
    )
    assert torch.equal(
        out,
        gradtruth.attention(sample.inputs.q, sample.inputs.k, sample.inputs.v, backend="reference"),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gt_no_such:f", "expected a module that can be imported before the colon: No module"),
        ("gt_users_module.inner:f", "expected a module that can be imported before the colon"),
        (
            "gt_users_module:atend",
            "expected a name in gt_users_module: it has no 'atend', but Kind",
        ),
        ("gt_users_module:Space.no", "it has no 'no', but attend"),
        ("gt_users_module:number", "which is int, expected a function or a backend"),
        ("gt_users_module:Kind", "which is a class, expected a function or an object"),
        ("gt_users_module:", "expected module:function or file.py:function"),
        (":attend", "expected module:function or file.py:function"),
        ("nowhere.py:attend", "expected a file before the colon: no nowhere.py"),
        ("..:f", "and '..' is no module"),
    ],
)
def test_errors_name_what_was_expected(folder, text, expected):
    with pytest.raises(InvalidProblem) as caught:
        get(text)
    assert expected in str(caught.value)
    assert f"backend is {text!r}" in str(caught.value)


def test_a_module_that_lacks_something_says_what(folder):
    with pytest.raises(ModuleNotFoundError, match="gt_missing_dependency"):
        of("gt_broken_module:f")


def test_verify_shows_what_only_tensors_tell_as_a_refusal():
    def function(query, key, value, *, qkv_format, attn_mask_type, cu_seqlens_q, cu_seqlens_kv):
        raise AssertionError("not to be called")

    backend = Function("f", function)
    thd = problem(layout="thd", lengths="cu_seqlens")
    sample = unpoisoned(Recipe(problem=thd, places=((0, 3, 0, 3), (5, 4, 5, 4))))
    case = Case(problem=sample.problem, inputs=sample.inputs, dout=sample.dout)
    (row,) = [
        event for event in verify_case(case, [backend], name="gaps") if isinstance(event, Row)
    ]
    assert row.verdict is Verdict.REFUSES
    assert row.detail == tuple(
        f"the function takes no cu_seqlens_{side}_padded" for side in ("q", "kv")
    )
    assert find(case, backend, CHECKS[0]) == []
