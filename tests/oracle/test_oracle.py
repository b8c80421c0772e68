"""The oracle against autograd, torch SDPA, finite differences, its own tiles, and the limits it promises."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tests.oracle.dense import by_head, dense, draw, scores
from tests.oracle.problems import generate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.core.merge import apply_sink, merge
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs, Wanted
from gradtruth.core.tile import tile
from gradtruth.verify.truth import oracle

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_equals_autograd_of_the_dense_definition(block, monkeypatch):
    """Over several blocks of queries, with lse as a result that has a gradient."""
    monkeypatch.setattr(oracle, "_BLOCK", block * 4 * 40)
    problem, inputs, dout = dense(
        right=0, softcap=2.0, bias="post_scale", softmax="learnable", dv=24
    )
    dlse = draw(9, 2, 4, 40)
    q, k, v, bias = (getattr(inputs, n).clone().requires_grad_() for n in ("q", "k", "v", "bias"))
    sink = inputs.softmax_offset.double().requires_grad_()
    x = scores(q, k, problem, bias)
    lse = torch.logaddexp(torch.logsumexp(x, -1), sink.view(1, -1, 1))
    out = (torch.exp(x - lse[..., None]) @ by_head(v, 4)).transpose(1, 2)
    found, grads = oracle.evaluate(problem, inputs, dout, dlse)
    torch.testing.assert_close(found.out, out.detach(), **EXACT)
    torch.testing.assert_close(found.lse, lse.detach(), **EXACT)
    loss = (out * dout).sum() + (lse * dlse).sum()
    for name, right in zip(
        ("dq", "dk", "dv", "dbias", "dsoftmax_offset"),
        torch.autograd.grad(loss, (q, k, v, bias, sink)),
        strict=True,
    ):
        torch.testing.assert_close(getattr(grads.grads, name), right, **EXACT)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equals_sdpa(causal, groups):
    problem, inputs, dout = dense(3, g=groups, dv=24, right=0 if causal else None)
    q, k, v = (getattr(inputs, n).transpose(1, 2).clone().requires_grad_() for n in "qkv")
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=groups < 4)
    found, grads = oracle.evaluate(problem, inputs, dout)
    torch.testing.assert_close(found.out, out.detach().transpose(1, 2), **EXACT)
    right = torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2))
    for name, gradient in zip(("dq", "dk", "dv"), right, strict=True):
        torch.testing.assert_close(getattr(grads.grads, name), gradient.transpose(1, 2), **EXACT)


@pytest.mark.parametrize("seed", [4, 11, 23, 31, 47, 58])
def test_equals_finite_differences(seed):
    """The backward is the derivative of the forward, dropout and sink included."""
    case = generate(seed)
    problem, dlse = case.problem, case.dlse
    dout = case.dout.nan_to_num()
    dlse = None if dlse is None else dlse.nan_to_num()

    def loss(inputs):
        found = oracle.forward(problem, inputs)
        total = (found.out * dout).sum()
        # Rows without keys have lse = sink, which by contract adds nothing to dsink.
        return total if dlse is None else total + (found.lse * dlse)[found.lse > -torch.inf].sum()

    grads = oracle.backward(problem, case.inputs, dout, dlse)
    names = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias"}
    tried = 0
    for name, gradient in names.items():
        tensor = getattr(case.inputs, name)
        if tensor is None or tensor.numel() == 0:
            continue
        direction = draw(seed, *tensor.shape)
        ends = [
            loss(dataclasses.replace(case.inputs, **{name: tensor + step * direction}))
            for step in (1e-5, -1e-5)
        ]
        slope = (ends[0] - ends[1]) / 2e-5
        expected = (getattr(grads.grads, gradient) * direction).sum()
        torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-8)
        tried += 1
    assert tried >= 3


def test_given_forward_is_taken_literally():
    """P = exp(x - lse) and delta = dout . out - dlse for any out and lse."""
    problem, inputs, dout = dense(5, right=0, softmax="learnable")
    out, lse, dlse = draw(6, 2, 40, 4, 16), draw(7, 2, 4, 40), draw(8, 2, 4, 40)
    lse[1, 2, 5] = -torch.inf
    p = torch.exp(scores(inputs.q, inputs.k, problem) - lse[..., None])
    p[1, 2, 5] = 0
    v, dout_h = by_head(inputs.v, 4), dout.transpose(1, 2)
    delta = (dout_h * out.transpose(1, 2)).sum(-1) - dlse
    ds = p * (dout_h @ v.mT - delta[..., None]) * problem.scale
    dq = (ds @ by_head(inputs.k, 4)).transpose(1, 2)
    dk = (ds.mT @ by_head(inputs.q, 4)).transpose(1, 2).unflatten(2, (2, 2)).sum(3)
    dv = (p.mT @ dout_h).transpose(1, 2).unflatten(2, (2, 2)).sum(3)
    delta[1, 2, 5] = 0
    lse[1, 2, 5] = 0
    dsink = -(torch.exp(inputs.softmax_offset.view(1, -1, 1) - lse) * delta).sum((0, 2))
    lse[1, 2, 5] = -torch.inf
    grads = oracle.backward(problem, inputs, dout, dlse, forward=(out, lse)).grads
    for name, right in {"dq": dq, "dk": dk, "dv": dv}.items():
        torch.testing.assert_close(getattr(grads, name), right, **EXACT)
    dsink_found = grads.dsoftmax_offset.clone()
    dsink_found[2] = dsink[2] = 0  # lse -inf with a sink has no meaning
    torch.testing.assert_close(dsink_found, dsink, **EXACT)


def test_own_forward_can_be_handed_back():
    """The same values and the same magnitudes as in one walk."""
    problem, inputs, dout = dense(5, right=0)
    found, grads = oracle.evaluate(problem, inputs, dout)
    again = oracle.backward(problem, inputs, dout, forward=found)
    exact = oracle.backward(problem, inputs, dout, forward=(found.out, found.lse))
    for name, right in grads.items():
        torch.testing.assert_close(getattr(again.grads, name), right, **EXACT)
        for kind in ("bound", "spread"):
            one, other = (getattr(x.magnitudes[name], kind) for x in (again, grads))
            torch.testing.assert_close(one, other)
            assert (getattr(exact.magnitudes[name], kind) <= other).all()
    assert (exact.magnitudes["dq"].bound < grads.magnitudes["dq"].bound).all()


@pytest.mark.parametrize("seed", range(200, 225))
def test_tiles_add_up_to_the_whole(seed):
    """Two key halves, merged, with the sink entering once; gradients from the whole's out and lse."""
    case = generate(seed)
    layout, spec = case.problem.layout, case.problem.spec
    whole, grads = oracle.evaluate(case.problem, case.inputs, case.dout, case.dlse)
    out = lse = None
    sums = {}
    for keys in ((0, 3), (3, 99)):
        part, inputs = tile(case.problem, case.inputs, keys=keys)
        found = oracle.forward(part, inputs)
        pair = canonical(found.out, layout), canonical_lse(found.lse, layout)
        out, lse = pair if out is None else merge(out, lse, *pair)
        given = (whole.out, whole.lse)
        for name, x in oracle.backward(part, inputs, case.dout, case.dlse, forward=given).items():
            sums[name] = sums.get(name, 0) + x
    if spec.sink:
        offset = case.inputs.softmax_offset
        sink = torch.zeros(case.problem.num_heads).double() if offset is None else offset
        valid = (canonical_lse(whole.lse, layout) > -torch.inf)[:, 0]
        out, lse = apply_sink(out, lse, sink, valid)
    torch.testing.assert_close(out, canonical(whole.out, layout), **EXACT)
    torch.testing.assert_close(lse, canonical_lse(whole.lse, layout), **EXACT)
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(sums[name], getattr(grads.grads, name), **EXACT)


