"""Stride classes: what a kernel must know about strides, from metadata."""

from __future__ import annotations

import pytest
import torch

from gradtruth.core.problem import Problem, StrideClass
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.errors import InvalidProblem

CLASSES = [
    StrideClass(u, a, e) for u in (False, True) for a in (False, True) for e in (False, True)
]
BASE = torch.zeros(4, 6, 8, 16)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (BASE, StrideClass()),
        (BASE.transpose(0, 1), StrideClass()),
        (BASE[..., :8], StrideClass()),
        (BASE[..., ::2], StrideClass(unit=False)),
        (BASE.transpose(2, 3), StrideClass(unit=False, aligned=False)),
        (BASE[..., :1], StrideClass()),
        (BASE[..., :1].expand(4, 6, 8, 2), StrideClass(unit=False, expanded=True)),
        (BASE[..., 1:9], StrideClass(aligned=False)),
        (BASE[..., 4:12], StrideClass()),
        (torch.zeros(4, 6, 8, 15), StrideClass(aligned=False)),
        (torch.zeros(1, 1, 1, 15), StrideClass()),
        (torch.zeros(4, 6, 1, 16).expand(4, 6, 8, 16), StrideClass(expanded=True)),
        (torch.zeros(1, 6, 8, 16).expand(4, 6, 8, 16), StrideClass(expanded=True)),
        (torch.zeros(1, 6, 8, 16).expand(1, 6, 8, 16), StrideClass()),
        (torch.zeros(()).expand(2, 3), StrideClass(unit=False, expanded=True)),
        (torch.zeros(()), StrideClass()),
        (torch.zeros(2, 3, 4, dtype=torch.float64), StrideClass()),
        (torch.zeros(2, 3, 4, dtype=torch.float16), StrideClass(aligned=False)),
        (torch.zeros(2, 3, 8, dtype=torch.bfloat16), StrideClass()),
        (torch.zeros(2, 3, 16, dtype=torch.bool), StrideClass()),
        (torch.zeros(2, 3, 8, dtype=torch.bool), StrideClass(aligned=False)),
    ],
)
def test_stride_class_of_a_tensor(tensor, expected):
    assert StrideClass.of(tensor) == expected


@pytest.mark.parametrize("found", CLASSES, ids=lambda c: c.encode() or "none")
def test_stride_codes(found):
    assert StrideClass.decode(found.encode()) == found
    assert found.encode() == "".join(
        x for x, on in zip("uae", (found.unit, found.aligned, found.expanded), strict=True) if on
    )


def test_strides_of_a_problem_are_those_of_its_tensors():
    odd = torch.zeros(2, 4, 3, 8, 2)[..., 0]
    q, k = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 1, 8).expand(2, 4, 3, 8)
    inputs = Inputs(
        q=q, k=k, v=odd,
        bias=torch.zeros(1, 1, 1, 4).expand(2, 3, 4, 4),
        attention_mask=torch.zeros(2, 3, 4, 4, dtype=torch.bool),
        alibi_slopes=torch.zeros(6)[::2],
    )  # fmt: skip
    problem = Problem.of(Spec(bias="pre_scale", arbitrary=True, alibi=True), inputs)
    assert problem.strides == (
        ("k", StrideClass(expanded=True)),
        ("v", StrideClass(unit=False)),
        ("bias", StrideClass(expanded=True)),
        ("attention_mask", StrideClass(aligned=False)),
    )
    assert Problem.decode(problem.encode()) == problem
    buffer = torch.zeros(2, 4, 3, 3, 8)
    q, k, v = buffer.unbind(2)
    assert Problem.of(Spec(packing="3hd"), Inputs(q=q, k=k, v=v)).strides == ()


@pytest.mark.parametrize("code", ["au", "uu", "x", "U", "u ", None, 1, ["u"], {}, True])
def test_other_codes_are_refused(code):
    with pytest.raises(InvalidProblem, match="strides is "):
        StrideClass.decode(code)
