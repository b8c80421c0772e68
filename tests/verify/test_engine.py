"""The engine: backends with planted faults are found, named and placed; nothing ends the run."""

import json
import re
from dataclasses import replace

import pytest
import torch

from gradtruth.backends import get
from gradtruth.core.spec import Spec
from gradtruth.core.support import Reason, ReasonCode, Support
from gradtruth.core.tensors import Forward, Inputs
from gradtruth.errors import UnsupportedProblem
from gradtruth.verify import standard
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import VALUES, named
from gradtruth.verify.engine import steps_of, verify_case
from gradtruth.verify.findings import SUPPORT, ExitCode, Row, Verdict, exit_code, row_of_json


def _noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def case():
    q, k, v, dout = (
        _noise(2, 40, heads, 16, seed=heads + at) for at, heads in enumerate((4, 2, 2, 4))
    )
    q, k, v, dout = (x.bfloat16() for x in (q, k, v, dout))
    return Case.of(Spec(right=0), Inputs(q=q, k=k, v=v), dout)


class Double:
    """The reference backend with one defect."""

    name = "double"

    def __init__(self, forward=None, backward=None, supports=None, **claims):
        self.own = get("reference")
        self.change_forward = forward or (lambda found, _: found)
        self.change_backward = backward or (lambda found, _: found)
        self.answer = supports
        self.changed_claims = claims
        self.calls = []

    def supports(self, problem, device):
        return self.answer() if self.answer else self.own.supports(problem, device)

    def claims(self, problem, device):
        return replace(self.own.claims(problem, device), **self.changed_claims)

    def forward(self, problem, inputs):
        self.calls.append("forward")
        return self.change_forward(self.own.forward(problem, inputs), inputs)

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        self.calls.append("backward")
        found = self.own.backward(problem, inputs, forward, dout, dlse, wanted)
        return self.change_backward(found, inputs)


def _rows(case, backend):
    return [
        event
        for event in verify_case(case, [backend], name="planted", checks=VALUES)
        if isinstance(event, Row)
    ]


def _verdicts(rows):
    return {(row.check, row.tensor): row.verdict.value for row in rows}


_ALL_RIGHT = {
    ("forward", "out"): "right",
    ("forward", "lse"): "right",
    **{
        (part, tensor): "right"
        for part in ("backward", "backward-from-oracle")
        for tensor in ("dq", "dk", "dv")
    },
}


def _scaled(name, at, factor):
    def change(found, _):
        tensor = getattr(found, name).clone()
        tensor[at] *= factor
        return replace(found, **{name: tensor})

    return change


def _raises(error):
    def change(*_, **__):
        raise error

    return change


def test_a_right_backend_is_right(case):
    backend = Double()
    rows = _rows(case, backend)
    assert _verdicts(rows) == _ALL_RIGHT
    assert exit_code(rows, named=True) is ExitCode.VERIFIED
    assert backend.calls == ["forward", "backward", "backward"]
    for row in rows:
        assert 0 <= row.whole.used <= 1
        assert len(row.heads) == 2 * (2 if row.tensor in ("dk", "dv") else 4)
        assert row.worst == max(row.heads, key=lambda part: part.used)
        assert row.whole.cosine == pytest.approx(1, abs=1e-4)
        assert row.whole.relative_l2 <= row.whole.budget


@pytest.mark.parametrize(("name", "head"), [("dq", 3), ("dk", 1), ("dv", 0)])
def test_one_scaled_head_is_found_and_named(case, name, head):
    rows = _rows(case, Double(backward=_scaled(name, (1, slice(None), head), 1.02)))
    wrong = [row for row in rows if row.verdict is Verdict.WRONG]
    assert {(row.check, row.tensor) for row in wrong} == {
        ("backward", name),
        ("backward-from-oracle", name),
    }
    for row in wrong:
        assert (row.worst.sequence, row.worst.head) == (1, head)
        assert row.worst.norm_ratio == pytest.approx(1.02, abs=2e-3)
        assert [part.used > 1 for part in row.heads].count(True) == 1
        assert row.detail
        assert ">" in row.detail[0]
    assert exit_code(rows, named=False) is ExitCode.FINDINGS


def test_zero_gradients_are_wrong(case):
    rows = _rows(
        case, Double(backward=lambda g, _: replace(g, dq=g.dq * 0, dk=g.dk * 0, dv=g.dv * 0))
    )
    assert _verdicts(rows) == {
        key: "right" if key[0] == "forward" else "WRONG" for key in _ALL_RIGHT
    }
    assert rows[-1].worst.relative_l2 == 1.0
    assert rows[-1].worst.norm_ratio == 0.0


def test_nan_in_out_is_wrong_and_json_holds_it(case):
    rows = _rows(case, Double(forward=_scaled("out", (0, 5, 2), torch.nan)))
    out = rows[0]
    assert (out.tensor, out.verdict) == ("out", Verdict.WRONG)
    assert (out.worst.sequence, out.worst.head) == (0, 2)
    assert "NaN" in out.detail[0]
    text = json.dumps(out.to_json(), allow_nan=False)
    assert row_of_json(json.loads(text)).detail == out.detail


