"""What the tests of capture share: reading what was captured, and holding it against autograd."""

import json

import torch

from gradtruth.backends import get
from gradtruth.core.tensors import Wanted
from gradtruth.verify.cases.case import Case

SDPA = "torch.nn.functional.scaled_dot_product_attention"


def cases(captured):
    return [Case.load(path) for path in captured.files]


def only_case(captured):
    (case,) = cases(captured)
    return case


def index(folder):
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


def results(case):
    """out and gradients of a case, by the reference."""
    backend = get("reference")
    support = backend.supports(case.problem, case.device)
    assert support.ok, support
    forward = backend.forward(case.problem, case.inputs)
    grads = backend.backward(case.problem, case.inputs, forward, case.dout, case.dlse, Wanted())
    return {"out": forward.out, **dict(grads.items())}


def same(found, expected):
    """In fp64: a wrong mask, scale, corner or dout is far outside."""
    assert found.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def bits(found, expected):
    """The same shape, strides and bits."""
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)
