"""Entry points of peers as stand-ins: what is told of a call is what the program got, and what the reference finds."""

import sys
import types

import pytest
import torch
from tests.backends.fake_peers import dense_attend, tokens_attend
from tests.interception.listening import Heard, listening, same
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from gradtruth.backends import get
from gradtruth.compat import transformer_engine as compat
from gradtruth.verify.interception import intercept

H, G, D = 4, 2, 4
CU_Q, CU_KV = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 8], [0, 4, 6, 11]))
COUNTS = (8, 11, 11)


def _drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def _tokens(heads=(H, G, G)):
    return [
        _drawn(n, h, D, seed=h + at) for at, (n, h) in enumerate(zip(COUNTS, heads, strict=True))
    ]


def _dense(heads=(H, G, G), lengths=(3, 5, 5)):
    return [
        _drawn(2, n, h, D, seed=h + at)
        for at, (n, h) in enumerate(zip(lengths, heads, strict=True))
    ]


def _put(monkeypatch, name, **functions):
    """A module of that name, as if its library were installed."""
    parts = name.split(".")
    for at in range(1, len(parts) + 1):
        here = ".".join(parts[:at])
        if here not in sys.modules:
            monkeypatch.setitem(sys.modules, here, types.ModuleType(here))
    for key, function in functions.items():
        monkeypatch.setattr(sys.modules[name], key, function, raising=False)
    return sys.modules[name]


def _check(entry, call, leaves, parts=lambda grads: grads):
    """Listen to one call: gradients told are the program's and the reference's. Returns the call."""
    heard: list[Heard] = []
    told = []
    with intercept(listening(heard), on_unseen=told.append):
        out = call()
        out = out[0] if isinstance(out, tuple) else out
        grads = torch.autograd.grad(out, leaves, _drawn(*out.shape, seed=9).detach())
    assert told == []
    (one,) = heard
    assert one.call.entry == entry
    same(one.out.reshape(out.shape), out.detach())
    names = one.check()
    found = one.backwards[0][2]
    for name, expected in zip(
        ("dq", "dk", "dv", "dsoftmax_offset", "dbias"), parts(grads), strict=False
    ):
        if name in names:
            same(found[name].reshape(expected.shape), expected.to(found[name].dtype))
    assert {"dq", "dk", "dv"} <= names
    return one.call


# ---------------------------------------------------------------- flash-attn


def _window(causal, window):
    left, right = (-1 if w is None else w for w in window)
    return (left, 0) if causal else (left, right)


def _varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None,
):  # fmt: skip
    options = {"softcap": softcap} if softcap else {}
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    out, lse = tokens_attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k, window=_window(causal, window_size), softmax_scale=softmax_scale,
        **options,
    )  # fmt: skip
    return (out, lse.detach().t(), None) if return_attn_probs else out


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"causal": True, "return_attn_probs": True}, "causal br"),
        ({"causal": True, "window_size": (2, 5), "softmax_scale": 0.3}, "window(2,0) br"),
        ({"window_size": (1, 1), "softcap": 3.0}, "window(1,1) br"),
        ({"alibi_slopes": torch.linspace(0.1, 0.9, H)}, "full"),
    ],
)
def test_flash_attn_varlen(monkeypatch, options, label):
    home = _put(monkeypatch, "flash_attn.flash_attn_interface", flash_attn_varlen_func=_varlen)
    leaves = _tokens()
    call = _check(
        "flash_attn.flash_attn_varlen_func",
        lambda: home.flash_attn_varlen_func(*leaves, CU_Q, CU_KV, 5, torch.tensor(5), **options),
        leaves,
    )
    assert call.spec.mask_label() == label
    assert (call.problem.max_seqlen_q, call.problem.max_seqlen_kv) == (5, 5)


