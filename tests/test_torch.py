"""The operators under PyTorch's machinery: autograd, compile, checkpointing, autocast, function transforms."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import gradtruth
import gradtruth.ops  # registers the operators
from gradtruth.arguments import Options, TensorArguments, inputs_of, max_seqlens, spec_of

H, G, D = 4, 2, 8


def qkv(
    s: int = 5, t: int = 5, dtype: torch.dtype = torch.float32, *, batch: int = 2
) -> list[Tensor]:
    gen = torch.Generator().manual_seed(s * 1000 + t)
    made = [
        torch.randn(batch, n, h, D, generator=gen, dtype=dtype) for n, h in ((s, H), (t, G), (t, G))
    ]
    return [x.requires_grad_() for x in made]


def cu(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return torch.autograd.grad((out * weight).sum(), inputs)


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"attn_mask_type": "causal"},
    "window_softcap": {"window_size": (3, 1), "softcap": 5.0, "softmax_scale": 0.3},
    "padding": {
        "attn_mask_type": "padding_causal",
        "cu_seqlens_q": cu(0, 2, 7),
        "cu_seqlens_kv": cu(0, 5, 8),
    },
    "padding_mask": {
        "attn_mask_type": "padding",
        "attention_mask": torch.tensor([[True] + [False] * 4, [False] * 5]),
    },
    "arbitrary": {
        "attn_mask_type": "arbitrary",
        "attention_mask": torch.eye(5, dtype=torch.bool)[None, None],
    },
    "sink": {
        "softmax_type": "learnable",
        "softmax_offset": torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True),
    },
    "bias": {"bias": torch.linspace(-1, 1, H * 25).reshape(1, H, 5, 5).requires_grad_()},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 7},
}


def operator_arguments(
    config: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, **changes: Any
) -> tuple[Any, ...]:
    given = {**config}
    tensors = TensorArguments(
        q, k, v, **{n: given.pop(n) for n in TensorArguments._fields if n in given}
    )
    options = Options(**given)._replace(**changes)
    return (
        *inputs_of(options, tensors),
        *max_seqlens(options, tensors),
        spec_of(options, tensors),
        "reference",
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_opcheck_forward(name: str) -> None:
    q, k, v = qkv()
    opcheck(
        torch.ops.gradtruth.attention_forward.default,
        operator_arguments(CONFIGS[name], q, k, v, max_logit=True),
    )


def test_opcheck_forward_thd_and_lse_gradient() -> None:
    q, k, v = (x[0].detach().requires_grad_() for x in qkv())
    config = {
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
        "cu_seqlens_q": cu(0, 2, 4),
        "cu_seqlens_kv": cu(0, 3, 5),
    }
    opcheck(
        torch.ops.gradtruth.attention_forward.default,
        operator_arguments(config, q, k, v, lse_grad=True),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_opcheck_backward(name: str) -> None:
    q, k, v = (x.detach() for x in qkv())
    arguments = operator_arguments(CONFIGS[name], q, k, v)
    arguments = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    out, lse, _ = torch.ops.gradtruth.attention_forward.default(*arguments)
    for mask in ([True] * 5, [True, False, True, False, False]):
        opcheck(
            torch.ops.gradtruth.attention_backward.default,
            (torch.ones_like(out), torch.ones_like(lse), out, lse, mask, *arguments),
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_operator_equals_function(name: str) -> None:
    q, k, v = qkv()
    direct = gradtruth.attention(q, k, v, backend="reference", **CONFIGS[name])
    called = torch.ops.gradtruth.attention_forward.default(
        *operator_arguments(CONFIGS[name], q, k, v)
    )[0]
    assert torch.equal(direct, called)
    assert equal(gradients(direct, q, k, v), gradients(called, q, k, v))


# ---------------------------------------------------------------- compile


@pytest.mark.parametrize("name", CONFIGS)
def test_compile_fullgraph_equals_eager(name: str) -> None:
    torch._dynamo.reset()
    q, k, v = qkv()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gradtruth.attention(q, k, v, backend="reference", **CONFIGS[name])

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    out, expected = compiled(q, k, v), run(q, k, v)
    assert torch.equal(out, expected)
    assert equal(gradients(out, q, k, v), gradients(expected, q, k, v))


def test_compile_with_inductor() -> None:
    torch._dynamo.reset()
    q, k, v = qkv()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = gradtruth.attention_with_lse(
            q * 2, k, v, backend="reference", attn_mask_type="causal"
        )
        return out.sin() + lse.transpose(1, 2).unsqueeze(-1)

    out, expected = torch.compile(run, fullgraph=True)(q, k, v), run(q, k, v)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(out, q, k, v), gradients(expected, q, k, v))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("mask", ["causal", "padding_causal"])
def test_compile_serves_every_length(mask: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def run(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_kv: Tensor) -> Tensor:
        lengths = (
            {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv} if mask.startswith("padding") else {}
        )
        return gradtruth.attention(
            q, k, v, backend="reference", attn_mask_type=mask, window_size=(4, 0), **lengths
        )

    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=dynamic)
    for s, t in ((5, 5), (7, 7), (9, 12), (13, 11), (6, 19)):
        q, k, v = qkv(s, t)
        lengths = cu(0, s - 1, 2 * s - 1), cu(0, t - 2, 2 * t - 2)
        out, expected = compiled(q, k, v, *lengths), run(q, k, v, *lengths)
        assert torch.equal(out, expected)
        assert equal(gradients(out, q, k, v), gradients(expected, q, k, v))
    # One frame for the first shape, one dynamic one, and one where S == T first, T another after.
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    ("option", "dynamic"), [("window_size", None), ("window_size", True), ("softcap", True)]
)
def test_compile_takes_ints_that_are_symbols(option: str, dynamic: bool | None) -> None:
    """From an argument or a shape, where dynamic=True makes symbols of them: one more graph for each value."""
    torch._dynamo.reset()

    def run(q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        window = (number, q.shape[1] // 4)
        return gradtruth.attention(
            q, k, v, backend="reference", **{option: window if option == "window_size" else number}
        )

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for number, length in ((3, 9), (4, 9), (3, 12)):
        q, k, v = qkv(length, 11)
        out, expected = compiled(q, k, v, number), run(q, k, v, number)
        assert torch.equal(out, expected)
        assert equal(gradients(out, q, k, v), gradients(expected, q, k, v))


def test_compile_draws_dropout_from_the_generator() -> None:
    torch._dynamo.reset()
    q, k, v = qkv()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gradtruth.attention(q, k, v, backend="reference", dropout_p=0.5)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    first, second = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(3)
    assert torch.equal(first, run(q, k, v))
    assert torch.equal(second, run(q, k, v))
    assert not torch.equal(first, second)


def test_compile_follows_use() -> None:
    torch._dynamo.reset()
    q, k, v = qkv(200, 200, torch.bfloat16)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gradtruth.attention(q, k, v)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for name in ("reference", "unfused", "reference"):
        with gradtruth.use(backend=name):
            assert torch.equal(compiled(q, k, v), gradtruth.attention(q, k, v, backend=name))
    assert not torch.equal(
        gradtruth.attention(q, k, v, backend="reference"),
        gradtruth.attention(q, k, v, backend="unfused"),
    )


def test_fakes_tell_the_dtypes_of_float64() -> None:
    q, k, v = (x.detach() for x in qkv(dtype=torch.float64))
    options: dict[str, Any] = {
        "softmax_type": "learnable",
        "softmax_offset": torch.zeros(q.shape[2], dtype=torch.float64),
    }

    def run() -> list[torch.dtype]:
        found = gradtruth.attention_forward(q, k, v, return_max_logit=True, **options)
        out, lse, _ = found
        grads = gradtruth.attention_backward(out, q, k, v, out, lse, **options)
        return [x.dtype for x in (*found, *grads) if x is not None]

    real = run()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert run() == real


def test_compile_before_the_first_use_of_a_thread_follows_it() -> None:
    import threading

    torch._dynamo.reset()
    q, k, v = qkv(200, 200, torch.bfloat16)
    found: list[bool] = []

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gradtruth.attention(q, k, v)

    def fresh() -> None:
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        compiled(q, k, v)
        with gradtruth.use(backend="unfused"):
            expected = gradtruth.attention(q, k, v, backend="unfused")
            found.append(torch.equal(compiled(q, k, v), expected))

    thread = threading.Thread(target=fresh)
    thread.start()
    thread.join()
    assert found == [True]


def test_compiled_module() -> None:
    torch._dynamo.reset()
    q, k, v = qkv()
    module = gradtruth.DotProductAttention(
        H,
        D,
        G,
        qkv_format="bshd",
        backend="reference",
        softmax_type="learnable",
        attention_dropout=0.2,
    )
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.manual_seed(5)
    out = compiled(q, k, v)
    torch.manual_seed(5)
    expected = module(q, k, v)
    inputs = (q, k, v, module.softmax_offset)
    assert torch.equal(out, expected)
    assert equal(gradients(out, *inputs), gradients(expected, *inputs))


def test_export_of_the_forward() -> None:
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in qkv())

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return gradtruth.attention(q, k, v, backend="reference", attn_mask_type="causal")

    exported = torch.export.export(Model(), (q, k, v))
    assert any("attention_forward" in str(node.target) for node in exported.graph.nodes)
    assert torch.equal(exported.module()(q, k, v), Model()(q, k, v))


# ---------------------------------------------------------------- autograd


def test_every_subset_of_inputs_that_require_grad() -> None:
    q, k, v = (x.detach() for x in qkv())
    bias, sink = torch.linspace(-1, 1, 25).reshape(1, 1, 5, 5), torch.tensor([0.5, -1.0, 2.0, 0.0])
    names = ("q", "k", "v", "bias", "sink")

    def run(wanted: tuple[str, ...]) -> dict[str, Tensor]:
        made = dict(zip(names, (q, k, v, bias, sink), strict=True))
        made = {n: x.clone().requires_grad_(n in wanted) for n, x in made.items()}
        out = gradtruth.attention(
            made["q"],
            made["k"],
            made["v"],
            bias=made["bias"],
            softmax_type="learnable",
            softmax_offset=made["sink"],
        )
        found = gradients(out, *(made[n] for n in wanted))
        return dict(zip(wanted, found, strict=True))

    full = run(names)
    for size in range(1, 5):
        for wanted in itertools.combinations(names, size):
            for name, grad in run(wanted).items():
                assert torch.equal(grad, full[name]), (wanted, name)


def test_forward_bits_do_not_depend_on_grad_mode() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    with_grad = gradtruth.attention(q, k, v)
    with torch.no_grad():
        without = gradtruth.attention(q, k, v)
    assert torch.equal(with_grad, without)
    assert torch.equal(with_grad, gradtruth.attention(q.detach(), k.detach(), v.detach()))
    assert torch.equal(with_grad, gradtruth.attention_forward(q, k, v)[0])
    assert with_grad.requires_grad
    assert not without.requires_grad


@pytest.mark.parametrize(
    "name", ["plain", "causal", "window_softcap", "padding", "padding_mask", "sink", "bias"]
)
def test_gradcheck_with_lse(name: str) -> None:
    q, k, v = (x.detach().double().requires_grad_() for x in qkv())
    config = dict(CONFIGS[name])
    extra = [x for n in ("bias", "softmax_offset") if (x := config.get(n)) is not None]
    extra = [x.detach().double().requires_grad_() for x in extra]
    names = [n for n in ("bias", "softmax_offset") if n in config]

    def run(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        given = {**config, **dict(zip(names, more, strict=True))}
        out, lse = gradtruth.attention_with_lse(q, k, v, backend="reference", **given)
        return out, lse.nan_to_num(neginf=0.0)

    assert torch.autograd.gradcheck(run, (q, k, v, *extra))


def test_lse_alone_is_differentiable() -> None:
    q, k, v = qkv()
    _, lse = gradtruth.attention_with_lse(q, k, v)
    dq, dk = torch.autograd.grad(lse.sum(), (q, k))
    scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(2, 2)) / D**0.5
    expected = torch.autograd.grad(scores.logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close((dq, dk), expected)


def test_lse_of_attention_forward_has_no_gradient() -> None:
    q, k, v = qkv()
    out, lse, max_logit = gradtruth.attention_forward(q, k, v, return_max_logit=True)
    assert not (out.requires_grad)
    assert not (lse.requires_grad)
    assert max_logit is not None
    assert max_logit.shape == (H,)


def test_double_backward_is_an_error_that_says_so() -> None:
    q, k, v = qkv()
    (grad,) = torch.autograd.grad(gradtruth.attention(q, k, v).square().sum(), q, create_graph=True)
    assert torch.equal(grad, torch.autograd.grad(gradtruth.attention(q, k, v).square().sum(), q)[0])
    with pytest.raises(NotImplementedError, match="second derivative"):
        grad.sum().backward()


def test_function_transforms() -> None:
    q, k, v = (x.detach() for x in qkv())

    def loss(q: Tensor) -> Tensor:
        return gradtruth.attention(q, k, v, backend="reference").square().sum()

    leaf = q.clone().requires_grad_()
    assert torch.equal(torch.func.grad(loss)(q), torch.autograd.grad(loss(leaf), leaf)[0])
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(loss)(q[None])
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(loss, (q,), (q,))
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.func.jacrev(lambda q: gradtruth.attention(q, k, v))(q)


def test_retained_graph_gives_the_same_bits() -> None:
    q, k, v = qkv()
    out = gradtruth.attention(q, k, v, dropout_p=0.3)
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    gradtruth.attention(*qkv(9, 9)).sum().backward()
    assert equal(first, torch.autograd.grad(out.sum(), (q, k, v)))


def test_pair_of_backends() -> None:
    q, k, v = qkv(9, 9, torch.bfloat16)
    mixed = gradtruth.attention(q, k, v, backend=("unfused", "reference"))
    alone = gradtruth.attention(q, k, v, backend="unfused")
    assert torch.equal(mixed, alone)
    got = gradients(mixed, q, k, v)
    arguments = (
        torch.linspace(-1, 1, mixed.numel(), dtype=mixed.dtype).reshape(mixed.shape),
        q,
        k,
        v,
    )
    out, lse, _ = gradtruth.attention_forward(q, k, v, backend="unfused")
    expected = gradtruth.attention_backward(*arguments, out, lse, backend="reference")
    assert equal(got, expected[:3])


# ---------------------------------------------------------------- strides, dropout, checkpoint, autocast


def test_strided_inputs_and_gradients() -> None:
    base = torch.randn(2, 5, H + 2 * G, D, generator=torch.Generator().manual_seed(0))
    q, k, v = base.split([H, G, G], dim=2)
    sbhd = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    swapped = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    expected = gradtruth.attention(q.contiguous(), k.contiguous(), v.contiguous())
    for views in ((q, k, v), sbhd, swapped):
        leaves = [x.detach().requires_grad_() for x in views]
        out = gradtruth.attention(*leaves)
        assert out.is_contiguous()
        assert torch.equal(out, expected)
        for dout in (torch.ones(()).expand(out.shape), torch.ones(2, 5, D, H).transpose(2, 3)):
            got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
            dense = [x.detach().contiguous().requires_grad_() for x in views]
            assert equal(
                got, torch.autograd.grad(gradtruth.attention(*dense), dense, torch.ones_like(out))
            )
    # the copy that the last dim costs is said
    assert gradtruth.explain(*swapped).copies == ("q", "k", "v")
    assert gradtruth.explain(q, k, v).copies == ()


def test_dropout_follows_the_generator() -> None:
    q, k, v = qkv()
    torch.manual_seed(11)
    first = gradtruth.attention(
        q, k, v, dropout_p=0.37
    )  # never seen before: making its plan must not draw
    after = torch.rand(())
    torch.manual_seed(11)
    assert torch.equal(first, gradtruth.attention(q, k, v, dropout_p=0.37))
    assert torch.equal(after, torch.rand(()))
    assert not torch.equal(first, gradtruth.attention(q, k, v, dropout_p=0.37))
    seed = torch.tensor(5)
    assert torch.equal(
        gradtruth.attention(q, k, v, dropout_p=0.5, dropout_seed=5),
        gradtruth.attention(q, k, v, dropout_p=0.5, dropout_seed=seed),
    )


def test_no_dropout_draws_nothing() -> None:
    q, k, v = qkv()
    state = torch.get_rng_state()
    gradtruth.attention(q, k, v)
    gradtruth.attention(q, k, v, dropout_p=0.5, dropout_seed=1)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_gives_the_same_bits(reentrant: bool) -> None:
    q, k, v = qkv()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gradtruth.attention(q.sin(), k, v, dropout_p=0.3)

    torch.manual_seed(2)
    plain = gradients(run(q, k, v), q, k, v)
    torch.manual_seed(2)
    assert equal(
        plain, gradients_backward(checkpoint(run, q, k, v, use_reentrant=reentrant), q, k, v)
    )


def gradients_backward(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Reentrant checkpointing wants backward(), not autograd.grad()."""
    weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    for x in inputs:
        x.grad = None
    (out * weight).sum().backward()
    return [x.grad for x in inputs if x.grad is not None]


