"""What training does around attention: compilation, autograd, recomputation, autocast, streams and devices."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from tests.reports.harness import BF16, FP16, FP32, close, drawn, finite, probe, report, same
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import gradtruth
from gradtruth import DotProductAttention, InvalidProblem
from gradtruth.core.tensors import Inputs

COMPILE = "torch.compile, fake and meta kernels"
AUTOGRAD = "autograd: subsets, double backward, recomputation"
AUTOCAST = "autocast and mixed dtypes"
DEVICES = "current device and streams"


# ---------------------------------------------------------------- compilation


def described(tensors: tuple[Tensor, ...]) -> list[tuple]:
    return [(tuple(t.shape), t.stride(), t.dtype, t.device.type) for t in tensors]


@report(
    "pytorch/pytorch#146848",
    COMPILE,
    "shape, strides and dtype of every fake result are those of the real one",
)
@pytest.mark.parametrize("length", [1, 5, 31, 32, 33])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_fakes_have_the_real_forms(own, length, biased):
    """The meta kernel said another shape of lse than the device's kernel returned."""
    tensors = drawn(own, length, 33, heads=(4, 2), d=128, dv=64)
    bias = own.h(5, 1, 4, 1, 1).expand(1, 4, length, 33) if biased else None
    sample = own.sample(*tensors, bias=bias)
    if not own.backend.supports(sample.problem, own.device).ok:
        pytest.skip(str(own.backend.supports(sample.problem, own.device)))
    given = [getattr(sample.inputs, name) for name in Inputs.__dataclass_fields__]
    options = (None, None, sample.problem.spec.encode(), own.name)
    forward, backward = (
        torch.ops.gradtruth.attention_forward.default, torch.ops.gradtruth.attention_backward.default,
    )  # fmt: skip
    mask = [True, True, True, biased, False]

    def run(dout: Tensor, inputs: list[Tensor | None]) -> list[tuple]:
        out, lse, top = forward(*inputs, *options)
        grads = backward(dout, None, out, lse, mask, *inputs, *options)
        return described((out, lse, top, *grads))

    real = run(sample.dout, given)
    with FakeTensorMode() as mode:
        fake = run(
            mode.from_tensor(sample.dout),
            [None if x is None else mode.from_tensor(x) for x in given],
        )
    assert fake == real


@report("pytorch/pytorch#110832", COMPILE, "dv has the width of v, compiled and not")
def test_compiled_values_wider_than_keys(own):
    """The compiled backward expected dv to be as wide as q."""
    tensors = drawn(own, 4, d=8, dv=16)
    expected = own.attend(*tensors, attn_mask_type="causal").verify()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gradtruth.attention(q, k, v, attn_mask_type="causal", backend=own.name)

    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = torch.compile(run, backend="aot_eager", fullgraph=True)(*leaves)
    grads = torch.autograd.grad(out, leaves, tensors[3])
    assert grads[2].shape == (1, 4, 2, 16)
    for found, name in zip((out, *grads), ("out", "dq", "dk", "dv"), strict=True):
        close(found, expected.results[name].double())


@report(
    "pytorch/pytorch#136232",
    COMPILE,
    "a mask of another length is refused; with its own mask the compiled call equals the plain one",
)
def test_a_mask_made_for_another_length(own):
    """A mask object made for a longer sequence was accepted, and gradients were NaN."""
    offsets = torch.arange(128, device=own.device)
    masks = {n: (offsets[:n] > offsets[:n, None])[None, None] for n in (120, 128)}

    def loss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out, lse = gradtruth.attention_with_lse(
            q, k, v, attn_mask_type="arbitrary", attention_mask=mask, backend=own.name
        )
        return out.square().sum() + lse.sum()

    compiled = torch.compile(loss, backend="aot_eager", dynamic=True)
    for length in (120, 128):
        leaves = [x.requires_grad_() for x in drawn(own, length, d=64)[:3]]
        found = torch.autograd.grad(compiled(*leaves, masks[length]), leaves)
        finite(found)
        right = torch.autograd.grad(loss(*leaves, masks[length]), leaves)
        for one, other in zip(found, right, strict=True):
            close(one, other.double())
    short = drawn(own, 120, d=64)[:3]
    with pytest.raises(InvalidProblem, match="attention_mask has shape"):
        loss(*short, masks[128])


# ---------------------------------------------------------------- autograd


@report(
    "pytorch/pytorch#116350",
    AUTOGRAD,
    "a second derivative is refused in words, never a silent zero",
)
def test_second_derivative_says_so(own):
    """A gradient penalty failed in the backward of the backward; users need to know before they train."""
    q, k, v, _ = drawn(own, 6, d=8)
    q.requires_grad_()
    out = gradtruth.attention(q, k, v, backend=own.name)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.square().sum().backward()


