"""How a watch counts steps, what it reaches, what it does with a finding, and that the program does not notice."""

import copy
import logging
import pickle
from collections import Counter

import pytest
import torch
from tests.watch.training import PLAIN, Fault, Model, sdpa, train
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradtruth
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.watch import WrongAttention
from gradtruth.verify.watch.turns import Turns


def causal(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def model(attend=causal, **options):
    torch.manual_seed(0)
    return Model(attend, **options)


def text(batch=2, length=12):
    return torch.randint(0, 17, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def faulty(monkeypatch):
    """dq is 5 % too large, from the start."""
    fault = Fault(grads=lambda q, k, v: (q * 1.05, k, v))
    fault.on = True
    monkeypatch.setattr(F, "scaled_dot_product_attention", fault)


# ---------------------------------------------------------------- steps


def test_a_step_is_a_forward_in_training_mode():
    net, seen = model(), []
    with gradtruth.watch(net, every=2) as watched:
        for training in (True, False, True, True, False, True, True):
            net.train(training)
            net(text()).sum().backward()
            seen.append((watched.step_number, watched.record.calls.total()))
    assert seen == [(0, 2), (0, 2), (1, 2), (2, 4), (2, 4), (3, 4), (4, 6)]
    assert watched.steps_watched == 3


def test_steps_by_hand():
    """Two forwards make one step, as with gradient accumulation."""
    net, seen = model(), []
    with gradtruth.watch(net, every=2) as watched:
        for _ in range(4):
            for _ in range(2):
                net(text()).sum().backward()
            watched.step()
            seen.append((watched.step_number, watched.record.calls.total()))
    # Until the first call of step() forwards counted: one of two was watched.
    assert seen == [(1, 2), (2, 2), (3, 6), (4, 6)]


def test_without_a_model_every_call_of_the_process():
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    with gradtruth.watch(None, every=2) as watched:
        for _ in range(3):
            F.scaled_dot_product_attention(q, q, q).sum().backward()
            watched.step()
    assert watched.record.calls == {("", "torch.nn.functional.scaled_dot_product_attention"): 2}


def test_only_the_module_that_is_watched():
    net = model()
    with gradtruth.watch(net.layers[1], every=1) as watched:
        net(text()).sum().backward()
    assert [layer for layer, _ in watched.record.calls] == ["Block"]


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_nothing_happens_in_other_steps():
    """Not one operation more, so nothing that could wait for a device."""
    net, names = model(), []
    for watch in (False, True):
        if watch:
            watched = gradtruth.watch(net, every=100)
            net(text()).sum().backward()
        net.zero_grad()
        with _Operations() as seen:
            net(text()).sum().backward()
        names.append(seen.names)
    watched.close()
    assert names[0] == names[1]
    assert watched.record.calls.total() == 2


def test_everything_is_put_back():
    net = model()
    watched = gradtruth.watch(net)
    assert F.scaled_dot_product_attention is not PLAIN["sdpa"]
    watched.close()
    watched.close()
    assert F.scaled_dot_product_attention is PLAIN["sdpa"]
    assert not net._forward_pre_hooks


def test_copies_of_the_model_are_not_watched():
    """A moving average, or a whole model in a file."""
    net = Model(causal)
    with gradtruth.watch(net, every=1) as watched:
        for made in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            made.train()
            made(text()).sum().backward()
        assert watched.step_number == -1
        net(text()).sum().backward()
    assert watched.step_number == 0


# ---------------------------------------------------------------- findings


@pytest.mark.usefixtures("faulty")
def test_raise():
    net = model()
    with (
        gradtruth.watch(net, on_finding="raise", this_rank=3) as watched,
        pytest.raises(WrongAttention, match=r"rank 3, step 0, layer layers\.1 .*: dq is wrong in"),
    ):
        net(text()).sum().backward()
    assert len(watched.findings) == 1


@pytest.mark.usefixtures("faulty")
def test_a_function_of_the_users_gets_every_finding():
    net, told = model(), []
    with gradtruth.watch(net, every=1, on_finding=told.append) as watched:
        for _ in range(2):
            net(text()).sum().backward()
    assert told == watched.findings
    assert [one.step for one in told] == [0, 0, 1, 1]
    assert all(one.rank is None for one in told)


@pytest.mark.usefixtures("faulty")
def test_the_case_is_written_at_once(tmp_path):
    """One for each layer and set of tensors; it says what is wrong with it."""
    net = model()
    with gradtruth.watch(net, every=1, on_finding=lambda _: None, save=tmp_path) as watched:
        net(text()).sum().backward()
        files = sorted(tmp_path.glob("*.safetensors"))
        assert len(files) == 2
        net(text()).sum().backward()
    assert sorted(tmp_path.glob("*.safetensors")) == files
    assert sorted(one.case for one in watched.findings if one.case) == files
    for path in files:
        case = Case.load(path)
        assert case.problem.label() == "b2 s12 h2/2 d16 fp32 bshd causal"
        layer = case.provenance["layer"]
        assert case.provenance["wrong_dq"].startswith(f"step 0, layer {layer} ")
        assert case.dout.abs().sum() > 0


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("limit", [{"max_cases": 1}, {"max_bytes": "16kB"}])
def test_files_are_bounded(tmp_path, limit):
    net = model()
    with gradtruth.watch(net, on_finding=lambda _: None, save=tmp_path / "new", **limit) as watched:
        net(text()).sum().backward()
    assert len(list((tmp_path / "new").glob("*.safetensors"))) == 1
    assert [one.case is None for one in watched.findings] == [False, True]
    (reason,) = [line for line in watched.summary().splitlines() if line.startswith("not written")]
    assert next(iter(limit)) in reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"every": 0}, "every is 0, expected a positive int"),
        ({"every": 2.0}, r"every is 2\.0, expected a positive int"),
        ({"rows": -1}, "rows is -1, expected an int, 0 or more"),
        ({"heads": "all"}, "heads is 'all', expected an int, 0 or more"),
        ({"on_finding": "stop"}, "on_finding is 'stop', expected 'warn', 'raise' or a function"),
        ({"seed": 1.5}, r"seed is 1\.5, expected an int"),
        ({"max_cases": 0}, "max_cases is 0, expected a positive int"),
        ({"functions": ["nowhere:name"]}, "nowhere"),
        ({"this_rank": -1}, "this_rank is -1"),
    ],
)
def test_bad_arguments(given, said):
    net = model()
    with pytest.raises(InvalidProblem, match=said):
        gradtruth.watch(net, **given)
    assert F.scaled_dot_product_attention is PLAIN["sdpa"]
    assert not net._forward_pre_hooks


