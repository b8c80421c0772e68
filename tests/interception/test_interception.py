"""What a listener is told about calls of a running program, and that the program does not notice."""

import functools
import re
import sys
import types

import pytest
import torch
from tests.interception import borrowed
from tests.interception.listening import Heard, listening, same
from torch import nn
from torch.nn import functional as F

import gradtruth
from gradtruth.errors import InvalidProblem
from gradtruth.verify.interception import Answer, Interception, intercept

SDPA = "torch.nn.functional.scaled_dot_product_attention"
PLAIN = F.scaled_dot_product_attention
B, S, H, D = 2, 3, 2, 4


def _drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _leaves(*shape):
    return [_drawn(*shape, seed=n).requires_grad_() for n in range(3)]


@pytest.fixture
def heard():
    return []


class Attention(nn.Module):
    def forward(self, q, k, v, **options):
        return borrowed.scaled_dot_product_attention(q, k, v, **options)


def test_a_name_that_a_module_took_before(heard):
    q, k, v = _leaves(B, H, S, D)
    with intercept(listening(heard)):
        Attention()(q, k, v, is_causal=True).square().sum().backward()
    (one,) = heard
    assert (one.call.entry, one.call.layer) == (SDPA, "Attention")
    assert one.call.problem.label() == "b2 s3 h2/2 d4 fp64 bshd causal"
    assert one.call.inputs.q.data_ptr() == q.data_ptr(), "the caller's memory"
    assert one.call.inputs.q.stride() == q.transpose(1, 2).stride()
    assert one.check() == {"dq", "dk", "dv"}
    assert borrowed.scaled_dot_product_attention is F.scaled_dot_product_attention
    assert F.scaled_dot_product_attention is PLAIN, "put back"


def test_gradients_are_of_this_call_alone(heard):
    """k is used twice by the call and once more beside it; the program's own gradients are the sum."""
    q, k, _ = _leaves(B, H, S, D)
    plain = torch.autograd.grad(F.scaled_dot_product_attention(q, k, k).sum() + k.sum(), (q, k))
    with intercept(listening(heard)):
        loss = F.scaled_dot_product_attention(q, k, k).sum() + k.sum()
        found = torch.autograd.grad(loss, (q, k))
    heard[0].check()
    for one, other in zip(found, plain, strict=True):
        same(one, other)


@pytest.mark.parametrize("lse", [False, True])
def test_own_calls_with_lse_bias_and_sink(heard, lse):
    q, k, v = _leaves(B, S, H, D)
    bias = _drawn(1, H, S, S, seed=5).requires_grad_()
    sink = _drawn(H, seed=6, dtype=torch.float32).requires_grad_()
    with intercept(listening(heard)):
        out, found = gradtruth.attention_with_lse(
            q, k, v, bias=bias, softmax_type="learnable", softmax_offset=sink
        )
        loss = out.square().sum() + (found.square().sum() if lse else 0.0)
        loss.backward()
    (one,) = heard
    assert one.call.entry == "gradtruth.attention"
    assert (one.backwards[0][1] is not None) is lse
    assert torch.equal(one.lse, found)
    assert one.check() == {"dq", "dk", "dv", "dbias", "dsoftmax_offset"}


@pytest.mark.parametrize("packed", ["3hd", "2hd"])
def test_own_packed_buffers(heard, packed):
    whole = _drawn(B, S, 3, H, D).requires_grad_()
    pair, q = _drawn(B, S, 2, H, D).requires_grad_(), _drawn(B, S, H, D).requires_grad_()
    parts = whole.unbind(2) if packed == "3hd" else (q, *pair.unbind(2))
    with intercept(listening(heard)):
        gradtruth.attention(*parts).square().sum().backward()
    heard[0].check()


FUNCTION = "tests.interception.borrowed:attend"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Heard, [FUNCTION]),
        (lambda _: None, [FUNCTION]),
        (lambda _: Answer.INSIDE, [FUNCTION, SDPA]),
    ],
)
def test_what_a_call_calls_is_part_of_it(answer, expected):
    told = []

    def on_call(call):
        told.append(call.entry)
        return answer(call)

    with intercept(on_call, functions=[FUNCTION]):
        borrowed.attend(*_leaves(B, S, H, D))
    assert told == expected


def test_only_what_the_listener_wants(heard):
    q, k, v = _leaves(B, H, S, D)
    with intercept(listening(heard, wants_gradients=False)):
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    ((dout, _, grads),) = heard[0].backwards
    assert dout.unique().tolist() == [1.0]
    assert grads == {}


