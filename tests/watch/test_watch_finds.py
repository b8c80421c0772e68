"""Faults that begin in a training run are found and named; healthy runs are silent, bit for bit."""

import pytest
import torch
from tests.watch.training import Fault, Model, sdpa, train
from torch.nn import functional as F

import gradtruth
from gradtruth.backends.reference import Reference
from gradtruth.core.tensors import Forward, Grads
from gradtruth.verify.watch import WrongAttentionWarning

SDPA = "torch.nn.functional.scaled_dot_product_attention"
BEGINS, EVERY = 3, 2
"""A fault begins at step 3; steps 0, 2, 4 are watched, so 4 is the first to see it."""


def at(tensor, index, factor):
    """A copy with one part scaled."""
    found = tensor.clone()
    found[index] *= factor
    return found


def rolled_delta(dq, dk, dv):
    """dq and dk of the first sequence go to every one: what a per-row statistic of batch item 0 does."""
    return dq.roll(1, 0), dk.roll(1, 0), dv


GRADIENTS = {
    "dq of everything, 2 % too large": (lambda q, k, v: (q * 1.02, k, v), ["dq"]),
    "dq is 0": (lambda q, k, v: (q * 0, k, v), ["dq"]),
    "dq and dk negated": (lambda q, k, v: (-q, -k, v), ["dq", "dk"]),
    "dq and dk 2 % too large together": (lambda q, k, v: (q * 1.02, k * 1.02, v), ["dq", "dk"]),
    "dk of the last head": (lambda q, k, v: (q, at(k, (slice(None), -1), 1.02), v), ["dk"]),
    "dv of the first sequence": (lambda q, k, v: (q, k, at(v, 0, 1.02)), ["dv"]),
    "a batch mix-up": (rolled_delta, ["dq", "dk"]),
    "dv of the neighbour": (lambda q, k, v: (q, k, v.roll(1, 0)), ["dv"]),
    "dv of one key is lost": (lambda q, k, v: (q, k, at(v, (..., 3, slice(None)), 0)), ["dv"]),
}


def watched(monkeypatch, fault, attend=sdpa, **options):
    """The findings of a run in whose sdpa a fault begins."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", fault)
    torch.manual_seed(0)
    model = Model(attend, groups=options.pop("groups", 2))
    with gradtruth.watch(model, every=EVERY, on_finding=lambda _: None, **options) as found:
        train(model, 5, then=lambda step: setattr(fault, "on", step >= BEGINS))
    return found


def causal(q, k, v):
    return sdpa(q, k, v, is_causal=True)


@pytest.mark.parametrize("name", GRADIENTS)
def test_wrong_gradients_of_sdpa(monkeypatch, name):
    change, tensors = GRADIENTS[name]
    found = watched(monkeypatch, Fault(grads=change), causal)
    assert {(one.step, one.layer, one.tensor) for one in found.findings} == {
        (4, layer, tensor) for layer in ("layers.0", "layers.1") for tensor in tensors
    }
    assert {one.entry for one in found.findings} == {SDPA}
    assert found.steps_watched == 3
    assert found.record.calls.total() == 6


@pytest.mark.parametrize(
    ("change", "tensors"),
    [
        (lambda out: out * 1.02, {"out"}),
        (lambda out: out.roll(1, 0), {"out"}),
        (lambda out: at(out, (..., slice(8, None), slice(None)), 1.05), {"out"}),
    ],
    ids=["2 % too large", "the neighbour's", "from the second tile on"],
)
def test_wrong_forward_of_sdpa(monkeypatch, change, tensors):
    """Its gradients are right: nothing is said of them."""
    found = watched(monkeypatch, Fault(out=change), causal)
    assert {(one.step, one.tensor) for one in found.findings} == {(4, each) for each in tensors}


def test_what_follows_from_a_nan_is_not_judged(monkeypatch):
    """The last layer's dq holds a NaN; the layer below gets it with its dout, and all of the next step is NaN."""
    fault = Fault(grads=lambda q, k, v: (at(q, (1, 0, 5), float("nan")), k, v))
    monkeypatch.setattr(F, "scaled_dot_product_attention", fault)
    torch.manual_seed(0)
    model = Model(causal)
    with gradtruth.watch(model, every=1, heads=6, on_finding=lambda _: None) as found:
        train(model, 3, then=lambda step: setattr(fault, "on", step == 1))
    assert [(one.step, one.layer, one.tensor) for one in found.findings] == [(1, "layers.1", "dq")]
    assert "NaN" in found.findings[0].text
    reasons = [
        f"{name} holds NaN or Inf: what follows from it is not judged" for name in ("dout", "q")
    ]
    assert dict(found.record.not_reached) == {reasons[0]: 1, reasons[1]: 2}


