"""Entry points of peers, as stand-ins with their signatures and conventions, captured and held against autograd."""

import sys
import types
from dataclasses import dataclass

import pytest
import torch
from tests.backends.fake_peers import dense_attend, tokens_attend
from tests.capture.captured import cases, only_case, results, same

import gradtruth

H, D = 2, 4
LENGTHS_Q, LENGTHS_KV = [3, 0, 5], [4, 2, 5]


def _starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def _tokens(*lead):
    counts = (sum(LENGTHS_Q), sum(LENGTHS_KV), sum(LENGTHS_KV))
    return [_drawn(*lead, count, H, D, seed=n) for n, count in enumerate(counts)]


def _dense(*heads):
    return [_drawn(2, length, *heads, D, seed=n) for n, length in enumerate((3, 5, 5))]


def _put(monkeypatch, name, **functions):
    """A module of that name, as if its library were installed."""
    parts = name.split(".")
    for at in range(1, len(parts)):
        parent = ".".join(parts[:at])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    module = types.ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def _check(tmp_path, entry, call, leaves):
    """Capture the call; its case gives the results and gradients that the program had."""
    with gradtruth.capture(tmp_path) as captured:
        result = call()
        out = result[0] if isinstance(result, tuple) else result
        dout = _drawn(*out.shape, seed=9).detach()
        grads = torch.autograd.grad(out, leaves, dout)
    assert not captured.tally.skipped, captured.summary()
    case = only_case(captured)
    assert case.provenance["captured_from"] == entry
    found = results(case)
    same(found["out"].reshape(out.shape), out.detach())
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=False):
        same(found[name].reshape(grad.shape), grad)
    return case, found, grads


# ---------------------------------------------------------------- xformers


@dataclass
class _SeqLenInfo:
    seqstart: torch.Tensor


class LowerTriangularMask(torch.Tensor):
    """A tensor without elements, as there."""


class LowerTriangularFromBottomRightMask:
    pass


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask:
    _window_size: int


class BlockDiagonalMask:
    def __init__(self, window=None):
        self.q_seqinfo = _SeqLenInfo(_starts(LENGTHS_Q))
        self.k_seqinfo = _SeqLenInfo(_starts(LENGTHS_KV))
        if window is not None:
            self._window_size = window


class BlockDiagonalCausalMask(BlockDiagonalMask):
    pass


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    pass


class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalMask):
    pass


class BlockDiagonalGappyKeysMask(BlockDiagonalMask):
    pass


def _band(mask):
    name = type(mask).__name__
    window = getattr(mask, "_window_size", None)
    left = -1 if window is None else window - 1
    if mask is None or name == "BlockDiagonalMask":
        return {}
    return {"corner": "bottom_right" if "BottomRight" in name else "top_left", "window": (left, 0)}


def memory_efficient_attention(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    options = {"softmax_scale": scale}
    headless = query.dim() == 3
    q, k, v = (x.unsqueeze(2) if headless else x for x in (query, key, value))
    if isinstance(attn_bias, BlockDiagonalMask):
        cu = (attn_bias.q_seqinfo.seqstart, attn_bias.k_seqinfo.seqstart)
        out = tokens_attend(q[0], k[0], v[0], *cu, **options, **_band(attn_bias))[0][None]
    elif type(attn_bias) is torch.Tensor:
        out = gradtruth.attention(
            q, k, v, bias=attn_bias if attn_bias.dim() == 4 else attn_bias[:, None],
            backend="reference", **options,
        )  # fmt: skip
    else:
        out = dense_attend(q, k, v, **options, **_band(attn_bias))[0]
    return out.squeeze(2) if headless else out


XFORMERS = "xformers.ops.memory_efficient_attention"


def _xformers(monkeypatch):
    return _put(
        monkeypatch, "xformers.ops.fmha", memory_efficient_attention=memory_efficient_attention
    )


@pytest.mark.parametrize(
    ("mask", "label", "scale"),
    [
        (None, "full", 0.3),
        (LowerTriangularMask(), "causal", None),
        (LowerTriangularFromBottomRightMask(), "causal br", 0.3),
        (LowerTriangularFromBottomRightLocalAttentionMask(2), "window(1,0) br", None),
    ],
)
def test_xformers_dense(tmp_path, monkeypatch, mask, label, scale):
    fmha, leaves = _xformers(monkeypatch), _dense(H)
    case, *_ = _check(
        tmp_path,
        XFORMERS,
        lambda: fmha.memory_efficient_attention(*leaves, attn_bias=mask, scale=scale),
        leaves,
    )
    assert case.problem.spec.mask_label() == label


@pytest.mark.parametrize(
    ("mask", "label"),
    [
        (BlockDiagonalMask(), "full"),
        (BlockDiagonalCausalMask(), "causal"),
        (BlockDiagonalCausalFromBottomRightMask(), "causal br"),
        (BlockDiagonalCausalLocalAttentionFromBottomRightMask(2), "window(1,0) br"),
    ],
)
def test_xformers_tokens(tmp_path, monkeypatch, mask, label):
    fmha, leaves = _xformers(monkeypatch), _tokens(1)
    case, *_ = _check(
        tmp_path,
        XFORMERS,
        lambda: fmha.memory_efficient_attention(*leaves, mask),
        leaves,
    )
    assert (case.problem.layout, case.problem.batch) == ("thd", 3)
    assert case.problem.spec.mask_label() == label


@pytest.mark.parametrize("headless", [False, True])
def test_xformers_bias(tmp_path, monkeypatch, headless):
    fmha = _xformers(monkeypatch)
    leaves = _dense() if headless else _dense(H)
    bias = _drawn(2, 3, 5, seed=5) if headless else _drawn(2, H, 3, 5, seed=5)
    _, found, grads = _check(
        tmp_path,
        XFORMERS,
        lambda: fmha.memory_efficient_attention(*leaves, attn_bias=bias),
        [*leaves, bias],
    )
    same(found["dbias"].reshape(bias.shape), grads[3])


def test_xformers_that_are_not_understood(tmp_path, monkeypatch):
    fmha, leaves = _xformers(monkeypatch), _tokens(1)
    with gradtruth.capture(tmp_path) as captured:
        fmha.memory_efficient_attention(*leaves, BlockDiagonalGappyKeysMask())
        fmha.memory_efficient_attention(*_dense(H), p=0.1).sum().backward()
    assert XFORMERS not in {case.provenance["captured_from"] for case in cases(captured)}
    reasons = " ".join(captured.tally.skipped)
    assert "BlockDiagonalGappyKeysMask, which is not understood" in reasons
    assert "dropout_p is 0.1" in reasons


# ---------------------------------------------------------------- varlen_attn, flash-linear-attention, flash-attn


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (1, 2)])
def test_varlen_attn(tmp_path, monkeypatch, window):
    import torch.nn.attention.varlen as home

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
        window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        out, lse = tokens_attend(
            query, key, value, cu_seq_q, cu_seq_k, window=window_size, softmax_scale=scale
        )
        return out if return_aux is None else (out, lse.detach())

    monkeypatch.setattr(home, "varlen_attn", varlen_attn)
    leaves, cu = _tokens(), (_starts(LENGTHS_Q), _starts(LENGTHS_KV))
    _check(
        tmp_path,
        "torch.nn.attention.varlen.varlen_attn",
        lambda: home.varlen_attn(
            *leaves,
            *cu,
            max(LENGTHS_Q),
            max(LENGTHS_KV),
            return_aux=1,
            window_size=window,
            scale=0.4,
        ),
        leaves,
    )


