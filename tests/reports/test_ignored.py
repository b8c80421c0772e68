"""Masks, lengths and shapes that are silently ignored; the future that leaks through a scale."""

from __future__ import annotations

import pytest
import torch
from tests.reports.harness import BF16, FP16, GRADIENTS, close, drawn, report, same, zero

from gradtruth import DotProductAttention, InvalidProblem, UnsupportedProblem, attention
from gradtruth.compat.transformer_engine import fused_attn_bwd, fused_attn_fwd

FP8 = "FP8 attention"
IGNORED = "masks or lengths ignored, inputs not validated"
THD = {"qkv_format": "thd", "attn_mask_type": "padding"}


# ---------------------------------------------------------------- FP8


@report(
    "NVIDIA/TransformerEngine#3248",
    FP8,
    "out[:t + 1] has the same bits whatever v and k are after t; inputs in FP8 are refused",
)
@pytest.mark.parametrize("cut", [40, 63, 1])
def test_the_future_does_not_leak(own, dtype, cut):
    """Scales were chosen from all positions, so a large later value changed earlier outputs."""
    q, k, v, _ = drawn(own, 64, heads=(1, 1), dtype=dtype)
    before = own.attend(q, k, v, attn_mask_type="causal")
    k, v = k.clone(), v.clone()
    v[:, cut:] *= 3e4
    k[:, cut:] *= 50
    after = own.attend(q, k, v, attn_mask_type="causal")
    same(after.out[:, :cut], before.out[:, :cut])
    same(after.lse[:, :, :cut], before.lse[:, :, :cut])
    assert not torch.equal(after.out[:, cut:], before.out[:, cut:])
    small = [x.to(torch.float8_e4m3fn) for x in (q, q, q)]
    with pytest.raises(InvalidProblem, match="float8_e4m3fn"):
        attention(*small, backend=own.name)


@report(
    "NVIDIA/TransformerEngine#2892",
    FP8,
    "out has the rows of q, padding rows are 0; quantizers are refused in words",
)
def test_lengths_shorter_than_their_slots(own, poisoned_memory):
    """Slots longer than their sequences crashed under FP8, or gave a result with the rows of the sequences only."""
    q, k, v, dout = drawn(own, 32, d=64, dtype=BF16, form="thd")
    cu, padded = own.cu(0, 9, 24), own.cu(0, 16, 32)
    common = {
        "max_seqlen_q": 16, "max_seqlen_kv": 16, "cu_seqlens_q": cu, "cu_seqlens_kv": cu, "q": q, "k": k, "v": v,
        "cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded, "fake_dtype": BF16,
        "fused_attention_backend": own.name, "qkv_layout": "thd_thd_thd", "attn_mask_type": "padding",
        "o_format": "thd",
    }  # fmt: skip
    out, aux = fused_attn_fwd(True, **common)
    grads = fused_attn_bwd(
        **common, o=out, d_o=dout, aux_ctx_tensors=aux, do_format="thd", dqkv_layout="thd_thd_thd"
    )
    results = {"out": out, "lse": aux[0][..., 0], **dict(zip(GRADIENTS, grads[:3], strict=True))}
    assert out.shape == q.shape
    for pad in (slice(9, 16), slice(31, 32)):
        zero(*(results[name][pad] for name in ("out", *GRADIENTS)))
    lengths = {n: common[n] for n in common if n.startswith("cu_seqlens")}
    own.judge(own.sample(q, k, v, dout, **THD, **lengths), results)
    with pytest.raises(UnsupportedProblem, match="s_quantizer"):
        fused_attn_fwd(True, s_quantizer=object(), **common)


# ---------------------------------------------------------------- ignored


@report(
    "jax-ml/jax#23349", IGNORED, "what stands past a sequence's length changes no bit of any result"
)
@pytest.mark.parametrize("given", ["cu_seqlens", "mask", "module"])
def test_key_lengths_are_honoured(own, dtype, given):
    """Key lengths had no effect: padding was attended."""
    q, k, v, dout = drawn(own, 32, batch=2, dtype=dtype)
    cu_q, cu_kv = own.cu(0, 32, 64), own.cu(0, 6, 35)
    hidden = torch.arange(32, device=own.device) >= torch.tensor([[6], [29]], device=own.device)
    none = torch.zeros_like(hidden)

    def run(k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        if given == "module":
            module = DotProductAttention(
                2, 16, qkv_format="bshd", attn_mask_type="padding", backend=own.name
            )
            return {"out": module(q, k, v, (none[:, None, None], hidden[:, None, None]))}
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
        if given == "mask":
            lengths = {"attention_mask": (none, hidden)}
        return own.attend(q, k, v, dout, attn_mask_type="padding", **lengths).verify().results

    before = run(k, v)
    other = [x.clone() for x in (k, v)]
    for x in other:
        x[0, 6:] = 9.0
        x[1, 29:] = -7.0
    for name, tensor in run(*other).items():
        same(tensor, before[name])
    other[1][0, 5] = 9.0
    assert not torch.equal(run(*other)["out"], before["out"])


@report("pytorch/pytorch#193728", IGNORED, "refused on every backend, with both lengths named")
def test_values_longer_than_keys(own):
    """K and V of different lengths were accepted, and memory behind K was read."""
    q = own.h(1, 1, 3, 1, 8)
    memory = own.full(torch.nan, 1, 64, 1, 8)
    k, v = memory[:, :5], own.h(3, 1, 6, 1, 8)
    k.copy_(own.h(2, 1, 5, 1, 8))
    for name in (own.name, "auto"):
        with pytest.raises(
            InvalidProblem, match=r"value has shape \[1, 6, 1, 8\], expected \[1, 5, 1"
        ):
            attention(q, k, v, backend=name)
    module = DotProductAttention(
        1, 8, qkv_format="bshd", attn_mask_type="no_mask", backend=own.name
    )
    with pytest.raises(InvalidProblem, match="value"):
        module(q, k, v)
    with pytest.raises(InvalidProblem, match=r"\bv has shape"):
        fused_attn_fwd(
            True, 3, 5, own.cu(0, 3), own.cu(0, 5), q, k, v, q.dtype, own.name,
            qkv_layout="bshd_bshd_bshd", o_format="bshd", attn_mask_type="no_mask",
        )  # fmt: skip


@report("AI-Hypercomputer/maxtext#4476", IGNORED, "tokens of another segment change no bit")
def test_segments_are_honoured(own):
    """One backend ignored segment ids: tokens attended earlier segments."""
    tensors = drawn(own, 32, dtype=FP16, form="thd")
    options = {**THD, "attn_mask_type": "padding_causal", **own.lengths(12, 20)}
    before = own.attend(*tensors, **options).verify()
    changed = [x.clone() for x in tensors]
    for x in changed:
        x[:12] = x[:12] * 3 + 1
    after = own.attend(*changed, **options)
    for name, tensor in after.results.items():
        same(tensor[12:], before.results[name][12:])
        assert not torch.equal(tensor[:12], before.results[name][:12])
    of = torch.tensor([0] * 12 + [1] * 20, device=own.device)
    dense = own.attend(
        *(x[None] for x in tensors), attn_mask_type="arbitrary,causal",
        attention_mask=(of[:, None] != of)[None, None],
    ).verify()  # fmt: skip
    close(dense.out[0], before.out.double(), units=2)