def test_a_loss_scale_that_is_too_large_for_fp16():
    """Infinite gradients are then right, and what GradScaler looks for."""
    found = {}
    for scale in (1.0, 2.0**22):
        q, k, v = (
            torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(n))
            .half()
            .requires_grad_()
            for n in range(3)
        )
        with gradtruth.watch(None, every=1, heads=2, rows=16, columns=16) as watching:
            (F.scaled_dot_product_attention(q, k, v).float().sum() * scale).backward()
        found[scale] = k.grad.isfinite().all(), watching
        assert watching.findings == []
    assert found[1.0][0]
    assert not found[2.0**22][0]


# ---------------------------------------------------------------- our module, every kind of problem


def packed(q, k, v):
    """Three sequences of 24, 10 and 14 tokens of 2 x 24 in one row."""
    cu = torch.tensor([0, 24, 34, 48], dtype=torch.int32)
    return cu, tuple(x.reshape(-1, *x.shape[2:]) for x in (q, k, v))


class Own(torch.nn.Module):
    """Our module in a layer; thd where it says so."""

    def __init__(self, kind):
        super().__init__()
        heads, groups, more = 2, 2, {}
        if kind == "gqa":
            heads, groups = 2, 1
        if kind == "window":
            more = {"window_size": (5, 0)}
        if kind == "sink":
            more = {"softmax_type": "learnable"}
        if kind == "dropout":
            more = {"attention_dropout": 0.25}
        if kind == "softcap":
            more = {"softcap": 2.0}
        self.kind = kind
        self.form = "thd" if kind == "thd" else "bshd"
        self.attention = gradtruth.DotProductAttention(
            heads,
            16,
            groups,
            qkv_format=self.form,
            attn_mask_type="padding_causal" if self.form == "thd" else "causal",
            backend="reference",
            attention_dropout=more.pop("attention_dropout", 0.0),
            **more,
        )

    def forward(self, q, k, v):
        if self.form != "thd":
            return self.attention(q, k, v)
        cu, tensors = packed(q, k, v)
        options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 24, "max_seqlen_kv": 24}
        return self.attention(*tensors, **options).view(*q.shape[:2], -1)


KINDS = ["causal", "gqa", "window", "sink", "thd", "dropout", "softcap"]
BACKWARD = Reference.backward
CHANGES = {
    "dq": lambda found: Grads(dq=found.dq * 1.02, dk=found.dk, dv=found.dv, **sink(found)),
    "dk": lambda found: Grads(dq=found.dq, dk=at(found.dk, (..., -1, slice(None)), 1.02), dv=found.dv, **sink(found)),
    "dv": lambda found: Grads(dq=found.dq, dk=found.dk, dv=found.dv.roll(1, -2) + 1e-3, **sink(found)),
}  # fmt: skip


def sink(found):
    return {"dsoftmax_offset": found.dsoftmax_offset, "dbias": found.dbias}


def own(kind):
    torch.manual_seed(0)
    groups = 1 if kind == "gqa" else 2
    model = Model(lambda q, k, v: None, groups=groups)
    for layer in model.layers:
        layer.attend = Own(kind)
    return model