def test_selective_checkpoint_sees_the_operator() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    q, k, v = qkv()
    seen = []

    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        seen.append(op)
        keep = op == torch.ops.gradtruth.attention_forward.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gradtruth.attention(q.sin(), k, v, backend="reference")

    out = checkpoint(
        run,
        q,
        k,
        v,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    assert equal(gradients(out, q, k, v), gradients(run(q, k, v), q, k, v))
    assert torch.ops.gradtruth.attention_forward.default in seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_q_k_v_alone(dtype: torch.dtype) -> None:
    q, k, v = qkv()
    mixed = v.detach().to(dtype).requires_grad_()
    bias = torch.zeros(1, 1, 5, 5, requires_grad=True)
    with torch.autocast("cpu", dtype):
        out = gradtruth.attention(q, k, mixed, bias=bias, backend="reference")
    assert out.dtype == dtype
    low = [x.detach().to(dtype) for x in (q, k, mixed)]
    assert torch.equal(out, gradtruth.attention(*low, bias=bias.detach(), backend="reference"))
    dq, dv, dbias = torch.autograd.grad(out.float().square().sum(), (q, mixed, bias))
    assert (dq.dtype, dv.dtype, dbias.dtype) == (torch.float32, dtype, torch.float32)


def test_autocast_leaves_float64() -> None:
    q, k, v = qkv(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert gradtruth.attention(q, k, v).dtype == torch.float64


def test_backward_outside_and_inside_autocast_is_the_same() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(gradtruth.attention(q, k, v, backend="reference"), q, k, v)
        out = gradtruth.attention(q, k, v, backend="reference")
    assert equal(inside, gradients(out, q, k, v))


def test_functional_pair_under_autocast() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse, _ = gradtruth.attention_forward(q, k, v)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        found = gradtruth.attention_backward(weight, q, k, v, out, lse)[:3]
        expected = gradients(gradtruth.attention(q, k, v), q, k, v)
    assert [grad.dtype for grad in found if grad is not None] == [q.dtype] * 3
    assert equal(found, expected)


# ---------------------------------------------------------------- choosing


def test_use_is_scoped_and_survives_errors() -> None:
    q, k, v = qkv()
    with gradtruth.use(backend="unfused"):
        assert chosen(q, k, v) == "unfused"
        with gradtruth.use(backend=("unfused", "reference")):
            assert chosen(q, k, v) == "unfused,reference"
        with pytest.raises(RuntimeError, match="planned"), gradtruth.use(backend="reference"):
            raise RuntimeError("planned")
        assert chosen(q, k, v) == "unfused"
        assert chosen(q, k, v, backend="reference") == "reference"
    assert chosen(q, k, v) == chosen(q, k, v, backend="auto")


def test_use_that_ends_out_of_order_leaves_nothing() -> None:
    q, k, v = qkv()
    before = chosen(q, k, v)

    def suspended() -> Generator[None]:
        with gradtruth.use(backend="flex"):
            yield

    held = suspended()
    next(held)
    with gradtruth.use(backend="unfused"):
        held.close()
        assert chosen(q, k, v) == "unfused"
    assert chosen(q, k, v) == before


def test_use_holds_for_one_thread() -> None:
    import threading

    q, k, v = qkv()
    found: list[str] = []
    with gradtruth.use(backend="unfused"):
        thread = threading.Thread(target=lambda: found.append(chosen(q, k, v)))
        thread.start()
        thread.join()
    assert found == [chosen(q, k, v)]


def chosen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    selection = gradtruth.explain(q, k, v, **options)
    assert selection.forward is not None
    assert selection.backward is not None
    names = dict.fromkeys((selection.forward.name, selection.backward.name))
    return ",".join(names)


def test_plans_are_bounded_and_reused() -> None:
    from gradtruth import calls, ops

    for s in range(1, 60):
        q = torch.zeros(1, s, 1, 1)
        gradtruth.attention(q, q, q, backend="reference")
        gradtruth.attention(q, q, q, backend="reference")
    assert len(ops._plans) <= ops._plans.size
    assert len(calls._prepared) <= calls._prepared.size


def test_forward_mode_says_so_on_the_plain_path() -> None:
    import torch.autograd.forward_ad as fwad

    q, k, v = (x.detach() for x in qkv())
    with fwad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        gradtruth.attention(fwad.make_dual(q, torch.ones_like(q)), k, v, backend="reference")


def test_gradient_through_a_saturated_softcap() -> None:
    q = torch.tensor([[[[1.0]]]], requires_grad=True)
    k, v = torch.tensor([9.0, 8.0]).view(1, 2, 1, 1), torch.tensor([1.0, -1.0]).view(1, 2, 1, 1)
    found = {}
    for dtype in (torch.float32, torch.float64):
        inputs = [x.detach().to(dtype) for x in (q, k, v)]
        inputs[0].requires_grad_()
        out = gradtruth.attention(*inputs, softcap=1.0, softmax_scale=1.0, backend="reference")
        found[dtype] = torch.autograd.grad(out.sum(), inputs[0])[0].item()
    assert found[torch.float64] == pytest.approx(found[torch.float32], rel=1e-5)
    assert found[torch.float64] == pytest.approx(-1.5263e-6, rel=1e-3)


def test_sink_gradient_of_fp64_has_fp64_digits() -> None:
    q, k, v = (x.detach().double() for x in qkv())
    sink = torch.tensor([0.3, -0.2, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    step = torch.zeros(4, dtype=torch.float64)
    step[1] = 1e-6

    def loss(sink: Tensor) -> Tensor:
        out = gradtruth.attention(
            q, k, v, softmax_type="learnable", softmax_offset=sink, backend="reference"
        )
        return out.square().sum()

    (grad,) = torch.autograd.grad(loss(sink), sink)
    with torch.no_grad():
        difference = (loss(sink + step) - loss(sink - step)) / 2e-6
    assert grad[1].item() == pytest.approx(difference.item(), rel=3e-9)
