"""DotProductAttention in training: sinks, dropout, checkpointing, state; and as a module."""

from __future__ import annotations

import copy
import pickle
import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.dense import attend, kept
from tests.module_cases import (
    FORMATS,
    SEEN,
    B,
    H,
    S,
    agree,
    bits,
    defined,
    lengths,
    made,
    module,
    run,
    stored,
)

import gradtruth
from gradtruth.backends.unfused import Unfused
from gradtruth.module import alibi_slopes_of

# ---------------------------------------------------------------- max_logit and sinks


@pytest.mark.parametrize("form", FORMATS)
def test_max_logit(form: str) -> None:
    tensors = made(seed=3)
    mask = "padding_causal" if form == "thd" else "causal"
    attention = module(qkv_format=form, attn_mask_type=mask, return_max_logit=True)
    leaves = [stored(t, form).requires_grad_() for t in tensors[:3]]
    out, top = attention(*leaves, **lengths(form))
    scores = [attend(*(t[n] for t in tensors[:3]), visible=SEEN).scores for n in range(B)]
    torch.testing.assert_close(
        top.double(), torch.stack(scores).amax((0, 2, 3)), rtol=1e-6, atol=1e-6
    )
    assert top.shape == (H,)
    assert not top.requires_grad
    assert out.requires_grad


def test_learnable_sink() -> None:
    tensors = made()
    attention = module(qkv_format="bshd", softmax_type="learnable")
    assert list(attention.state_dict()) == ["softmax_offset"]
    assert torch.equal(attention.softmax_offset, torch.zeros(H))
    values = torch.tensor([0.5, -1.0, 2.0, 0.0])
    attention.load_state_dict({"softmax_offset": values})
    offset = values.double().requires_grad_()
    agree(run(attention, "bshd", tensors), defined(tensors, {"visible": SEEN, "sink": values}))
    attention(*tensors[:3]).backward(tensors[3].flatten(-2))
    dense = [attend(*(t[n] for t in tensors[:3]), visible=SEEN, sink=offset).out for n in range(B)]
    torch.stack(dense).backward(tensors[3])
    torch.testing.assert_close(
        attention.softmax_offset.grad.double(), offset.grad, rtol=1e-6, atol=1e-7
    )


def test_sink_follows_the_modules_dtype() -> None:
    tensors = [t.bfloat16() for t in made()]
    attention = module(qkv_format="bshd", softmax_type="learnable").bfloat16()
    attention(*tensors[:3]).backward(tensors[3].flatten(-2))
    assert attention.softmax_offset.grad.dtype == torch.bfloat16
    assert attention.softmax_offset.grad.abs().min() > 0


@pytest.mark.parametrize("kind", ["vanilla", "off-by-one"])
def test_other_softmax_types_have_no_state(kind: str) -> None:
    attention = module(softmax_type=kind)
    assert not list(attention.parameters())
    assert not attention.state_dict()


@pytest.mark.parametrize("kind", ["vanilla", "learnable"])
def test_loads_transformer_engines_checkpoints(kind: str) -> None:
    """They hold FP8 state beside the parameters, empty here; a module around it loads them strictly."""
    block = torch.nn.ModuleDict(
        {"attention": module(softmax_type=kind), "linear": torch.nn.Linear(2, 2)}
    )
    state = block.state_dict()
    given = {
        **state,
        "attention._extra_state": torch.empty(0),
        "attention.fused_attention._extra_state": None,
    }
    block.load_state_dict(given, strict=True)
    assert "attention._extra_state" in given
    with pytest.raises(RuntimeError, match=r"attention\.nonsense"):
        block.load_state_dict({**state, "attention.nonsense": torch.empty(0)}, strict=True)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [2.0**-k for k in range(1, 9)]),
        (3, [2**-4, 2**-8, 2**-2]),
        (12, [2.0**-k for k in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes(heads: int, slopes: list[float]) -> None:
    assert torch.equal(alibi_slopes_of(heads), torch.tensor(slopes, dtype=torch.float32))


# ---------------------------------------------------------------- dropout and checkpointing

P = 0.4


def next_seed() -> int:
    """The seed that the next call draws; the generator stays as it is."""
    state = torch.get_rng_state()
    seed = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64))
    torch.set_rng_state(state)
    return seed


@pytest.mark.parametrize("p", [P, 1.0])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_dropout_in_training(form: str, p: float) -> None:
    tensors = made()
    attention = module(qkv_format=form, attention_dropout=p)
    seed = next_seed()
    each = [
        {"visible": SEEN, "keep": kept(p, seed, n, H, S, S), "p": p if p < 1 else 0.0}
        for n in range(B)
    ]
    agree(run(attention, form, tensors), defined(tensors, *each))


def test_no_dropout_in_evaluation() -> None:
    tensors = made()
    before = torch.get_rng_state()
    found = run(module(qkv_format="bshd", attention_dropout=P).eval(), "bshd", tensors)
    assert bits(found, run(module(qkv_format="bshd"), "bshd", tensors))
    assert torch.equal(before, torch.get_rng_state())