def recomputed(own, how: str, tensors: list[Tensor], seed: int) -> list[Tensor]:
    """Gradients of a dropout attention, plain or recomputed in the backward."""
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    torch.manual_seed(seed)

    def run(*qkv: Tensor, dropout_seed: int | None = None) -> Tensor:
        return gradtruth.attention(*qkv, dropout_p=0.3, dropout_seed=dropout_seed, backend=own.name)

    def seeded(*qkv: Tensor) -> Tensor:
        return run(*qkv, dropout_seed=77)

    if how.startswith("module"):
        module = DotProductAttention(2, 48, attention_dropout=0.3, qkv_format="bshd", attn_mask_type="no_mask",
                                     backend=own.name)  # fmt: skip
        out = module(*leaves, checkpoint_core_attention=how.endswith("checkpoint")).unflatten(
            -1, (2, 48)
        )
    else:
        calls: dict[str, Callable[[], Tensor]] = {
            "plain": lambda: run(*leaves),
            "seeded": lambda: seeded(*leaves),
            "reentrant": lambda: checkpoint(run, *leaves, use_reentrant=True),
            "checkpoint": lambda: checkpoint(run, *leaves, use_reentrant=False),
            "seeded checkpoint": lambda: checkpoint(
                seeded, *leaves, use_reentrant=False, preserve_rng_state=False
            ),
        }
        out = calls[how]()
    torch.rand(3, device=own.device)  # another user of the generator before the backward
    out.backward(tensors[3])  # not autograd.grad, which reentrant checkpoints refuse
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@report(
    "allenai/OLMo-core#828",
    AUTOGRAD,
    "with and without recomputation the gradients have the same bits for the same seed",
)
@pytest.mark.parametrize(
    ("with_", "without"),
    [
        ("reentrant", "plain"),
        ("checkpoint", "plain"),
        ("seeded checkpoint", "seeded"),
        ("module checkpoint", "module"),
    ],
)
def test_recomputation_draws_the_same_mask(own, with_, without):
    """Recomputation without the generator's state drew a new dropout mask, and training went worse."""
    tensors = drawn(own, 48, d=48)
    for found, right in zip(
        recomputed(own, with_, tensors, 3), recomputed(own, without, tensors, 3), strict=True
    ):
        same(found, right)
    other = recomputed(own, "plain", tensors, 4)
    assert not torch.equal(other[0], recomputed(own, "plain", tensors, 3)[0])
    probed = probe(own, 48, 48, dropout_p=0.3, dropout_seed=9)
    close(probed.dv[0, :, 0, :48], probed.out[0, :, 0, :48].double().t())


# ---------------------------------------------------------------- autocast


@report(
    "facebookresearch/xformers#1046",
    AUTOCAST,
    "cast to autocast's dtype, gradients in the dtypes given; outside, an error that names both dtypes",
)
def test_mixed_dtypes_under_autocast(own):
    """Norm layers return fp32 under autocast while v is half: an error deep inside."""
    q, k, v, dout = drawn(own, 16, d=32)
    leaves = [q.requires_grad_(), k.requires_grad_(), v.to(BF16).requires_grad_()]
    with torch.autocast(own.device.type, BF16):
        out = gradtruth.attention(*leaves, backend=own.name)
    assert out.dtype == BF16
    grads = torch.autograd.grad(out, leaves, dout.to(BF16))
    assert [grad.dtype for grad in grads] == [FP32, FP32, BF16]
    low = own.attend(*(x.detach().to(BF16) for x in leaves), dout.to(BF16)).verify()
    for found, name in zip((out, *grads), ("out", "dq", "dk", "dv"), strict=True):
        same(found.to(BF16), low.results[name])
    with pytest.raises(InvalidProblem, match="bfloat16") as caught:
        gradtruth.attention(*leaves, backend=own.name)
    assert "float32" in str(caught.value)


# ---------------------------------------------------------------- devices and streams


@report("Dao-AILab/flash-attention#54", DEVICES, "all ones in, all ones out, on every device")
def test_ones_on_every_device(own):
    """The kernel was launched on the current device instead of the tensors': all zeros on the second one."""
    devices = [own.device]
    if own.device.type == "cuda":
        devices = [torch.device("cuda", at) for at in range(torch.cuda.device_count())]
    for device in devices:
        ones = torch.ones(1, 16, 2, 64, dtype=FP16, device=device, requires_grad=True)
        out = gradtruth.attention(ones, ones, ones, backend=own.name)
        close(out, torch.ones(1, 16, 2, 64))
        (grad,) = torch.autograd.grad(out, ones, torch.ones_like(out))
        assert grad.device == device
        close(grad, torch.ones(1, 16, 2, 64))  # dv = 1, dq = dk = 0


@report(
    "cornstarch-org/Cornstarch#77",
    DEVICES,
    "calls on another stream or thread, with inputs made and freed there, give what one stream gives",
)
def test_calls_beside_each_other(own):
    """dk and dv were copied before the side stream had written them: wrong now and then."""
    tensors = drawn(own, 32, heads=(4, 2), d=32, dtype=FP16)
    expected = own.attend(*tensors, attn_mask_type="causal").verify().results

    def check() -> None:
        made = [x.clone() for x in tensors]
        found = own.attend(*made, attn_mask_type="causal").results
        for x in made:
            x.fill_(7.0)
        for name, tensor in found.items():
            same(tensor, expected[name])

    if own.device.type == "cuda":
        for at in range(100):
            side = torch.cuda.Stream(own.device)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000 if at % 2 else 1_000)
                check()
        torch.cuda.synchronize()
        return
    failed: list[BaseException] = []

    def repeat() -> None:
        try:
            for _ in range(10):
                check()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
