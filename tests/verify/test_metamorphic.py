"""Checks that compare a call with another one of the same meaning: what each finds, and when it says nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradtruth.backends import get
from gradtruth.core.spec import Spec
from gradtruth.core.support import Reason, ReasonCode, Support
from gradtruth.core.tensors import Inputs
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import NotReached, Subject, named
from gradtruth.verify.checks.mask_equivalents import _equivalents
from gradtruth.verify.checks.parts import few, few_sequences, place_tokens
from gradtruth.verify.findings import Kind
from gradtruth.verify.standard import Standard
from gradtruth.verify.trial import wanted_of
from gradtruth.verify.truth import oracle

B, S, H, G, D = 3, 12, 4, 2, 8
ASKED = {check.name: check for check in named(("all",))}
NAMES = ("batch_slice", "batch_permutation", "head_slice", "gqa_expand", "mask_equivalents")


def _case(spec=None, *, batch=B, S=S, T=S, heads=(H, G), max_seqlen=(None, None), **inputs):
    spec, (H, G) = spec or Spec(right=0), heads
    generator = torch.Generator().manual_seed(0)
    rows = {"thd": lambda n: (n,), "bshd": lambda n: (batch, n), "sbhd": lambda n: (n, batch)}
    shapes = ((S, H), (T, G), (T, G), (S, H))
    q, k, v, dout = (
        torch.randn(*rows[spec.layout](length), heads, D, generator=generator)
        for length, heads in shapes
    )
    return Case.of(spec, Inputs(q=q, k=k, v=v, **inputs), dout, max_seqlen=max_seqlen)


def _cu(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _padded(spec=None, **more):
    spec = spec or Spec(right=0, lengths="cu_seqlens")
    lengths = {"cu_seqlens_q": _cu(12, 5, 0), "cu_seqlens_kv": _cu(9, 12, 3)}
    return _case(spec, **lengths, **more)


def _thd(**spec):
    lengths = {
        "cu_seqlens_q": _cu(5, 1, 4),
        "cu_seqlens_kv": _cu(3, 6, 4),
        "cu_seqlens_q_padded": _cu(6, 1, 4),
        "cu_seqlens_kv_padded": _cu(3, 7, 5),
    }
    spec = Spec(layout="thd", lengths="cu_seqlens", **spec)
    return _case(spec, S=12, T=15, **lengths)


def _left_padded():
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[1, :4] = True
    return _case(
        Spec(right=0, left=3, alignment="bottom_right", lengths="padding_mask"),
        padding_mask_q=mask,
        padding_mask_kv=mask.clone(),
    )


CASES = {
    "full": _case,
    "window": lambda: _case(Spec(left=2, right=3, alignment="bottom_right"), T=17),
    "sbhd": lambda: _case(Spec(layout="sbhd", right=0), T=7),
    "padded": _padded,
    "left-padded": _left_padded,
    "thd": lambda: _thd(right=0),
    "thd-window": lambda: _thd(left=1, right=1, alignment="bottom_right"),
    "alibi": lambda: _padded(
        Spec(left=4, right=0, lengths="cu_seqlens", alibi=True, alignment="bottom_right"),
        alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625]),
    ),
    "masked": lambda: _case(
        Spec(right=0, arbitrary=True),
        attention_mask=torch.eye(S, dtype=torch.bool).expand(1, H, S, S).contiguous(),
    ),
    "sink-dropout": lambda: _padded(
        Spec(right=0, lengths="cu_seqlens", softmax="learnable", dropout_p=0.25, max_logit=True),
        softmax_offset=torch.tensor([0.0, 1.0, -1.0, 0.5]),
        dropout_seed=torch.tensor(7),
    ),
}


class Planted:
    """The reference, with a fault where ``when`` says so of a problem."""

    name = "planted"

    def __init__(self, when, change=lambda grads: replace(grads, dv=grads.dv * 1.5), **claims):
        self.when, self.change, self.changed = when, change, claims
        self.refused = lambda problem: False

    def __getattr__(self, name):
        return getattr(get("reference"), name)

    def supports(self, problem, device):
        if self.refused(problem):
            return Support((Reason(ReasonCode.MASK, "it is said in the other way"),))
        return get("reference").supports(problem, device)

    def claims(self, problem, device):
        return replace(get("reference").claims(problem, device), **self.changed)

    def backward(self, problem, *arguments):
        found = get("reference").backward(problem, *arguments)
        return self.change(found) if self.when(problem) else found


def _answers(case, backend, name):
    return list(ASKED[name].run(Subject(case, backend, Standard(case))))


def _truth(case):
    forward, grads = oracle.evaluate(
        case.problem, case.inputs, case.dout, case.dlse, wanted_of(case), device=case.device
    )
    return dict(forward.items()) | dict(grads.items())


@pytest.mark.parametrize("name", CASES)
def test_every_second_form_asks_for_the_same_numbers(name):
    case = CASES[name]()
    expected = _truth(case)
    forms = dict(_equivalents(case))
    assert len(forms) >= 2, forms.keys()
    for what, form in forms.items():
        found = _truth(form)
        if form.problem.layout != case.problem.layout:
            placed = {key: torch.zeros_like(value) for key, value in expected.items()}
            placed["lse"] = torch.full_like(expected["lse"], -torch.inf)
            place_tokens(case, form, found, placed)
            found = placed
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key],
                value,
                rtol=1e-11,
                atol=1e-12,
                msg=lambda m, w=what, k=key: f"{w} {k} {m}",
            )


@pytest.mark.parametrize("check", NAMES)
@pytest.mark.parametrize("name", CASES)
def test_a_healthy_backend_is_right(name, check):
    case = CASES[name]()
    assert [
        a for a in _answers(case, get("reference"), check) if not isinstance(a, NotReached)
    ] == []


@pytest.mark.parametrize(
    ("name", "when", "what"),
    [
        ("full", lambda p: p.spec.left is not None, "a left bound that covers everything"),
        ("thd", lambda p: p.spec.left is not None, "a left bound that covers everything"),
        ("full", lambda p: p.spec.lengths == "cu_seqlens", "cu_seqlens of full lengths"),
        ("full", lambda p: p.spec.lengths == "padding_mask", "a padding mask that hides nothing"),
        ("full", lambda p: p.spec.alignment == "bottom_right", "the bottom_right diagonal of equal lengths"),
        ("window", lambda p: p.spec.arbitrary, "a mask tensor that says the band"),
        ("left-padded", lambda p: p.spec.arbitrary, "a mask tensor that says the band"),
        ("thd", lambda p: p.spec.arbitrary, "a mask tensor that says the band"),
        ("padded", lambda p: p.max_seqlen_q is not None, "loose bounds on the lengths"),
        ("sbhd", lambda p: p.layout == "thd", "thd storage"),
        ("left-padded", lambda p: p.layout == "thd", "thd storage"),
        ("thd", lambda p: p.layout == "bshd", "dense storage"),
    ],
)  # fmt: skip
def test_a_fault_in_one_form_of_a_mask_is_found_and_the_form_is_named(name, when, what):
    found = _answers(CASES[name](), Planted(when), "mask_equivalents")
    assert {(answer.tensor, answer.kind) for answer in found} == {("dv", Kind.VALUE)}
    assert any(
        answer.detail[0].startswith(f"differs from the same without {what}: ") for answer in found
    )


class _RaisingAndWrong(Planted):
    def backward(self, problem, *arguments):
        if problem.spec.lengths == "padding_mask":
            raise RuntimeError("no such kernel")
        return super().backward(problem, *arguments)


def test_a_form_that_raises_is_a_finding_and_the_others_are_still_asked():
    backend = _RaisingAndWrong(lambda p: p.layout == "thd")
    raised, wrong = _answers(CASES["full"](), backend, "mask_equivalents")
    text = "a padding mask that hides nothing: RuntimeError: no such kernel"
    assert (raised.kind, raised.detail) == (Kind.RAISED, (text,))
    assert (wrong.kind, wrong.tensor) == (Kind.VALUE, "dv")
    assert "without thd storage" in wrong.detail[0]


def test_forms_that_are_refused_are_not_reached_and_say_why():
    backend = Planted(lambda p: False)
    case = CASES["padded"]()
    backend.refused = lambda problem: problem != case.problem
    (answer,) = _answers(case, backend, "mask_equivalents")
    assert isinstance(answer, NotReached)
    assert "it is said in the other way" in answer.reason
    for name in ("batch_slice", "head_slice", "gqa_expand"):
        (answer,) = _answers(case, backend, name)
        assert "it is said in the other way" in answer.reason, name


@pytest.mark.parametrize(
    ("check", "made", "reason"),
    [
        ("batch_slice", lambda: _case(batch=1), "the case has 1 sequences"),
        ("batch_permutation", lambda: _case(batch=1), "the case has 1 sequences"),
        ("head_slice", lambda: _case(heads=(4, 1)), "the case has 1 KV heads"),
        ("gqa_expand", lambda: _case(heads=(4, 4)), "every query head has a KV head of its own"),
        ("batch_slice", CASES["sink-dropout"], "dropout goes by global numbers"),
        ("batch_permutation", CASES["sink-dropout"], "dropout goes by global numbers"),
        ("head_slice", CASES["sink-dropout"], "dropout goes by global numbers"),
    ],
)
def test_not_reached(check, made, reason):
    (answer,) = _answers(made(), Planted(lambda p: True), check)
    assert isinstance(answer, NotReached)
    assert reason in answer.reason


@pytest.mark.parametrize("check", NAMES)
def test_nothing_is_compared_with_a_call_that_raised(check):
    def broken(grads):
        raise RuntimeError("boom")

    (answer,) = _answers(_case(), Planted(lambda p: True, broken), check)
    assert answer == NotReached("the call itself raised RuntimeError: boom")


@pytest.mark.parametrize(
    ("check", "when"),
    [
        ("batch_slice", lambda p: p.batch > 1),
        ("head_slice", lambda p: p.num_gqa_groups > 1),
        ("gqa_expand", lambda p: p.group_size > 1),
    ],
)
@pytest.mark.parametrize("name", ["full", "sbhd", "thd", "padded"])
def test_a_fault_of_company_is_found(name, check, when):
    found = _answers(CASES[name](), Planted(when, batch_invariant=False), check)
    assert [(answer.tensor, answer.kind) for answer in found] == [("dv", Kind.VALUE)]


def test_a_fault_of_the_first_place_is_found_by_another_order():
    def first_only(grads):
        dk = grads.dk.clone()
        dk[0] *= 1.5
        return replace(grads, dk=dk)

    found = _answers(_case(), Planted(lambda p: True, first_only), "batch_permutation")
    assert [(answer.tensor, answer.kind) for answer in found] == [("dk", Kind.VALUE)]


def test_bits_count_only_where_batch_invariance_is_claimed():
    def last_bit(grads):
        dq = torch.nextafter(grads.dq, torch.full_like(grads.dq, torch.inf))
        return replace(grads, dq=dq)

    case = _case()
    claimed = Planted(lambda p: p.batch > 1, last_bit, batch_invariant=True)
    (answer,) = _answers(case, claimed, "batch_slice")
    assert (answer.tensor, answer.kind, answer.breaks) == ("dq", Kind.BITS, "batch_invariant")
    free = Planted(lambda p: p.batch > 1, last_bit, batch_invariant=False)
    assert _answers(case, free, "batch_slice") == []


def test_which_parts_are_looked_at():
    lengths = {"cu_seqlens_q": _cu(3, 4, 0, 4, 12, 5), "cu_seqlens_kv": _cu(3, 4, 1, 4, 12, 5)}
    case = _case(Spec(lengths="cu_seqlens"), batch=6, **lengths)
    assert few_sequences(case) == [0, 2, 4, 5], "the first, the shortest, the longest, the last"
    assert few_sequences(_case(batch=6)) == [0, 5]
    assert few(3) == [0, 1, 2]
    assert few(64) == [0, 21, 42, 63]


@pytest.mark.parametrize("check", NAMES)
def test_every_check_tells_a_public_fault(check):
    assert "#" in ASKED[check].fault
