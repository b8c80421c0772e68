"""scaled_dot_product_attention captured: every form of its arguments, strides, shared storage, and what it is worth."""

import pytest
import torch
from tests.capture.captured import SDPA, cases, index, only_case, results, same
from torch.nn import functional as F

import gradtruth

B, S, T, H, D, DV = 2, 5, 7, 4, 6, 3


def _drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _qkv(heads=H, groups=H, rank=4):
    shapes = [(B, heads, S, D), (B, groups, T, D), (B, groups, T, DV)]
    if rank < 4:
        shapes = [shape[:1] * (rank - 2) + shape[2:] for shape in shapes]
    return [_drawn(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


def _mask(*shape):
    """True is visible, in torch's words; every row sees something."""
    mask = _drawn(*shape, seed=9) > -0.5
    mask[..., 0] = True
    return mask


MASKS = {
    "2d": _mask(S, T),
    "3d": _mask(H, S, T),
    "4d": _mask(B, H, S, T),
    "per batch": _mask(B, 1, S, T),
    "per head": _mask(1, H, S, T),
    "keys": _mask(B, 1, 1, T),
    "rows": _drawn(S, 1, seed=8) > -9,
    "expanded": _mask(B, 1, S, T).expand(B, H, S, T),
    "no key in a row": _mask(S, T) & (torch.arange(S) != 2)[:, None],
    "float 2d": _drawn(S, T, seed=3),
    "float 3d": _drawn(H, S, T, seed=3),
    "float 4d": _drawn(B, H, S, T, seed=3),
    "float with -inf": _drawn(S, T, seed=3).masked_fill(~_mask(S, T), -torch.inf),
    "float32": _drawn(B, 1, S, T, seed=3, dtype=torch.float32),
}


def _check(folder, q, k, v, **options):
    """Capture one call; the case gives the results and gradients that the program had."""
    leaves = [q, k, v]
    mask = options.get("attn_mask")
    if mask is not None and mask.requires_grad:
        leaves.append(mask)
    with gradtruth.capture(folder) as captured:
        out = F.scaled_dot_product_attention(q, k, v, **options)
        dout = _drawn(*out.shape, seed=7)
        grads = torch.autograd.grad(out, leaves, dout)
    case = only_case(captured)
    found = results(case)
    for name, expected in zip(("dq", "dk", "dv"), grads, strict=False):
        place = found[name].transpose(1, 2)
        same(place.reshape(expected.shape), expected)
    same(found["out"].transpose(1, 2).reshape(out.shape), out.detach())
    if len(grads) > 3:
        same(found["dbias"].reshape(grads[3].shape), grads[3])
    return case


@pytest.mark.parametrize("name", MASKS)
def test_masks(tmp_path, name):
    case = _check(tmp_path, *_qkv(), attn_mask=MASKS[name])
    tensor = case.inputs.attention_mask if MASKS[name].dtype == torch.bool else case.inputs.bias
    assert tensor is not None
    assert tensor.dim() == 4


def test_a_mask_that_is_expanded_stays_expanded(tmp_path):
    case = _check(tmp_path, *_qkv(), attn_mask=MASKS["expanded"])
    assert case.inputs.attention_mask.stride()[1] == 0


def test_the_gradient_of_a_float_mask(tmp_path):
    _check(tmp_path, *_qkv(), attn_mask=_drawn(1, H, S, T, seed=3).requires_grad_())


@pytest.mark.parametrize(("causal", "scale"), [(False, 0.37), (True, None)])
def test_causal_from_the_top_left_and_scale(tmp_path, causal, scale):
    case = _check(tmp_path, *_qkv(), is_causal=causal, scale=scale)
    assert (case.problem.spec.right, case.problem.spec.alignment) == (
        (0, "top_left") if causal else (None, "top_left")
    )


def test_gqa(tmp_path):
    case = _check(tmp_path, *_qkv(groups=2), enable_gqa=True, is_causal=True)
    assert case.problem.num_gqa_groups == 2


@pytest.mark.parametrize(
    ("rank", "mask"), [(2, None), (2, "float"), (3, None), (3, "bool"), (3, "per batch")]
)
def test_without_heads(tmp_path, rank, mask):
    masks = {
        None: None,
        "bool": _mask(S, T),
        "float": _drawn(S, T, seed=3),
        "per batch": _mask(*(B,) * (rank - 2), S, T),
    }
    case = _check(tmp_path, *_qkv(rank=rank), attn_mask=masks[mask])
    assert case.problem.num_heads == 1


def test_positional_arguments(tmp_path):
    q, k, v = _qkv()
    with gradtruth.capture(tmp_path) as captured:
        F.scaled_dot_product_attention(q, k, v, None, 0.0, True).sum().backward()
    assert only_case(captured).problem.spec.right == 0


def test_packed_slices_share_their_storage_and_keep_their_strides(tmp_path):
    qkv = _drawn(B, S, 3, H, D).requires_grad_()
    with gradtruth.capture(tmp_path) as captured:
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        dout = _drawn(S, B, H, D, seed=5).permute(1, 2, 0, 3)
        out.backward(dout)
    case = only_case(captured)
    inputs = case.inputs
    assert len({x.untyped_storage().data_ptr() for x in (inputs.q, inputs.k, inputs.v)}) == 1
    for found, part in zip((inputs.q, inputs.k, inputs.v), qkv.detach().unbind(2), strict=True):
        assert found.stride() == part.stride()
        assert torch.equal(found, part)
    assert inputs.k.storage_offset() - inputs.q.storage_offset() == H * D
    assert case.dout.stride() == dout.transpose(1, 2).stride()
    assert torch.equal(case.dout, dout.transpose(1, 2))


def test_sbhd_storage(tmp_path):
    parts = [_drawn(S, B, H, D, seed=n).requires_grad_() for n in range(3)]
    with gradtruth.capture(tmp_path) as captured:
        F.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in parts)).sum().backward()
    case = only_case(captured)
    assert case.inputs.q.stride() == parts[0].transpose(0, 1).stride()
    assert case.dout.stride() == (0, 0, 0, 0), "as sum() makes it"