def test_only_the_root(heard):
    here, elsewhere = nn.Sequential(), Attention()
    here.add_module("block", Attention())
    x = _drawn(B, H, S, D)
    with intercept(listening(heard), root=here):
        elsewhere(x, x, x)
        here.block(x, x, x)
        F.scaled_dot_product_attention(x, x, x)
    assert [one.call.layer for one in heard] == ["block"]
    assert not heard[0].call.differentiable


def test_unseen_is_told_once(heard):
    told = []
    five = _drawn(1, B, H, S, D)
    q = _drawn(B, H, S, D)
    with intercept(listening(heard), on_unseen=told.append):
        for _ in range(2):
            F.scaled_dot_product_attention(five, five, five)
        torch.func.vmap(F.scaled_dot_product_attention)(q, q, q)
    assert heard == []
    assert [str(one) for one in told] == [
        f"{SDPA} is not seen: query, key or value has 5 dims, 2 to 4 are seen",
        f"{SDPA} is not seen: it is made inside a torch.func transform",
    ]


def test_switched_off_in_between(heard):
    x = _drawn(B, H, S, D)
    with intercept(listening(heard)) as found:
        found.switch(False)
        F.scaled_dot_product_attention(x, x, x)
        assert heard == []
        found.switch(True)
        F.scaled_dot_product_attention(x, x, x)
    assert len(heard) == 1


def test_two_at_once(heard):
    others = []
    q, k, v = _leaves(B, S, H, D)
    with (
        intercept(listening(heard), functions=[FUNCTION]),
        intercept(listening(others), functions=[FUNCTION]),
    ):
        borrowed.attend(q, k, v).sum().backward()
    for (one,) in (heard, others):
        assert one.call.entry == FUNCTION
        one.check()


def test_inputs_that_were_written_to(heard):
    x = _drawn(B, H, S, D)
    with intercept(listening(heard)):
        F.scaled_dot_product_attention(x, x, x)
    assert heard[0].call.intact()
    x.mul_(2)
    assert not heard[0].call.intact()


def test_compiled_code_is_left_alone(heard):
    q, k, v = _leaves(B, H, S, D)
    with intercept(listening(heard)):
        compiled = torch.compile(F.scaled_dot_product_attention, backend="eager", fullgraph=True)
        expected = compiled(q, k, v)
        assert heard == []
        same(F.scaled_dot_product_attention(q, k, v), expected)
    assert len(heard) == 1


@pytest.mark.parametrize("first", [0, 1])
def test_everything_is_put_back_in_whatever_order(first):
    """In modules that took the function while it was replaced, too."""
    before = F.scaled_dot_product_attention
    late = types.ModuleType("late")
    both = [Interception(lambda _: None) for _ in range(2)]
    for one in both:
        one.open()
    late.borrowed = F.scaled_dot_product_attention
    assert late.borrowed is not before
    sys.modules["late"] = late
    try:
        for at in (first, 1 - first):
            both[at].close()
    finally:
        del sys.modules["late"]
    assert F.scaled_dot_product_attention is before
    assert borrowed.scaled_dot_product_attention is before
    assert late.borrowed is before


def test_what_another_put_in_its_place_stays(heard):
    with intercept(lambda _: None):
        ours = F.scaled_dot_product_attention

        @functools.wraps(ours)
        def other(*args, **kwargs):
            return ours(*args, **kwargs)

        F.scaled_dot_product_attention = other
    try:
        with intercept(lambda _: None):
            assert F.scaled_dot_product_attention is not other
        assert F.scaled_dot_product_attention is other
        # As one does who puts back what was there.
        F.scaled_dot_product_attention = ours
        x = _drawn(B, H, S, D)
        with intercept(listening(heard)):
            F.scaled_dot_product_attention(x, x, x)
            borrowed.scaled_dot_product_attention(x, x, x)
        assert len(heard) == 2
        assert F.scaled_dot_product_attention is PLAIN
    finally:
        F.scaled_dot_product_attention = PLAIN


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:f", "function is 'nowhere:f', expected a module that can be imported"),
        ("tests.interception.borrowed:nothing", "it has no 'nothing'"),
        ("torch.nn:Module", "function is 'torch.nn:Module', expected a function, not a type"),
        ("torch.nn:Module.train", "expected one that its module holds under a name"),
    ],
)
def test_functions_that_there_are_not(name, message):
    with (
        pytest.raises(InvalidProblem, match=re.escape(message)),
        intercept(print, functions=[name]),
    ):
        pass