def test_flash_attn_packed(monkeypatch):
    def qkvpacked(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                  alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
        return dense_attend(
            *qkv.unbind(2), window=_window(causal, window_size), softmax_scale=softmax_scale
        )[0]

    home = _put(monkeypatch, "flash_attn.flash_attn_interface", flash_attn_qkvpacked_func=qkvpacked)
    qkv = _drawn(2, 5, 3, H, D)
    call = _check(
        "flash_attn.flash_attn_qkvpacked_func",
        lambda: home.flash_attn_qkvpacked_func(qkv, causal=True),
        [qkv],
        lambda grads: grads[0].unbind(2),
    )
    assert call.inputs.q.data_ptr() == qkv.data_ptr()
    assert call.inputs.v.stride() == qkv.unbind(2)[2].stride()


def test_flash_attn_varlen_kvpacked(monkeypatch):
    def kvpacked(
        q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, causal=False
    ):
        return tokens_attend(
            q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, window=_window(causal, (-1, -1))
        )[0]

    home = _put(
        monkeypatch, "flash_attn.flash_attn_interface", flash_attn_varlen_kvpacked_func=kvpacked
    )
    q, kv = _drawn(8, H, D), _drawn(11, 2, G, D)
    _check(
        "flash_attn.flash_attn_varlen_kvpacked_func",
        lambda: home.flash_attn_varlen_kvpacked_func(q, kv, CU_Q, CU_KV, 5, 5, causal=True),
        [q, kv],
        lambda grads: (grads[0], *grads[1].unbind(1)),
    )


def test_flash_attn_4_with_a_sink(monkeypatch):
    def flash4(q, k, v, qv=None, softmax_scale=None, causal=False, window_size=(None, None),
               learnable_sink=None, softcap=0.0, num_splits=1, score_mod=None, return_lse=False):  # fmt: skip
        out, lse = dense_attend(
            q, k, v, window=_window(causal, window_size), softmax_scale=softmax_scale,
            softmax_type="learnable", softmax_offset=learnable_sink.float(),
        )  # fmt: skip
        return out, lse if return_lse else None

    home = _put(monkeypatch, "flash_attn.cute.interface", flash_attn_func=flash4)
    leaves, sink = _dense(), torch.linspace(-1, 1, H).requires_grad_()
    call = _check(
        "flash_attn.cute.flash_attn_func",
        lambda: home.flash_attn_func(
            *leaves, causal=True, window_size=(2, None), learnable_sink=sink
        ),
        [*leaves, sink],
    )
    assert call.spec.softmax == "learnable"


def test_what_flash_attn_may_be_asked_and_no_problem_says(monkeypatch):
    def flash3(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, attention_chunk=0
    ):
        return dense_attend(q, k, v)[0]

    home = _put(monkeypatch, "flash_attn_interface", flash_attn_func=flash3)
    told = []
    q, k, v = _dense()
    with intercept(lambda _: None, on_unseen=told.append):
        home.flash_attn_func(q, k, v, attention_chunk=2)
        home.flash_attn_func(q, k, v, qv=q)
    assert [one.reason for one in told] == [
        "attention_chunk is 2, which is not understood",
        "qv is a Tensor, which is not understood",
    ]


# ---------------------------------------------------------------- TransformerEngine


class TE(compat.DotProductAttention):
    """What TransformerEngine 2.20.2 keeps of its arguments, and its forward's signature."""

    def __init__(self, *args, attn_mask_type="causal", window_size=None, softcap=0.0, **more):
        super().__init__(
            *args,
            attn_mask_type=attn_mask_type,
            softcap=softcap or None,
            backend="reference",
            **more,
        )
        self.window_size = self._checked(attn_mask_type, window_size)
        self.softcap = softcap
        if self.softmax_type == "off-by-one":
            del self.softmax_offset
            self.softmax_offset = torch.zeros(self.num_attention_heads)

    @staticmethod
    def _checked(attn_mask_type, window_size):
        if "causal" in attn_mask_type:
            return (-1, 0) if window_size is None else (window_size[0], 0)
        return (-1, -1) if window_size in (None, (-1, 0)) else window_size

    def forward(
        self, query_layer=None, key_layer=None, value_layer=None, attention_mask=None, qkv_format=None,
        cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None, window_size=None, bottom_right_diagonal=None,
        softcap=None, checkpoint_core_attention=False, core_attention_bias_type="no_bias", core_attention_bias=None,
        alibi_slopes=None, fast_zero_fill=True, inference_params=None, pad_between_seqs=None, fp8_output=False,
        bf16_backward=False, num_splits=1, score_mod=None, score_mod_bprop=None, score_mod_tensors=None,
        score_mod_bprop_tensors=None, qkv_layer=None, kv_layer=None, qkv_interleave_dim=-3,
        thd_attention_policies=None, thd_attention_policy_dispatch="auto",
    ):  # fmt: skip
        mask = attn_mask_type or self.attn_mask_type
        ours = {n: x for n, x in self.__dict__.items() if n in ("softcap", "window_size")}
        offset = self.softmax_offset
        self.softcap = (self.softcap if softcap is None else softcap) or None
        if self.softmax_type == "off-by-one":
            self.softmax_offset = None
        try:
            return super().forward(
                query_layer, key_layer, value_layer, attention_mask, qkv_format, cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_kv=cu_seqlens_kv, cu_seqlens_q_padded=cu_seqlens_q_padded,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv,
                attn_mask_type=mask, window_size=self._checked(mask, window_size or self.window_size),
                core_attention_bias_type=core_attention_bias_type, core_attention_bias=core_attention_bias,
                alibi_slopes=alibi_slopes,
            )  # fmt: skip
        finally:
            self.softmax_offset = offset
            vars(self).update(ours)


TRANSFORMER_ENGINE = "transformer_engine.pytorch.DotProductAttention"


@pytest.mark.parametrize(
    ("options", "given", "label"),
    [
        ({}, {}, "causal"),
        ({"attn_mask_type": "causal_bottom_right", "window_size": (2, 0), "softcap": 3.0}, {}, "window(2,0) br"),
        ({"attn_mask_type": "no_mask", "softmax_type": "learnable"}, {}, "full"),
        ({"softmax_type": "off-by-one"}, {"softcap": 2.0}, "causal"),
        ({}, {"attn_mask_type": "no_mask"}, "full"),
        ({}, {"attn_mask_type": "no_mask", "window_size": (1, 2)}, "window(1,2) br"),
        ({}, {"core_attention_bias_type": "alibi"}, "causal"),
        ({}, {"core_attention_bias_type": "post_scale_bias"}, "causal"),
    ],
)  # fmt: skip
def test_transformer_engine(monkeypatch, options, given, label):
    _put(monkeypatch, "transformer_engine.pytorch", DotProductAttention=TE)
    module = TE(H, D, num_gqa_groups=G, qkv_format="bshd", **options)
    leaves = _dense()
    biased = given.get("core_attention_bias_type") == "post_scale_bias"
    more = {"core_attention_bias": _drawn(1, H, 3, 5, seed=7)} if biased else {}
    call = _check(TRANSFORMER_ENGINE, lambda: module(*leaves, **given, **more), leaves)
    assert call.layer == "TE"
    assert call.spec.mask_label() == label
    assert call.spec.alibi == (given.get("core_attention_bias_type") == "alibi")
    assert call.spec.softcap == (given.get("softcap") or options.get("softcap"))
    assert call.spec.softmax == options.get("softmax_type", "vanilla")


def test_transformer_engine_thd(monkeypatch):
    _put(monkeypatch, "transformer_engine.pytorch", DotProductAttention=TE)
    module = TE(H, D, num_gqa_groups=G, qkv_format="thd", attn_mask_type="padding_causal")
    leaves = _tokens()
    lengths = {"cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_KV, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    call = _check(TRANSFORMER_ENGINE, lambda: module(*leaves, **lengths), leaves)
    assert (call.problem.layout, call.problem.batch) == ("thd", 3)


def test_what_transformer_engine_may_be_asked_and_no_problem_says(monkeypatch):
    _put(monkeypatch, "transformer_engine.pytorch", DotProductAttention=TE)
    module = TE(H, D, num_gqa_groups=G, qkv_format="bshd")
    told, leaves = [], _dense()
    with intercept(lambda _: None, on_unseen=told.append):
        module(*leaves, score_mod=print)
        module(*leaves, thd_attention_policies=[{}])
        module.cp_group = object()
        module(*leaves)
    assert [one.reason for one in told] == [
        "score_mod is <built-in function print>, which is not understood",
        "thd_attention_policies is [{}], which is not understood",
        "cp_group is given: one rank holds a part of the sequences",
    ]


# ---------------------------------------------------------------- transformers


def _repeat(x, times):
    return x.repeat_interleave(times, dim=1)


def eager_attention_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs
):
    """As in transformers' models: [B, H, S, D] in, [B, S, H, D] out."""
    times = query.shape[1] // key.shape[1]
    scores = query @ _repeat(key, times).transpose(2, 3) * scaling
    if kwargs.get("softcap"):
        scores = (scores / kwargs["softcap"]).tanh() * kwargs["softcap"]
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[2]]
    if getattr(module, "sinks", None) is not None:
        sinks = module.sinks[None, :, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = (weights @ _repeat(value, times)).transpose(1, 2).contiguous()
    return out, weights


class HeadsFirst(nn.Module):
    """Calls what its model's file has under that name, as they do."""

    def __init__(self, home, sinks=None):
        super().__init__()
        self.home, self.sinks = home, sinks

    def forward(self, *args, **kwargs):
        return self.home.eager_attention_forward(self, *args, **kwargs)


@pytest.mark.parametrize("more", [{}, {"softcap": 3.0}, {"sinks": torch.linspace(-1, 1, H)}])
@pytest.mark.parametrize("masked", [False, True])
def test_transformers_eager(monkeypatch, more, masked):
    home = _put(
        monkeypatch, "transformers.models.tiny.modeling_tiny",
        eager_attention_forward=eager_attention_forward,
    )  # fmt: skip
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in _dense()]
    more = dict(more)
    module = HeadsFirst(home, more.pop("sinks", None))
    low = torch.finfo(torch.float64).min
    # A static cache makes masks that are longer than the keys.
    mask = (
        torch.zeros(2, 1, 3, 7, dtype=torch.float64).masked_fill(torch.arange(7) >= 4, low)
        if masked
        else None
    )
    call = _check(
        "transformers.eager_attention_forward",
        lambda: module(*leaves, mask, scaling=0.4, position_ids=torch.arange(3), **more),
        leaves,
        lambda grads: [grad.transpose(1, 2) for grad in grads],
    )
    assert call.layer == "HeadsFirst"
    assert call.spec.scale == 0.4
    assert (call.spec.softcap, call.spec.bias) == (
        more.get("softcap"),
        "post_scale" if masked else "none",
    )


