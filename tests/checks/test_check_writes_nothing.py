"""Whatever a backend writes into what it is given, a check leaves its case and the first run as they were."""

from __future__ import annotations

import pytest
from tests.checks.small_cases import dense, packed

from gradtruth.backends import get
from gradtruth.verify.checks import CHECKS, Subject
from gradtruth.verify.same_bits import same_bits
from gradtruth.verify.standard import Standard

DEAR = (
    "launch_limits",
    "compile_equals_eager",
)  # one makes its own problems, one asks the library's own names only
ASKED = [check for check in CHECKS if check.device is None and check.name not in DEAR]


class WritesEverything:
    """The reference, which then writes over all that it was given."""

    name = "writes"

    def __getattr__(self, name):
        return getattr(get("reference"), name)

    def forward(self, problem, inputs):
        found = get("reference").forward(problem, inputs)
        _write(inputs.q, inputs.k, inputs.v)
        return found

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        found = get("reference").backward(problem, inputs, forward, dout, dlse, wanted)
        _write(inputs.q, inputs.k, inputs.v, forward.out, forward.lse, dout, dlse)
        return found


def _write(*tensors):
    for tensor in tensors:
        if tensor is not None:
            tensor.fill_(0.0)


def content(subject):
    return subject.case.tensors() | {f"first {n}": x for n, x in subject.first.tensors.items()}


@pytest.mark.parametrize("check", ASKED, ids=lambda check: check.name)
@pytest.mark.parametrize("case", [dense(lse_grad=True), packed()], ids=["dense", "packed"])
def test_a_check_leaves_its_case_as_it_was(check, case):
    subject = Subject(case, WritesEverything(), Standard(case))
    before = {name: x.clone() for name, x in content(subject).items()}
    list(check.run(subject))
    changed = [name for name, x in content(subject).items() if not same_bits(x, before[name])]
    assert changed == []
