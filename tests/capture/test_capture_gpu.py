"""Capture on a CUDA device: kernels in bf16, the thread of the backward, another stream, CUDA graphs."""

import pytest
import torch
from tests.capture.captured import cases, only_case
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import gradtruth
from gradtruth.backends import get
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import named
from gradtruth.verify.engine import verify_case
from gradtruth.verify.findings import Row, Verdict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _qkv(batch=2, length=130, heads=4, dim=64):
    """Slices of one projection, [B, H, S, D]."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, length, 3, heads, dim)
    qkv = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    qkv.requires_grad_()
    return qkv, [x.transpose(1, 2) for x in qkv.unbind(2)]


def _right(case, *backends):
    for backend in backends:
        events = verify_case(case.to("cuda"), [get(backend)], name="x", checks=named(("values",)))
        rows = [event for event in events if isinstance(event, Row)]
        assert any(row.verdict is Verdict.RIGHT for row in rows), backend
        assert not [row for row in rows if row.verdict in (Verdict.WRONG, Verdict.ERROR)], rows


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
def test_sdpa(tmp_path, kernel):
    qkv, parts = _qkv()
    with gradtruth.capture(tmp_path) as captured, sdpa_kernel(kernel):
        out = scaled_dot_product_attention(*parts, is_causal=True)
        dout = torch.randn_like(out)
        out.backward(dout)
    case = only_case(captured)
    assert case.provenance["gpu"] == torch.cuda.get_device_name()
    assert len({x.untyped_storage().data_ptr() for x in (case.inputs.q, case.inputs.v)}) == 1
    for found, given in zip(
        (case.inputs.q, case.inputs.k, case.inputs.v), qkv.unbind(2), strict=True
    ):
        assert found.stride() == given.stride()
        assert torch.equal(found, given.detach().cpu())
    assert torch.equal(case.dout, dout.transpose(1, 2).cpu())
    _right(case, "sdpa_flash", "sdpa_efficient")


def test_ours_on_another_stream(tmp_path):
    qkv, _ = _qkv()
    module = gradtruth.DotProductAttention(4, 64, qkv_format="bshd", attn_mask_type="causal")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with gradtruth.capture(tmp_path) as captured, torch.cuda.stream(stream):
        module(*qkv.unbind(2)).square().sum().backward()
    stream.synchronize()
    case = only_case(captured)
    assert torch.equal(case.inputs.q, qkv.detach()[:, :, 0].cpu())
    _right(case, "reference")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_in_the_thread_of_the_device(tmp_path, reentrant):
    qkv, _ = _qkv()

    def run(x):
        return scaled_dot_product_attention(*(part.transpose(1, 2) for part in x.unbind(2)))

    with gradtruth.capture(tmp_path / "plain") as plain:
        run(qkv).sum().backward()
    with gradtruth.capture(tmp_path / "checkpointed") as captured:
        checkpoint(run, qkv, use_reentrant=reentrant).sum().backward()
    one, other = only_case(plain), only_case(captured)
    for name, tensor in one.tensors().items():
        assert torch.equal(other.tensors()[name], tensor), name
    assert not +captured.tally.skipped


def test_calls_of_a_graph_that_is_captured_are_counted(tmp_path):
    # Views that live on would keep the accumulation of gradients on the stream that they were made on.
    qkv = _qkv()[0]
    graph = torch.cuda.CUDAGraph()

    def run():
        qkv.grad = None
        scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv.unbind(2))).sum().backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with gradtruth.capture(tmp_path) as captured, torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    assert cases(captured) == []
    assert captured.tally.skipped == {"a CUDA graph was being captured": 1}


def test_the_file_of_a_case_is_the_same_on_any_device(tmp_path):
    _, parts = _qkv(length=33)
    with gradtruth.capture(tmp_path) as captured:
        scaled_dot_product_attention(*parts).sum().backward()
    case = Case.load(captured.files[0])
    assert case.to("cuda").to("cpu").to_bytes() == captured.files[0].read_bytes()
