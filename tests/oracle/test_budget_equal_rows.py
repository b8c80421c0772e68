"""Where all rows of dout are one, dP errs alike for every query, and dk adds that up: no alarm, and no blindness."""

from __future__ import annotations

import pytest

from gradtruth.backends import get
from gradtruth.verify.suite.conformance import findings, run, truth_of
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.recipe import Recipe

# A search for false alarms found this one: values of 8 and more, each key's dP off by 4 eps for all queries together.
EXPANDED = Recipe.decode(
    '{"arrangement":"second_row","dout":"expanded_all","family":"large_offset","places":[[0,198,0,240],[0,198,0,240],'
    '[0,198,0,240]],"poison":"large","problem":{"batch":3,"dtype":"float32","head_dim_qk":128,"head_dim_v":128,'
    '"num_gqa_groups":2,"num_heads":4,"seqlen_kv":240,"seqlen_q":198,"spec":{"layout":"sbhd","right":0}},"seed":1000245}'
)


@pytest.fixture(scope="module")
def expanded():
    sample = make(EXPANDED)
    return sample, truth_of(sample)


@pytest.mark.parametrize("name", ["reference", "unfused", "sdpa_math", "sdpa_flash"])
def test_errors_that_add_up_are_no_alarm(expanded, name):
    sample, truth = expanded
    backend = get(name)
    claims = backend.claims(sample.problem, sample.inputs.q.device)
    assert list(findings(sample, truth, run(sample, backend, claims), claims)) == []


def test_one_row_that_is_a_hundredth_too_large_is_found(expanded):
    sample, truth = expanded
    backend = get("reference")
    claims = backend.claims(sample.problem, sample.inputs.q.device)
    found = run(sample, backend, claims)
    found["dk"][39, 0, 0] *= 1.01
    assert [line.split()[0] for line in findings(sample, truth, found, claims)] == ["dk"]
