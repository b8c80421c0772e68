"""The committed case is what its script writes, and what it says of itself holds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from gradtruth.testing import assert_verified
from gradtruth.verify.cases.case import Case
from gradtruth.verify.truth import oracle

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "thd_gqa_queryless", EXAMPLES / "thd_gqa_queryless.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_file_is_what_the_script_writes(script, tmp_path):
    path = tmp_path / "case.safetensors"
    script.main(["--out", str(path)])
    assert path.read_bytes() == script.PATH.read_bytes()
    assert path.stat().st_size < 8000


def test_keys_that_no_query_sees_have_no_gradient(script):
    case = Case.load(script.PATH)
    given = case.inputs
    assert given.cu_seqlens_q.tolist() == [0, 0, 3]
    assert given.cu_seqlens_kv.tolist() == [0, 3, 9]
    assert given.cu_seqlens_q_padded.tolist() == given.cu_seqlens_kv_padded.tolist() == [0, 4, 12]
    assert (case.problem.scale, case.problem.dtype) == (0.1, "float16")
    grads = dict(oracle.evaluate(case.problem, given, case.dout)[1].items())
    for grad in (grads["dk"], grads["dv"]):
        assert not grad[:4].any()
        assert grad[4:10].abs().amin() > 0
        assert not grad[10:].any()
    assert bool(torch.stack([t.isfinite().all() for t in (given.q, given.k, given.v)]).all())


@pytest.mark.parametrize("backend", ["reference", "unfused"])
def test_own_backends_are_right(script, backend):
    assert_verified(Case.load(script.PATH), backend)