def test_a_wrong_forward_is_told_from_a_wrong_backward(case):
    rows = _rows(case, Double(forward=lambda f, _: Forward(out=f.out, lse=f.lse + 0.1)))
    verdicts = _verdicts(rows)
    assert verdicts["forward", "lse"] == "WRONG"
    assert verdicts["forward", "out"] == "right"
    assert verdicts["backward", "dv"] == "WRONG"
    assert {v for (part, _), v in verdicts.items() if part == "backward-from-oracle"} == {"right"}


@pytest.mark.parametrize(
    "error", [RuntimeError("boom\nline 2"), UnsupportedProblem("later"), ZeroDivisionError()]
)
def test_a_backend_that_raises_is_a_finding(case, error):
    rows = _rows(case, Double(forward=_raises(error)))
    first = rows[0]
    assert (first.check, first.tensor, first.verdict) == ("forward", None, Verdict.ERROR)
    assert first.detail[0].startswith(type(error).__name__)
    # Its backward still runs from the oracle's forward: it may be right.
    assert {(row.check, row.verdict) for row in rows[1:]} == {
        ("backward", Verdict.NOT_REACHED),
        ("backward-from-oracle", Verdict.RIGHT),
    }
    assert exit_code(rows, named=False) is ExitCode.FINDINGS


def test_an_error_in_one_backend_leaves_the_next_alone(case):
    broken, fine = Double(backward=_raises(RuntimeError("boom"))), Double()
    rows = [
        e for e in verify_case(case, [broken, fine], name="x", checks=VALUES) if isinstance(e, Row)
    ]
    assert [row.verdict for row in rows[:4]] == [Verdict.RIGHT] * 2 + [Verdict.ERROR] * 2
    assert _verdicts(rows[4:]) == _ALL_RIGHT


def test_supports_that_raises_is_a_finding(case):
    rows = _rows(case, Double(supports=_raises(KeyError("arch"))))
    assert [(row.check, row.verdict) for row in rows] == [(SUPPORT, Verdict.ERROR)]


def test_a_refusal_gives_every_reason(case):
    reasons = (Reason(ReasonCode.DTYPE, "dtype is bfloat16"), Reason(ReasonCode.MASK, "no causal"))
    backend = Double(supports=lambda: Support(reasons))
    rows = _rows(case, backend)
    assert [(row.verdict, row.detail) for row in rows] == [
        (Verdict.REFUSES, ("dtype is bfloat16", "no causal"))
    ]
    assert backend.calls == []
    assert exit_code(rows, named=True) is ExitCode.UNSUPPORTED


def test_what_is_not_claimed_is_not_run(case):
    backend = Double(foreign_lse=False)
    rows = _rows(case, backend)
    assert rows[-1].check == "backward-from-oracle"
    assert rows[-1].verdict is Verdict.NOT_CLAIMED
    assert backend.calls == ["forward", "backward"]
    assert exit_code(rows, named=True) is ExitCode.VERIFIED


def test_a_dropout_mask_of_its_own_is_not_compared(case):
    dropped = Case.of(
        Spec(right=0, dropout_p=0.5), replace(case.inputs, dropout_seed=torch.tensor(3)), case.dout
    )
    rows = _rows(dropped, Double(global_dropout=False))
    assert [row.verdict for row in rows] == [Verdict.NOT_CLAIMED]
    assert _verdicts(_rows(dropped, Double())) == _ALL_RIGHT


def test_a_written_input_is_wrong_and_reaches_nobody_else(case):
    def write(found, inputs):
        inputs.k[0, 0, 0, 0] += 1
        return found

    before = case.to_bytes()
    rows = _rows(case, Double(forward=write))
    assert (rows[0].tensor, rows[0].verdict) == ("k", Verdict.WRONG)
    assert "wrote" in rows[0].detail[0]
    assert {row.verdict for row in rows[1:]} == {Verdict.RIGHT}
    assert case.to_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g, _: replace(g, dk=None), "dk is missing"),
        (lambda g, _: replace(g, dk=g.dk.float()), "dk is torch.float32"),
        (lambda g, _: replace(g, dk=g.dk[:, :-1]), r"\[2, 39, 2, 16\], expected"),
    ],
)
def test_a_gradient_of_the_wrong_form(case, change, message):
    rows = _rows(case, Double(backward=change))
    wrong = [row for row in rows if row.verdict is Verdict.WRONG]
    assert [(row.check, row.tensor) for row in wrong] == [
        ("backward", "dk"),
        ("backward-from-oracle", "dk"),
    ]
    assert re.search(message, wrong[0].detail[0])


def test_no_result_at_all_is_an_error(case):
    rows = _rows(case, Double(forward=lambda *_: None))
    assert rows[0].verdict is Verdict.ERROR