def test_manual_seed_repeats_dropout() -> None:
    tensors = made()
    attention = module(qkv_format="bshd", attention_dropout=P)
    torch.manual_seed(11)
    first, second = run(attention, "bshd", tensors), run(attention, "bshd", tensors)
    torch.manual_seed(11)
    again = run(attention, "bshd", tensors)
    assert bits(first, again)
    assert not torch.equal(first[0], second[0])


class Tracker:
    """An RNG tracker as tensor parallelism has it: a state of its own inside ``fork``."""

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()
        self.forks = 0

    @contextmanager
    def fork(self) -> Any:
        self.forks += 1
        before = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(before)


def test_dropout_draws_from_the_tracker_unless_sequence_parallel() -> None:
    tensors = made()
    tracker, before = Tracker(5), torch.get_rng_state()
    options = {
        "qkv_format": "bshd",
        "attention_dropout": P,
        "get_rng_state_tracker": lambda: tracker,
    }
    found = run(module(**options), "bshd", tensors)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    assert bits(found, run(module(qkv_format="bshd", attention_dropout=P), "bshd", tensors))
    torch.manual_seed(6)
    parallel = run(module(**options, sequence_parallel=True), "bshd", tensors)
    torch.manual_seed(6)
    assert bits(parallel, run(module(qkv_format="bshd", attention_dropout=P), "bshd", tensors))
    run(module(**options).eval(), "bshd", tensors)
    assert tracker.forks == 1


@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("form", FORMATS)
def test_checkpoint_recomputes_the_same_bits(
    form: str, p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = gradtruth.module.run_forward
    monkeypatch.setattr(
        gradtruth.module, "run_forward", lambda *a: (calls.append(1), original(*a))[1]
    )
    tensors = made()
    mask = "padding_causal" if form == "thd" else "causal"
    attention = module(qkv_format=form, attn_mask_type=mask, attention_dropout=p)
    torch.manual_seed(3)
    plain = run(attention, form, tensors, **lengths(form))
    assert len(calls) == 1
    torch.manual_seed(3)
    again = run(attention, form, tensors, **lengths(form), checkpoint_core_attention=True)
    assert len(calls) == 3
    assert bits(plain, again)


def test_checkpoint_recomputes_with_the_same_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward may run after ``use`` ended and in another thread, as autograd's is on a GPU."""
    calls = []
    original = Unfused.forward
    monkeypatch.setattr(Unfused, "forward", lambda *a: (calls.append(1), original(*a))[1])
    q, k, v, dout = made()
    q.requires_grad_()
    attention = module(qkv_format="bshd")
    with gradtruth.use(backend="unfused"):
        out = attention(q, k, v, checkpoint_core_attention=True)
    worker = threading.Thread(target=lambda: out.backward(dout.flatten(-2)))
    worker.start()
    worker.join()
    assert q.grad is not None
    assert len(calls) == 2
    with gradtruth.use(backend="unfused"):
        auto = module(qkv_format="bshd", backend="reference")(
            q, k, v, checkpoint_core_attention=True
        )
        auto.backward(dout.flatten(-2))
    assert len(calls) == 2


# ---------------------------------------------------------------- as a module


def test_how_it_runs_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    original = gradtruth.module.run_forward
    monkeypatch.setattr(
        gradtruth.module, "run_forward", lambda *a: (seen.extend(a[1:]), original(*a))[1]
    )
    attention = module(
        qkv_format="bshd",
        backend=("reference", "unfused"),
        deterministic=False,
        batch_invariant=True,
        check_inputs=False,
    )
    attention(*made()[:3])
    options, policy = seen
    assert (options.deterministic, options.batch_invariant) == (False, True)
    assert (policy.backend, policy.check_inputs) == (("reference", "unfused"), False)


def test_shows_what_differs_from_the_defaults() -> None:
    assert repr(module()) == (
        "DotProductAttention(heads=4/2, head_dim=(6, 3), qkv_format='sbhd', attn_mask_type='causal')"
    )
    shown = repr(
        module(
            kv_channels=8,
            window_size=(4, 0),
            attention_dropout=0.1,
            softmax_type="learnable",
            softcap=30.0,
        )
    )
    assert shown == (
        "DotProductAttention(heads=4/2, head_dim=8, qkv_format='sbhd', attn_mask_type='causal', window_size=(4, 0), "
        "attention_dropout=0.1, softcap=30.0, softmax_type='learnable')"
    )


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_compute_the_same(copied: Any) -> None:
    tensors = made()
    attention = module(qkv_format="bshd", softmax_type="learnable", window_size=(2, 0))
    torch.nn.init.ones_(attention.softmax_offset)
    other = copied(attention)
    assert bits(run(attention, "bshd", tensors), run(other, "bshd", tensors))
    assert other.softmax_offset is not attention.softmax_offset
    assert repr(other) == repr(attention)
