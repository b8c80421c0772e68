"""What changes the scores: both directions must know."""

from __future__ import annotations

import torch
from tests.dense import attend
from tests.reports.harness import close, drawn, report, vanishes, zero

SCORES = "options that change the scores and are forgotten in the backward"


@report(
    "Dao-AILab/flash-attention#2402",
    SCORES,
    "s becomes c tanh(s / c), |s| <= c; another cap in the same process gives another result",
)
def test_softcap_bounds_by_the_cap(own, dtype):
    """The cap multiplied the score instead of tanh, and a kernel compiled for one cap served another."""
    q, k, v, dout = drawn(own, 16, heads=(1, 1), dtype=dtype)
    q, k = 4 * q, 4 * k
    calls = {cap: own.attend(q, k, v, dout, softcap=cap).verify() for cap in (15.0, 30.0, 15.0)}
    for cap, call in calls.items():
        right = attend(q[0].cpu(), k[0].cpu(), v[0].cpu(), softcap=cap)
        close(call.out[0], right.out, units=16)
        close(call.lse[0], right.lse, units=16)
        _, _, top = _forward(own, q, k, v, softcap=cap)
        assert float(top.max()) <= cap
    for name in ("out", "dq", "dk"):
        assert not torch.equal(calls[15.0].results[name], calls[30.0].results[name])


def _forward(own, q, k, v, **options):
    from gradtruth import attention_forward

    return attention_forward(q, k, v, backend=own.name, return_max_logit=True, **options)


@report("triton-lang/triton#4541", SCORES, "gradients follow the flag, as out does")
def test_no_causal_mask_in_the_backward_alone(own, dtype):
    """The backward applied a causal mask whether the forward had or not."""
    tensors = drawn(own, 32, heads=(1, 1), dtype=dtype)
    full = own.attend(*tensors).verify()
    causal = own.attend(*tensors, attn_mask_type="causal").verify()
    assert full.dv[0, -1].norm() > 2 * causal.dv[0, -1].norm()
    for name in ("dq", "dk", "dv"):
        assert not torch.equal(full.results[name], causal.results[name])


@report(
    "pytorch/pytorch#185991",
    SCORES,
    "dq = dk = 0, dv is made from the fixed weights",
)
def test_scores_that_depend_on_positions_alone(own, dtype):
    """A score function of positions only had a backward that could not be compiled."""
    q, k, v, dout = drawn(own, 12, heads=(1, 1), dtype=dtype)
    slopes = torch.ones(1, device=own.device)
    call = own.attend(q, k, v, dout, softmax_scale=0.0, alibi_slopes=slopes).verify()
    zero(call.dq, call.dk)
    at = torch.arange(12.0, dtype=torch.float64)
    weights = torch.softmax(-(at[:, None] - at).abs(), 1)
    close(call.dv[0, :, 0], weights.t() @ dout[0, :, 0].double().cpu())
    one = own.attend(q[:, :1], k[:, :1], v[:, :1], dout[:, :1], alibi_slopes=slopes)
    vanishes(one, "dq", "dk")