@pytest.mark.parametrize(("tokens", "window"), [(False, None), (False, 2), (True, 2)])
def test_fla(tmp_path, monkeypatch, tokens, window):
    def parallel_attn(
        q, k, v, g=None, scale=None, window_size=None, cu_seqlens=None, chunk_indices=None, *, sink_bias=None
    ):  # fmt: skip
        left = -1 if window_size is None else window_size - 1
        options = {
            "corner": "top_left", "window": (left, 0), "softmax_scale": scale,
            "softmax_type": "learnable", "softmax_offset": sink_bias,
        }  # fmt: skip
        if cu_seqlens is None:
            return dense_attend(q, k, v, **options)[0]
        return tokens_attend(q[0], k[0], v[0], cu_seqlens, cu_seqlens, **options)[0][None]

    home = _put(monkeypatch, "fla.ops.attn.parallel", parallel_attn=parallel_attn)
    leaves = [_drawn(1 if tokens else 2, 8, H, D, seed=n) for n in range(3)]
    sink = torch.tensor([0.25, -0.5], requires_grad=True)
    options = {"cu_seqlens": _starts([3, 0, 5]).long()} if tokens else {}
    _, found, grads = _check(
        tmp_path,
        "fla.ops.attn.parallel.parallel_attn",
        lambda: home.parallel_attn(*leaves, window_size=window, sink_bias=sink, **options),
        [*leaves, sink],
    )
    torch.testing.assert_close(found["dsoftmax_offset"].float(), grads[3])


def _flash(monkeypatch):
    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        window = (window_size[0], 0) if causal else window_size
        return dense_attend(q, k, v, window=window, softmax_scale=softmax_scale)[0]

    return _put(monkeypatch, "flash_attn.flash_attn_interface", flash_attn_func=flash_attn_func)


@pytest.mark.parametrize(
    ("options", "label"),
    [({}, "full"), ({"causal": True}, "causal br"), ({"window_size": (1, 1)}, "window(1,1) br")],
)
def test_flash_attn(tmp_path, monkeypatch, options, label):
    home, leaves = _flash(monkeypatch), _dense(H)
    case, *_ = _check(
        tmp_path,
        "flash_attn.flash_attn_func",
        lambda: home.flash_attn_func(*leaves, **options),
        leaves,
    )
    assert case.problem.spec.mask_label() == label


# ---------------------------------------------------------------- libraries that are imported later


LIBRARY = """
def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):
    from tests.backends.fake_peers import dense_attend
    return dense_attend(q, k, v)[0]
"""


def test_a_library_that_is_imported_later(tmp_path, monkeypatch):
    package = tmp_path / "site" / "flash_attn"
    package.mkdir(parents=True)
    (package / "flash_attn_interface.py").write_text(LIBRARY)
    (package / "__init__.py").write_text(
        "from flash_attn.flash_attn_interface import flash_attn_func as mine\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    finders = list(sys.meta_path)
    try:
        with gradtruth.capture(tmp_path / "cases") as captured, gradtruth.capture(None) as other:
            import flash_attn

            flash_attn.mine(*_dense(H)).sum().backward()
            loader = sys.modules["flash_attn.flash_attn_interface"].__spec__.loader
            assert type(loader).__name__ == "SourceFileLoader", "the module's own"
    finally:
        for name in ("flash_attn", "flash_attn.flash_attn_interface"):
            sys.modules.pop(name, None)
    assert only_case(captured).provenance["captured_from"] == "flash_attn.flash_attn_func"
    assert other.tally.calls == 1
    assert sys.meta_path == finders