def test_the_oracle_runs_once_per_case(case, monkeypatch):
    calls = []
    evaluate = standard.oracle.evaluate
    monkeypatch.setattr(
        standard.oracle, "evaluate", lambda *a, **k: calls.append(1) or evaluate(*a, **k)
    )
    events = list(verify_case(case, [Double(), Double(), Double()], name="x", checks=VALUES))
    assert calls == [1]
    steps = [event for event in events if isinstance(event, str)]
    assert len(steps) == len(set(steps)) + 6 == steps_of([None] * 3, VALUES)


def test_an_oracle_that_fails_is_a_finding(case, monkeypatch):
    monkeypatch.setattr(standard.oracle, "evaluate", _raises(MemoryError("too large")))
    rows = _rows(case, Double())
    assert [(row.backend, row.verdict) for row in rows] == [("oracle", Verdict.ERROR)]
    assert "too large" in rows[0].detail[0]


def test_a_yardstick_that_fails_allows_nothing(case, monkeypatch):
    monkeypatch.setattr(
        standard,
        "get",
        lambda _: Double(forward=_raises(RuntimeError()), backward=_raises(RuntimeError())),
    )
    assert _verdicts(_rows(case, Double())) == _ALL_RIGHT
    rows = _rows(case, Double(backward=_scaled("dq", (1, slice(None), 3), 1.05)))
    assert _verdicts(rows)["backward", "dq"] == "WRONG"


def _thd_with_everything():
    cu_q, cu_kv = (torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 9, 20], [0, 8, 15, 30]))
    inputs = Inputs(
        q=_noise(24, 4, 8),
        k=_noise(2, 30, 8, seed=1).transpose(0, 1),
        v=_noise(30, 1, 12, seed=2).expand(30, 2, 12),
        cu_seqlens_q=cu_q,
        cu_seqlens_kv=cu_kv,
        bias=_noise(1, 4, 11, 15, seed=3),
        alibi_slopes=_noise(4, seed=4).abs(),
        softmax_offset=_noise(4, seed=5),
        dropout_seed=torch.tensor(77),
    )
    spec = Spec(
        layout="thd",
        lengths="cu_seqlens",
        alignment="bottom_right",
        left=7,
        bias="pre_scale",
        alibi=True,
        softmax="learnable",
        softcap=5.0,
        dropout_p=0.2,
        max_logit=True,
        lse_grad=True,
    )
    dout = torch.ones(()).expand(24, 4, 12)
    return Case.of(spec, inputs, dout, _noise(4, 24, seed=6).t(), max_seqlen=(11, 15))


def test_every_tensor_of_the_contract():
    rows = _rows(Case.from_bytes(_thd_with_everything().to_bytes()), Double())
    assert {row.verdict for row in rows} == {Verdict.RIGHT}
    grads = ["dq", "dk", "dv", "dbias", "dsoftmax_offset"]
    assert [row.tensor for row in rows] == ["out", "lse", "max_logit", *grads, *grads]


def test_places_outside_every_sequence_must_be_zero():
    case = _thd_with_everything()
    values = _rows(case, Double(backward=_stray))
    assert {row.verdict for row in values} == {Verdict.RIGHT}, (
        "the places have a check of their own"
    )
    backend = Double(backward=_stray)
    events = verify_case(case, [backend], name="planted", checks=named(("exact_zeros",)))
    (row,) = [event for event in events if isinstance(event, Row)]
    assert (row.tensor, row.verdict) == ("dq", Verdict.WRONG)
    assert "outside every sequence" in row.detail[0]


def _stray(found, _):
    dq = found.dq.clone()
    dq[22, 0, 0] = 1e-30
    return replace(found, dq=dq)


def test_a_case_without_elements():
    q = torch.zeros(2, 0, 4, 8)
    k = _noise(2, 3, 4, 8)
    case = Case.of(Spec(), Inputs(q=q, k=k, v=k), q)
    verdicts = _verdicts(_rows(case, Double()))
    assert verdicts["forward", "out"] == "right"
    assert verdicts["backward", "dk"] == "right"


def test_rows_have_one_schema(case):
    expected = {
        "case": str,
        "case_id": str,
        "problem": str,
        "backend": str,
        "check": str,
        "tensor": str,
        "verdict": str,
        "kind": type(None),
        "whole": dict,
        "worst": dict,
        "heads": list,
        "errors": type(None),
        "detail": list,
        "seconds": float,
    }
    measured = {"relative_l2", "cosine", "norm_ratio", "used", "budget", "sequence", "head"}
    for row in _rows(case, Double()):
        found = json.loads(json.dumps(row.to_json(), allow_nan=False))
        assert {name: type(value) for name, value in found.items()} == expected
        for part in (found["whole"], found["worst"], *found["heads"]):
            assert set(part) == measured
        assert row_of_json(found) == row
        assert found["case_id"] == case.id