@pytest.mark.parametrize("is_causal", [True, False])
def test_functions_registered_with_transformers(monkeypatch, is_causal):
    def mine(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        hidden = (
            torch.ones(3, 5, dtype=torch.bool).triu(1) if module.is_causal else torch.zeros(3, 5)
        )
        mask = torch.zeros(3, 5, dtype=torch.float64).masked_fill(hidden.bool(), -torch.inf)
        return eager_attention_forward(module, query, key, value, mask[None, None], scaling)

    interface = type("AttentionInterface", (), {"_global_mapping": {"mine": mine}})
    home = _put(monkeypatch, "transformers.modeling_utils", AttentionInterface=interface)
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in _dense()]
    module = nn.Module()
    module.is_causal = is_causal
    table = home.AttentionInterface._global_mapping
    call = _check(
        "transformers.AttentionInterface",
        lambda: table["mine"](module, *leaves, None, scaling=0.5),
        leaves,
        lambda grads: [grad.transpose(1, 2) for grad in grads],
    )
    assert call.spec.mask_label() == ("causal" if is_causal else "full")
    assert table["mine"] is mine


# ---------------------------------------------------------------- FlexAttention


def test_flex():
    q, k, v = (x.detach().transpose(1, 2) for x in _dense())
    heard = []
    with intercept(listening(heard)):
        out = flex_attention(q, k, v, scale=0.3, enable_gqa=True)
    (one,) = heard
    assert one.call.spec.scale == 0.3
    same(one.out, out.transpose(1, 2))
    same(get("reference").forward(one.call.problem, one.call.inputs).out, one.out)


def test_flex_with_code_of_the_users():
    told = []
    q, k, v = (x.detach().transpose(1, 2) for x in _dense())
    with intercept(lambda _: None, on_unseen=told.append):
        flex_attention(q, k, v, score_mod=lambda score, *_: score, enable_gqa=True)
    (one,) = told
    assert "score_mod is <function" in one.reason