@pytest.mark.parametrize("seed", range(400, 430))
def test_a_tile_is_the_part_of_the_whole(seed):
    """Later queries, KV heads and sequences alone: same masks, slopes, bias and dropout."""
    case = generate(seed)
    spec = dataclasses.replace(case.problem.spec, softmax="vanilla", dropout_p=0.4)
    problem = dataclasses.replace(case.problem, spec=spec)
    groups, batch, heads = problem.num_gqa_groups, problem.batch, problem.num_heads
    inputs = dataclasses.replace(case.inputs, softmax_offset=None)
    whole = canonical_lse(oracle.forward(problem, inputs).lse, spec.layout)
    out = canonical(oracle.forward(problem, inputs).out, spec.layout)
    part, cut = tile(
        problem, inputs, queries=(2, 99), groups=(groups - 1, groups), sequences=(batch - 1, batch)
    )
    found = oracle.forward(part, cut)
    first = heads - problem.group_size
    side = case.meaning.sides_q[-1]
    here = slice(side.start + 2, side.start + max(2, side.length))
    row = 0 if spec.layout == "thd" else slice(batch - 1, batch)
    right = torch.zeros_like(canonical(found.out, spec.layout))
    right[:, here] = out[row, here, first:]
    torch.testing.assert_close(canonical(found.out, spec.layout), right, **EXACT)
    right = torch.full_like(canonical_lse(found.lse, spec.layout), -torch.inf)
    right[:, :, here] = whole[row, first:, here]
    torch.testing.assert_close(canonical_lse(found.lse, spec.layout), right, **EXACT)


