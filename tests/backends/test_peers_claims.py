"""What the peers promise and what they refuse, each claim and each reason by itself."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from tests.backends.peer_cases import answer, draw
from tests.backends.test_peers import CPU, check, compare

from gradtruth.backends import PEERS, get
from gradtruth.backends.peers import refusals
from gradtruth.backends.peers import sdpa_cpu as cpu
from gradtruth.core.support import DEFAULT_CLAIMS, ReasonCode
from gradtruth.core.tensors import Forward, Inputs, Wanted
from gradtruth.core.tile import tile


def plain(name, **fixed):
    """A case that every claim of a peer can be tested on."""
    return draw(11, batch=2, groups=2, gqa=2, sizes=(21, 21), dims=(8, 8), **fixed), get(name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flash_claims_the_default_set_where_auto_needs_no_mask_tensor(dtype):
    for fixed, whole in (({}, True), ({"right": 0}, True), ({"right": 0, "left": 2}, False)):
        case, backend = plain("sdpa_flash", dtype=dtype, **fixed)
        assert (backend.claims(case.problem, CPU) == DEFAULT_CLAIMS) is whole
    for name in ("sdpa_math", "flex"):
        case, backend = plain(name, dtype=dtype)
        assert backend.claims(case.problem, CPU).missing(DEFAULT_CLAIMS) == ("foreign_lse",)


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math", "flex"])
def test_deterministic_and_pure(name):
    case, backend = plain(name, right=0)
    other = draw(12, batch=2, sizes=(50, 60))

    def run():
        forward = backend.forward(case.problem, case.inputs)
        grads = backend.backward(case.problem, case.inputs, forward, case.dout, None, Wanted())
        return forward.out, forward.lse, grads.dq, grads.dk, grads.dv

    for threads in (2, 1):
        torch.set_num_threads(threads)
        first = run()
        backend.forward(other.problem, other.inputs)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math", "flex"])
def test_every_element_is_written(name):
    check(name, draw(13, right=0, gqa=2))


@pytest.mark.parametrize("fixed", [{}, {"right": 0}, {"left": 4, "right": 1}])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_flash_takes_foreign_out_and_lse(fixed, dtype):
    # out and lse from another backend, and for other values than this problem's: the backward must read them.
    case, backend = plain("sdpa_flash", dtype=dtype, **fixed)
    foreign = get("sdpa_math").forward(case.problem, case.inputs)
    shift = torch.rand_like(foreign.lse)
    foreign = Forward(out=(foreign.out * 0.5).to(foreign.out.dtype), lse=foreign.lse + shift)
    grads = backend.backward(case.problem, case.inputs, foreign, case.dout, None, Wanted())
    # P is exp(x - lse), so every row of P shrinks by exp(shift): the dv of dout scaled by that.
    factor = torch.exp(-shift.double()).transpose(1, 2)[..., None]
    want = answer(replace(case, dout=case.dout.double() * factor), foreign.out)[0]
    for key in ("dq", "dk", "dv"):
        got = getattr(grads, key).double()
        limit = (1e-13 if dtype == "float64" else 2.0**-8) * want[key].abs().max()
        assert (got - want[key]).abs().max() <= limit


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math", "flex"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("key", ["q", "k", "v", "dout"])
def test_shielded(name, poison, key):
    case, backend = plain(name, right=0)
    tensors = {"q": case.inputs.q, "k": case.inputs.k, "v": case.inputs.v, "dout": case.dout}
    poisoned = tensors[key].clone()
    heads = slice(2, 4) if key in ("q", "dout") else slice(1, 2)
    poisoned[1, :, heads] = poison
    results = []
    for value in (tensors[key], poisoned):
        given = tensors | {key: value}
        inputs = Inputs(q=given["q"], k=given["k"], v=given["v"])
        forward = backend.forward(case.problem, inputs)
        grads = backend.backward(case.problem, inputs, forward, given["dout"], None, Wanted())
        results.append((forward.out, grads.dq, grads.dk, grads.dv))
    for clean, dirty in zip(*results, strict=True):
        here = slice(clean.shape[2] // 2, None)
        assert torch.equal(clean[0], dirty[0])
        assert torch.equal(clean[1, :, : here.start], dirty[1, :, : here.start])
    assert results[1][1][1, :, 2:].isnan().any()


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math", "flex"])
def test_a_ragged_problem_is_not_claimed_shielded_and_ends_in_exact_zeros(name):
    case = draw(21, lengths="cu_seqlens", batch=3, sizes=(17, 19), right=0)
    claims = get(name).claims(case.problem, CPU)
    assert claims.exact_zeros
    assert not claims.shielded
    forward, grads = check(name, case)
    for n in range(3):
        lq, lk = case.queries.length[n], case.keys.length[n]
        assert (forward.out[n, lq:] == 0).all()
        assert (forward.lse[n, :, lq:] == -torch.inf).all()
        assert (grads.dq[n, lq:] == 0).all()
        assert (grads.dk[n, lk:] == 0).all()
        assert (grads.dv[n, lk:] == 0).all()


def test_flash_reads_no_foreign_row_outside_every_sequence():
    case = draw(21, lengths="cu_seqlens", batch=3, sizes=(17, 19), right=0)
    backend = get("sdpa_flash")
    forward = backend.forward(case.problem, case.inputs)
    outside = forward.lse == -torch.inf
    assert outside.any()
    rows = outside.transpose(1, 2)[..., None]
    poisoned = Forward(
        out=forward.out.masked_fill(rows, torch.nan),
        lse=forward.lse.masked_fill(outside, torch.nan),
    )
    dout = case.dout.masked_fill(rows, torch.nan)
    want = backend.backward(case.problem, case.inputs, forward, case.dout, None, Wanted())
    got = backend.backward(case.problem, case.inputs, poisoned, dout, None, Wanted())
    for key in ("dq", "dk", "dv"):
        assert torch.equal(getattr(got, key), getattr(want, key))


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math", "flex"])
def test_a_tile_is_a_problem(name):
    # The dense mask and the bias are read at the tile's place, not at its start.
    case = draw(31, batch=2, sizes=(12, 14), right=0, arbitrary=True, mask_dims=(1, 1, 1, 1))
    problem, inputs = tile(case.problem, case.inputs, queries=(3, 11), keys=(2, 9))
    forward = get(name).forward(problem, inputs)
    i, j = torch.arange(12)[:, None], torch.arange(14)[None]
    shown = ~case.inputs.attention_mask & (j <= i) & (i >= 3) & (i < 11) & (j >= 2) & (j < 9)
    x = torch.einsum("bihd,bjhd->bhij", inputs.q.double(), inputs.k.double()) * problem.scale
    lse = x.masked_fill(~shown, -torch.inf).logsumexp(-1)
    assert torch.equal(forward.lse == -torch.inf, lse == -torch.inf)
    assert torch.allclose(forward.lse.double(), lse, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", ["sdpa_math", "flex"])
def test_autograd_where_the_caller_has_switched_it_off(name):
    case, backend = plain(name, right=0, bias="post_scale")

    def run():
        forward = backend.forward(case.problem, case.inputs)
        return backend.backward(case.problem, case.inputs, forward, case.dout, None, Wanted())

    want = run()
    contexts = (
        torch.no_grad(),
        torch.inference_mode(),
        torch._C._AutoDispatchBelowAutograd(),
        torch.autocast("cpu", dtype=torch.bfloat16),
    )
    for context in contexts:
        with context:
            got = run()
        for key, grad in want.items():
            assert torch.equal(getattr(got, key), grad)
            assert not getattr(got, key).requires_grad
    with torch.inference_mode():
        inputs = Inputs(**{key: x.clone() for key, x in case.inputs.items()})
        forward = backend.forward(case.problem, inputs)
        got = backend.backward(case.problem, inputs, forward, case.dout.clone(), None, Wanted())
        assert torch.equal(got.dq, want.dq)


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math", "flex"])
def test_only_what_is_wanted(name):
    case, backend = plain(name)
    forward = backend.forward(case.problem, case.inputs)
    for key in ("dq", "dk", "dv", None):
        wanted = Wanted(**{k: k == key for k in ("dq", "dk", "dv", "dbias", "dsoftmax_offset")})
        grads = backend.backward(case.problem, case.inputs, forward, case.dout, None, wanted)
        assert [k for k, _ in grads.items()] == ([key] if key else [])


def test_a_gradient_of_lse_where_only_dv_is_wanted():
    # lse does not depend on v, so autograd has nothing to start from.
    case = draw(4, lse_grad=True)
    backend = get("flex")
    forward = backend.forward(case.problem, case.inputs)
    wanted = Wanted(dq=False, dk=False)
    grads = backend.backward(case.problem, case.inputs, forward, case.dout, case.dlse, wanted)
    value, magnitude = answer(case)
    compare("dv", grads.dv, value["dv"], magnitude["dv"], case.problem)


REFUSALS = {
    ReasonCode.DROPOUT: ({"dropout_p": 0.25}, "0.25", PEERS),
    ReasonCode.SOFTCAP: ({"softcap": 30.0}, "30", ("sdpa_flash", "sdpa_math")),
    ReasonCode.SOFTMAX: ({"softmax": "off-by-one"}, "off-by-one", ("sdpa_flash", "sdpa_math")),
    ReasonCode.BIAS: ({"bias": "post_scale"}, "post_scale [2,", ("sdpa_flash",)),
    ReasonCode.MAX_LOGIT: ({"max_logit": True}, "max_logit", ("sdpa_flash", "sdpa_math")),
    ReasonCode.LSE_GRAD: ({"lse_grad": True}, "gradient", ("sdpa_flash", "sdpa_math")),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_refused_features(code):
    fixed, text, refusing = REFUSALS[code]
    problem = draw(1, batch=2, bias_dims=(1, 1, 1, 1), **fixed).problem
    for name in ("sdpa_flash", "sdpa_math", "flex"):
        reasons = {reason.code: reason.text for reason in get(name).supports(problem, CPU).reasons}
        assert (code in reasons) is (name in refusing)
        assert text in reasons.get(code, text)


def test_refusals_are_all_named():
    problem = draw(
        1, dropout_p=0.5, softcap=1.0, softmax="learnable", lse_grad=True, max_logit=True
    ).problem
    problem = replace(problem, head_dim_v=8)
    codes = [reason.code for reason in get("sdpa_flash").supports(problem, CPU).reasons]
    wanted = {"dropout", "softcap", "softmax", "max_logit", "lse_grad", "head_dim"}
    assert set(codes) == {ReasonCode(code) for code in wanted}
    assert len(codes) == len(wanted)


def test_head_dims():
    problem = draw(1, dims=(24, 16)).problem
    (reason,) = get("sdpa_flash").supports(problem, CPU).reasons
    assert reason.code is ReasonCode.HEAD_DIM
    assert "24" in reason.text
    assert "16" in reason.text
    for name in ("sdpa_math", "flex"):
        assert get(name).supports(problem, CPU).ok


def test_devices():
    problem = draw(1).problem
    for name in ("sdpa_efficient", "sdpa_cudnn"):
        (reason,) = get(name).supports(problem, CPU).reasons
        assert reason.code is ReasonCode.DEVICE
        assert "cpu" in reason.text
        assert get(name).claims(problem, CPU).missing(DEFAULT_CLAIMS)
    for name in ("sdpa_flash", "flex"):
        reasons = get(name).supports(problem, torch.device("meta")).reasons
        assert [reason.code for reason in reasons] == [ReasonCode.DEVICE]
        assert "meta" in reasons[0].text


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without CUDA")
def test_cuda_refusals_are_data_on_any_machine():
    cuda = torch.device("cuda")
    base = draw(1, dtype="bfloat16", dims=(64, 64), sizes=(8, 8)).problem
    asked = {
        "sdpa_flash": {
            "dtype": (replace(base, dtype="float32"), "float32"),
            "head_dim": (replace(base, head_dim_qk=72, head_dim_v=512), "512"),
            "heads": (replace(base, num_heads=4), "2 query heads"),
            "mask": (replace(base, spec=replace(base.spec, left=3)), "window(3,-1)"),
            "softmax": (replace(base, spec=replace(base.spec, scale=-1.0)), "-1"),
            "alibi": (draw(1, alibi=True).problem, "alibi"),
        },
        "sdpa_cudnn": {
            "head_dim": (replace(base, head_dim_qk=192), "192"),
            "size": (replace(base, seqlen_kv=1), "1"),
            "mask": (replace(base, seqlen_q=5, spec=replace(base.spec, right=0)), "5 queries"),
        },
        "sdpa_efficient": {
            "dtype": (replace(base, dtype="float64"), "float64"),
            "heads": (replace(base, num_heads=4), "2 query heads"),
            "head_dim": (replace(base, head_dim_v=33), "33"),
            "bias": (draw(1, bias="pre_scale").problem, "pre_scale"),
        },
        "flex": {
            "dtype": (replace(base, dtype="float64"), "float64"),
            "head_dim": (replace(base, head_dim_qk=8), "8"),
            "softmax": (replace(base, spec=replace(base.spec, softmax="learnable")), "learnable"),
        },
    }
    for name, questions in asked.items():
        always = {reason.code for reason in get(name).supports(base, cuda).reasons}
        assert always == (set() if name == "flex" else {ReasonCode.DEVICE})
        for code, (problem, text) in questions.items():
            reasons = {
                reason.code: reason.text for reason in get(name).supports(problem, cuda).reasons
            }
            assert text in reasons[ReasonCode(code)]


def test_an_old_torch_is_a_reason(monkeypatch):
    problem = draw(1, gqa=2).problem
    monkeypatch.setattr(cpu, "_GQA_SINCE", (99, 0))
    assert [r.code for r in get("sdpa_flash").supports(problem, CPU).reasons] == [
        ReasonCode.VERSION
    ]
    assert get("sdpa_flash").supports(draw(1).problem, CPU).ok
    (reason,) = refusals.missing_operators(
        ("_scaled_dot_product_attention_math", "_not_an_operator")
    )
    assert reason.code is ReasonCode.VERSION
    assert "_not_an_operator" in reason.text
    monkeypatch.setitem(sys.modules, "torch._higher_order_ops.flex_attention", None)
    reasons = get("flex").supports(problem, CPU).reasons
    assert [r.code for r in reasons] == [ReasonCode.VERSION]


def test_the_flash_kernel_makes_no_copy_of_what_it_returns():
    case, backend = draw(2, dims=(16, 16)), get("sdpa_flash")
    forward = backend.forward(case.problem, case.inputs)
    own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(getattr(case.inputs, key).transpose(1, 2) for key in "qkv"),
        0.0,
        False,
        scale=case.problem.scale,
    )[0]
    assert own.transpose(1, 2).is_contiguous()
    assert torch.equal(forward.out, own.transpose(1, 2))