@pytest.mark.parametrize("tensor", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_gradients_of_our_module(monkeypatch, kind, tensor):
    on = []

    def backward(self, *arguments):
        found = BACKWARD(self, *arguments)
        return CHANGES[tensor](found) if on and on[0] else found

    monkeypatch.setattr(Reference, "backward", backward)
    model = own(kind)
    with gradtruth.watch(model, every=EVERY, on_finding=lambda _: None) as found:
        train(model, 5, batch=2, then=lambda step: on.insert(0, step >= BEGINS))
    assert {(one.step, one.layer, one.tensor) for one in found.findings} == {
        (4, f"layers.{n}.attend.attention", tensor) for n in range(2)
    }
    assert {one.entry for one in found.findings} == {"gradtruth.attention"}


def test_wrong_lse_of_our_module(monkeypatch):
    """An lse without the sink in it: what a ring would merge wrongly."""
    forward = Reference.forward

    def changed(self, problem, inputs):
        found = forward(self, problem, inputs)
        return Forward(out=found.out, lse=found.lse - 0.05, max_logit=found.max_logit)

    monkeypatch.setattr(Reference, "forward", changed)
    model = own("causal")
    with gradtruth.watch(model, every=EVERY, on_finding=lambda _: None) as found:
        train(model, 1, batch=2)
    assert {one.tensor for one in found.findings} >= {"lse"}


# ---------------------------------------------------------------- healthy


def masked(q, k, v):
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(-2)
    return sdpa(q, k, v, attn_mask=~hidden)


def biased(q, k, v):
    far = torch.arange(q.shape[1]).view(-1, 1) - torch.arange(k.shape[1])
    return sdpa(q, k, v, attn_mask=-0.1 * far.abs().to(q.dtype))


HEALTHY = {"causal": causal, "mask": masked, "bias": biased}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*HEALTHY, *KINDS, "dropout of sdpa"])
def test_healthy_training_is_silent_and_computes_the_same_bits(name, dtype):
    """A warning would be an error here."""

    def made():
        if name in HEALTHY:
            torch.manual_seed(0)
            return Model(HEALTHY[name], groups=1)
        if name == "dropout of sdpa":
            torch.manual_seed(0)
            return Model(lambda q, k, v: sdpa(q, k, v, dropout_p=0.2))
        return own(name)

    plain = train(made(), 4, dtype=dtype, batch=2)
    model = made()
    with gradtruth.watch(model, every=2, heads=4) as found:
        losses = train(model, 4, dtype=dtype, batch=2)
    assert torch.equal(losses, plain)
    assert found.findings == []
    assert found.record.calls.total() == 4
    assert not found.record.unconfirmed
    reasons = list(found.record.not_reached)
    assert reasons == (
        [
            "dropout_p is 0.2, and which weights were dropped is not known: the laws are looked at, no probe is"
        ]
        if name == "dropout of sdpa"
        else []
    )


def test_laws_see_dropout_whose_mask_is_not_known(monkeypatch):
    fault = Fault(grads=lambda q, k, v: (q, k * 1.05, v))
    dropping = lambda q, k, v: sdpa(q, k, v, dropout_p=0.2)  # noqa: E731
    found = watched(monkeypatch, fault, dropping)
    assert {(one.step, one.layer, one.tensor) for one in found.findings} == {
        (4, "layers.0", "dq, dk"),
        (4, "layers.1", "dq, dk"),
    }


def test_default_warns_once_per_layer_and_tensor(monkeypatch):
    fault = Fault(grads=lambda q, k, v: (q * 1.05, k, v))
    monkeypatch.setattr(F, "scaled_dot_product_attention", fault)
    torch.manual_seed(0)
    model = Model(causal, layers=1)
    fault.on = True
    with gradtruth.watch(model, every=1) as found, pytest.warns(WrongAttentionWarning) as told:
        train(model, 3)
    assert len(found.findings) == 3
    assert [str(one.message) for one in told] == [str(found.findings[0])]