def test_one_tensor_as_key_and_value(tmp_path):
    q, k, _ = _qkv()
    with gradtruth.capture(tmp_path) as captured:
        F.scaled_dot_product_attention(q, k, k).sum().backward()
    inputs = only_case(captured).inputs
    assert inputs.k.data_ptr() == inputs.v.data_ptr()


def test_autocast_is_seen_as_the_kernel_sees_it(tmp_path):
    dtype = torch.bfloat16
    q, k, v = (x.detach().float().requires_grad_() for x in _qkv())
    with gradtruth.capture(tmp_path) as captured, torch.autocast("cpu", dtype):
        F.scaled_dot_product_attention(q, k, v).float().sum().backward()
    case = only_case(captured)
    assert case.inputs.q.dtype == case.dout.dtype == dtype
    assert torch.equal(case.inputs.q, q.detach().transpose(1, 2).to(dtype))


class _Uses(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def test_inside_multi_head_attention(tmp_path):
    with gradtruth.capture(tmp_path) as captured:
        _Uses()(torch.randn(2, 3, 8)).sum().backward()
    case = only_case(captured)
    assert case.provenance["layer"] == "attention"
    assert case.provenance["captured_from"] == SDPA
    (line,) = index(tmp_path)
    assert line["layer"] == "attention"


def test_a_name_that_was_imported_before(tmp_path):
    from tests.capture import borrowed

    q, k, v = _qkv()
    with gradtruth.capture(tmp_path) as captured:
        borrowed.scaled_dot_product_attention(q, k, v).sum().backward()
    assert len(cases(captured)) == 1
    assert borrowed.scaled_dot_product_attention is F.scaled_dot_product_attention
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention, "put back"


def test_the_table_of_the_compiler_stays_what_it_is(tmp_path):
    before = torch._C._nn.scaled_dot_product_attention
    with gradtruth.capture(tmp_path):
        assert F.scaled_dot_product_attention is not before
        assert torch._C._nn.scaled_dot_product_attention is before


def test_results_are_what_they_were(tmp_path):
    q, k, v = _qkv()
    plain = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).square().sum(), (q, k, v))
    with gradtruth.capture(tmp_path):
        seen = torch.autograd.grad(
            F.scaled_dot_product_attention(q, k, v).square().sum(), (q, k, v)
        )
    assert all(map(torch.equal, plain, seen))


def test_errors_of_the_call_are_its_own(tmp_path):
    q, k, v = _qkv()
    with gradtruth.capture(tmp_path) as captured, pytest.raises(RuntimeError) as seen:
        F.scaled_dot_product_attention(q, k[:, :, :, :2], v)
    with pytest.raises(RuntimeError) as plain:
        F.scaled_dot_product_attention(q, k[:, :, :, :2], v)
    assert str(seen.value) == str(plain.value)
    assert captured.files == []


def test_dropout_is_refused_with_a_reason(tmp_path):
    q, k, v = _qkv()
    with gradtruth.capture(tmp_path) as captured:
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.25).sum().backward()
    assert captured.files == []
    ((reason, count),) = captured.tally.skipped.items()
    assert count == 3
    assert "dropout_p is 0.25" in reason
    assert "set it to 0" in reason
    assert f"skipped 3: {reason}" in captured.summary()


def test_what_is_not_understood_is_counted(tmp_path):
    q, k, v = (x.expand(2, *x.shape) for x in _qkv())
    with gradtruth.capture(tmp_path) as captured:
        for _ in range(2):
            F.scaled_dot_product_attention(q, k, v).sum().backward()
    ((reason, count),) = captured.tally.skipped.items()
    assert count == 2
    assert "5 dims" in reason
