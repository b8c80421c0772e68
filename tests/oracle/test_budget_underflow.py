"""The budget of what is made from a stored out knows that out may underflow."""

from __future__ import annotations

import pytest
import torch

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


# Peaked rows: seven weights in ten are subnormal in fp16, and three in four of dS.
PEAKED = Recipe.decode(
    '{"arrangement":"contiguous","dout":"contiguous","family":"peaked","problem":{"batch":2,"dtype":"float16",'
    '"head_dim_qk":128,"head_dim_v":128,"num_gqa_groups":4,"num_heads":4,"seqlen_kv":130,"seqlen_q":130,"spec":{}},"seed":1}'
)


def _half_backward(sample, *, reuse_weights=False, scale_before=False):
    """dq, dk, dv [B, S, H, D] as kernels compute them: products of fp16 with fp32 sums.

    ``reuse_weights`` makes dS of the P that was rounded for dV, ``scale_before`` multiplies dS by the scale before
    it is rounded; both are what kernels in use do.
    """
    half, scale = sample.problem.torch_dtype, sample.problem.scale
    tensors = (sample.inputs.q, sample.inputs.k, sample.inputs.v, sample.dout)
    q, k, v, dout = (x.transpose(1, 2).float() for x in tensors)
    p = torch.softmax(q @ k.mT * scale, -1)
    delta = ((p @ v).to(half).float() * dout).sum(-1, keepdim=True)
    rounded = p.to(half).float()
    ds = (rounded if reuse_weights else p) * (dout @ v.mT - delta)
    ds = (ds * scale).to(half).float() if scale_before else scale * ds.to(half).float()
    grads = {"dq": ds @ k, "dk": ds.mT @ q, "dv": rounded.mT @ dout}
    return {name: x.to(half).transpose(1, 2).contiguous() for name, x in grads.items()}


@pytest.fixture(scope="module")
def peaked():
    sample, backend = make(PEAKED), get("reference")
    claims = backend.claims(sample.problem, sample.inputs.q.device)
    return sample, truth_of(sample), run(sample, backend, claims), claims


@pytest.mark.parametrize("how", [{}, {"reuse_weights": True}, {"scale_before": True}])
def test_gradients_from_subnormal_weights_are_right(peaked, how):
    sample, truth, results, claims = peaked
    assert not list(findings(sample, truth, results | _half_backward(sample, **how), claims))


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_a_wrong_head_among_subnormal_weights_is_found(peaked, name):
    sample, truth, results, claims = peaked
    wrong = _half_backward(sample, scale_before=True)
    wrong[name][1, :, 2] *= 1.02
    found = list(findings(sample, truth, results | wrong, claims))
    assert [line.split()[0] for line in found] == [name]
    assert "sequence 1, head 2" in found[0]
