"""The budget of what is made from a stored out knows that out may underflow."""

from __future__ import annotations

import pytest

from gradtruth.backends import get
from gradtruth.testing import assert_verified
from gradtruth.verify.suite.conformance import findings, run, truth_of
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.recipe import Recipe

# The weight of the only key is near 1e-6, so that out is subnormal in fp16; the sink takes the rest.
FAINT = Recipe.decode(
    '{"arrangement":"wide","dout":"other_layout","family":"peaked","places":[[0,1,0,1]],"problem":{"batch":1,'
    '"dtype":"float16","head_dim_qk":64,"head_dim_v":64,"num_gqa_groups":2,"num_heads":4,"seqlen_kv":1,"seqlen_q":1,'
    '"spec":{"alignment":"bottom_right","layout":"sbhd","left":1,"right":1,"softmax":"learnable"}},"seed":1013975}'
)


@pytest.mark.parametrize("backend", ["reference", "unfused"])
def test_a_sink_gradient_from_an_underflowing_out_is_right(backend):
    assert_verified(FAINT, backend)


@pytest.mark.parametrize("head", [0, 1])
def test_a_sink_gradient_is_still_wrong_where_nothing_underflows(head):
    sample, backend = make(FAINT), get("reference")
    claims = backend.claims(sample.problem, sample.inputs.q.device)
    truth, results = truth_of(sample), run(sample, backend, claims)
    results["dsoftmax_offset"][head] *= 1.5 if head == 0 else 1.02
    assert any("dsoftmax_offset" in line for line in findings(sample, truth, results, claims))