def test_no_model():
    with pytest.raises(
        InvalidProblem, match=r"model is a list, expected a torch\.nn\.Module or None"
    ):
        gradtruth.watch([])


# ---------------------------------------------------------------- what is reached


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.model, self.reentrant = model(), reentrant

    def forward(self, tokens):
        x = self.model.embed(tokens) + self.model.places[: tokens.shape[1]]
        for layer in self.model.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.model.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(monkeypatch, reentrant):
    """Each call is looked at once, and computes the same bits."""
    plain = train(Checkpointed(reentrant), 3)
    net = Checkpointed(reentrant)
    with gradtruth.watch(net, every=1) as watched:
        losses = train(net, 3)
    assert torch.equal(losses, plain)
    assert watched.step_number == 2
    assert watched.record.calls.total() == 6
    fault = Fault(grads=lambda q, k, v: (q, k * 1.05, v))
    monkeypatch.setattr(F, "scaled_dot_product_attention", fault)
    net = Checkpointed(reentrant)
    with gradtruth.watch(net, every=1, on_finding=lambda _: None) as watched:
        train(net, 3, then=lambda step: setattr(fault, "on", step >= 1))
    assert {(one.step, one.layer, one.tensor) for one in watched.findings} == {
        (step, f"model.layers.{n}", "dk") for step in (1, 2) for n in (0, 1)
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at its own inputs
@pytest.mark.parametrize("way", ["torch.compile", "module.compile", "inside"])
def test_compiled_code_is_not_reached(caplog, way):
    net = model(layers=1)
    compiled = net
    if way == "torch.compile":
        compiled = torch.compile(net, backend="eager", fullgraph=True)
    elif way == "module.compile":
        net.compile(backend="eager", fullgraph=True)
    else:
        attend = torch.compile(causal, backend="eager", fullgraph=True)
        net.layers[0].attend = attend
    with caplog.at_level(logging.INFO, "gradtruth"), gradtruth.watch(compiled, every=1) as watched:
        compiled(text()).sum().backward()
    assert watched.step_number == (-1 if way == "module.compile" else 0)
    assert not watched.record.calls
    said = watched.summary()
    assert "not reached: no " in said
    assert ("is compiled by torch.compile" in said) is (way != "inside")
    assert caplog.records[-1].levelname == "WARNING"


def test_watched_before_it_is_compiled():
    """No graph break: the hook is nothing to the compiler."""
    net = model(layers=1)
    with gradtruth.watch(net, every=1) as watched:
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        compiled(text()).sum().backward()
    assert "not reached: no step began" in watched.summary()


def test_what_was_written_to_in_between():
    """Inputs: nothing can be said. out: its gradients still can."""
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    with gradtruth.watch(None, every=1) as watched:
        key = torch.randn(1, 2, 5, 4)
        with sdpa_kernel(SDPBackend.MATH):  # the others keep out for their backward
            out = F.scaled_dot_product_attention(q, q, key)
        out.mul_(2)
        loss = out.sum()
        loss.backward()
        F.scaled_dot_product_attention(q, q, key)
    assert watched.record.calls.total() == 1
    assert list(watched.record.not_reached) == [
        "out was written to after the call: out and lse are not looked at"
    ]


def test_an_operation_that_is_not_understood_is_told_once():
    five = torch.randn(1, 1, 2, 5, 4, requires_grad=True)
    with gradtruth.watch(None, every=1) as watched:
        for _ in range(2):
            F.scaled_dot_product_attention(five, five, five).sum().backward()
    lines = [line for line in watched.summary().splitlines() if "5 dims" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "not reached, 1 times: torch.nn.functional.scaled_dot_product_attention"
    )


def test_an_examination_that_fails_does_not_stop_the_training(monkeypatch):
    def broken(*_arguments, **_options):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr("gradtruth.verify.watch.sentinel.examine", broken)
    net = model()
    with gradtruth.watch(net) as watched:
        net(text()).sum().backward()
    assert watched.record.not_reached == {"OutOfMemoryError: no memory left": 2}


def test_a_backward_that_comes_twice_is_looked_at_once():
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    with gradtruth.watch(None, every=1) as watched:
        loss = F.scaled_dot_product_attention(q, q, q).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert watched.record.calls.total() == 1


# ---------------------------------------------------------------- what it is blind to


def test_laws_alone_are_blind_to_common_factors(monkeypatch):
    """dq and dk of 0, negated or scaled together keep every law; probes are for them."""
    for factor in (0.0, -1.0, 1.1):
        fault = Fault(grads=lambda q, k, v, f=factor: (q * f, k * f, v))
        fault.on = True
        monkeypatch.setattr(F, "scaled_dot_product_attention", fault)
        net = model()
        for heads in (0, 1):
            with gradtruth.watch(net, heads=heads, on_finding=lambda _: None) as watched:
                net(text()).sum().backward()
            assert {one.tensor for one in watched.findings} == ({"dq", "dk"} if heads else set())


def test_probes_are_blind_to_heads_that_they_do_not_draw(monkeypatch):
    """What keeps the laws in one head of many is found when that head is drawn: some time, not at once."""

    def change(q, k, v):
        q, k = q.clone(), k.clone()
        q[1, 3] *= 1.1
        k[1, 3] *= 1.1
        return q, k, v

    fault = Fault(grads=change)
    fault.on = True
    monkeypatch.setattr(F, "scaled_dot_product_attention", fault)
    net = model(heads=4, groups=4, layers=1)
    with gradtruth.watch(net, every=1, on_finding=lambda _: None) as watched:
        for _ in range(30):
            net(text()).sum().backward()
    steps = {one.step for one in watched.findings}
    assert 0 < len(steps) < 15
    assert {(one.sequence, one.head) for one in watched.findings} == {(1, 3)}


def test_gradients_of_bias_and_sink_are_not_looked_at(monkeypatch):
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    bias = torch.zeros(1, 2, 5, 5, requires_grad=True)
    bias.register_hook(lambda grad: grad * 2)
    with gradtruth.watch(None, every=1) as watched:
        F.scaled_dot_product_attention(q, q, q, attn_mask=bias).sum().backward()
    assert watched.findings == []
    assert watched.record.calls.total() == 1


# ---------------------------------------------------------------- transformers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_a_llama(way, dtype):
    """Its eager attention keeps its scores in the dtype of its inputs: no finding, but judged by that."""
    transformers = pytest.importorskip(
        "transformers", reason="an extra: pip install gradtruth[real]"
    )
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    tokens = torch.arange(2 * 30).view(2, 30) * 7 % 32
    mask = torch.ones_like(tokens)
    mask[1, 22:] = 0
    losses = []
    for watch in (False, True):
        torch.manual_seed(0)
        net = transformers.LlamaForCausalLM(config).to(dtype)
        net.set_attn_implementation(way)
        net.train()
        watched = gradtruth.watch(net, every=1, heads=4) if watch else None
        for _ in range(2):
            loss = net(tokens, attention_mask=mask, labels=tokens).loss
            loss.backward()
            losses.append(loss.detach())
    watched.close()
    assert torch.equal(torch.stack(losses[:2]), torch.stack(losses[2:]))
    assert watched.findings == []
    assert [layer for layer, _ in watched.record.calls] == [
        f"model.layers.{n}.self_attn" for n in (1, 0)
    ]
    assert watched.record.calls.total() == 4


def test_calls_take_turns():
    """With six calls a step and four in each watched one: all in the first, then four, and the others next time."""
    net, seen = model(layers=6), []
    with gradtruth.watch(net, every=2, calls=4) as watched:
        for _ in range(7):
            before = Counter(watched.record.calls)
            net(text()).sum().backward()
            seen.append(sorted(layer for layer, _ in watched.record.calls - before))
    every = [f"layers.{n}" for n in range(6)]
    assert seen[0] == every
    assert seen[1] == seen[3] == seen[5] == []
    assert [len(x) for x in (seen[2], seen[4], seen[6])] == [4, 4, 4]
    assert sorted({*seen[2], *seen[4]}) == every
    assert "6 more had not their turn" in watched.summary()


def test_ranks_begin_at_different_calls():
    due = []
    for rank in (0, 1):
        turns = Turns(2)
        turns.begin()
        assert all(turns.due(rank) for _ in range(4))
        turns.begin()
        due.append([turns.due(rank) for _ in range(4)])
    assert due[0] == [not x for x in due[1]]


@pytest.mark.parametrize("calls", [0, -1, 1.5, True])
def test_calls_that_are_no_number_are_refused(calls):
    with pytest.raises(InvalidProblem, match=f"calls is {calls}, expected a positive int or None"):
        gradtruth.watch(None, calls=calls)
