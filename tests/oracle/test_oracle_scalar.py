"""The oracle against the definition, score by score."""

import dataclasses

import pytest
import torch
from tests.oracle.problems import generate
from tests.oracle.scalar import attend

from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.verify.truth import oracle

EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.mark.parametrize("seed", range(120))
def test_equals_scalar_loops(seed):
    case = generate(seed)
    problem, layout = case.problem, case.problem.layout
    leaves = {
        "q": case.meaning.q,
        "k": case.meaning.k,
        "v": case.meaning.v,
        "bias": case.meaning.bias,
    }
    if problem.spec.softmax == "learnable":
        leaves["sink"] = case.meaning.sink
    leaves = {n: x.clone().requires_grad_() for n, x in leaves.items() if x is not None}
    out, lse, top = attend(dataclasses.replace(case.meaning, **leaves))
    found, grads = oracle.evaluate(problem, case.inputs, case.dout, case.dlse)
    torch.testing.assert_close(canonical(found.out, layout), out, **EXACT)
    torch.testing.assert_close(canonical_lse(found.lse, layout), lse, **EXACT)
    if problem.spec.max_logit:
        torch.testing.assert_close(found.max_logit, top, **EXACT)
    else:
        assert found.max_logit is None

    loss = (out * canonical(case.dout, layout).nan_to_num()).sum()
    if case.dlse is not None:
        finite = lse > -torch.inf
        loss = (
            loss
            + (torch.where(finite, lse, 0.0) * canonical_lse(case.dlse, layout).nan_to_num()).sum()
        )
    names = list(leaves)
    expected = dict.fromkeys(names)
    if loss.requires_grad:
        found_grads = torch.autograd.grad(loss, [leaves[n] for n in names], allow_unused=True)
        expected = dict(zip(names, found_grads, strict=True))
    measured = {"q": grads.grads.dq, "k": grads.grads.dk, "v": grads.grads.dv}
    measured = {n: canonical(x, layout) for n, x in measured.items()}
    measured |= {"bias": grads.grads.dbias, "sink": grads.grads.dsoftmax_offset}
    for name in names:
        right = torch.zeros_like(leaves[name]) if expected[name] is None else expected[name]
        torch.testing.assert_close(measured[name], right, **EXACT)
    assert (grads.grads.dbias is None) == (case.inputs.bias is None)
    assert (grads.grads.dsoftmax_offset is None) == (problem.spec.softmax != "learnable")