def test_whatever_lies_in_the_bias_of_padding_stays_there():
    """NaN in rows and columns of bias that belong to no sequence."""
    hidden = torch.zeros(2, 40, dtype=torch.bool)
    hidden[0, :3] = hidden[1, 30:] = hidden[1, 7] = True
    problem, inputs, dout = dense(4, lengths="padding_mask", bias="post_scale")
    clean = dataclasses.replace(
        inputs,
        bias=draw(3, 2, 4, 40, 40),
        padding_mask_q=hidden,
        padding_mask_kv=hidden.flip(0),
    )
    problem = Problem.of(problem.spec, clean)
    unused = hidden[:, None, :, None] | hidden.flip(0)[:, None, None, :]
    dirty = dataclasses.replace(clean, bias=clean.bias.masked_fill(unused, torch.nan))
    right, found = (oracle.evaluate(problem, x, dout) for x in (clean, dirty))
    for one, other in zip(right, found, strict=True):
        for name, x in one.items():
            assert torch.equal(dict(other.items())[name], x), name
            assert torch.equal(other.magnitudes[name].spread, one.magnitudes[name].spread), name
    assert (found[1].grads.dbias[unused.expand_as(clean.bias)] == 0).all()


@pytest.mark.parametrize("logit", [-900.0, 900.0])
def test_a_sink_of_any_size_does_not_overflow(logit):
    problem, inputs, dout = dense(5, s=6, softmax="learnable")
    inputs = dataclasses.replace(inputs, softmax_offset=torch.full((4,), logit))
    found, grads = oracle.evaluate(problem, inputs, dout)
    plain = dataclasses.replace(problem, spec=Spec())
    vanilla = oracle.forward(plain, dataclasses.replace(inputs, softmax_offset=None))
    right = vanilla.lse if logit < 0 else torch.full_like(found.lse, logit)
    torch.testing.assert_close(found.lse, right, **EXACT)
    torch.testing.assert_close(found.out, vanilla.out if logit < 0 else 0 * found.out, **EXACT)
    assert all(x.isfinite().all() for _, x in grads.items())


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        storages = [x.untyped_storage() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *(s.nbytes() // 8 for s in storages)])
        return result


def test_memory_is_linear_in_length(monkeypatch):
    """No tensor of S x T elements, with everything on that could make one."""
    length, block = 512, 1 << 13
    monkeypatch.setattr(oracle, "_BLOCK", block)
    table = (1, 1, 1, length)
    inputs = Inputs(
        q=draw(1, 1, length, 1, 4),
        k=draw(2, 1, length, 1, 4),
        v=draw(3, 1, length, 1, 4),
        bias=draw(4, *table),
        attention_mask=draw(5, *table) > 1,
        alibi_slopes=torch.tensor([0.1]),
        dropout_seed=torch.tensor(7),
    )
    spec = Spec(right=0, softcap=3.0, bias="post_scale", arbitrary=True, alibi=True, dropout_p=0.1)
    with _Largest() as largest:
        oracle.evaluate(Problem.of(spec, inputs), inputs, draw(6, 1, length, 1, 4))
    assert block <= largest.numel <= 2 * block < length * length // 8


def test_strides_and_expanded_dout_change_nothing():
    problem, inputs, _ = dense(8, right=0)
    dout = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(2, 40, 4, 16)
    wide = {n: torch.stack([x, x.flip(-1)], -1)[..., 0] for n, x in inputs.items()}
    strided = dataclasses.replace(inputs, **wide)
    right = oracle.backward(problem, inputs, torch.ones(2, 40, 4, 16))
    found = oracle.backward(problem, strided, dout)
    for name, gradient in right.items():
        assert torch.equal(getattr(found.grads, name), gradient)


def test_only_what_is_wanted():
    problem, inputs, dout = dense(8, bias="pre_scale", softmax="learnable")
    everything = oracle.backward(problem, inputs, dout)
    for name, right in everything.items():
        wanted = Wanted(**{n: n == name for n in ("dq", "dk", "dv", "dbias", "dsoftmax_offset")})
        found = oracle.backward(problem, inputs, dout, wanted=wanted)
        assert [n for n, _ in found.items()] == [name]
        assert list(found.magnitudes) == [name]
        assert torch.equal(getattr(found.grads, name), right)


def test_result_is_fp64_in_storage_layout():
    for seed in range(40):
        case = generate(seed)
        found, grads = oracle.evaluate(case.problem, case.inputs, case.dout, case.dlse)
        assert found.out.shape == case.dout.shape
        for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v"), ("dbias", "bias")):
            tensor = getattr(grads.grads, name)
            if tensor is not None:
                assert tensor.shape == getattr(case.inputs, like).shape
        for result in (found, grads):
            for name, tensor in result.items():
                magnitude = result.magnitudes[name]
                assert tensor.dtype == torch.float64
                assert magnitude.bound.shape == magnitude.spread.shape == tensor.shape
