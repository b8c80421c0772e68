"""Case files: what goes in comes out, strides and sharing included, and the bytes are stable."""

import hashlib
from dataclasses import replace

import pytest
import torch

from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.cases.provenance import machine_facts


def _noise(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def _packed():
    q, k, v = _noise(2, 5, 3, 4, 8, dtype=torch.bfloat16).unbind(2)
    dout = torch.ones((), dtype=torch.bfloat16).expand(2, 5, 4, 8)
    return Case.of(Spec(right=0, packing="3hd"), Inputs(q=q, k=k, v=v), dout)


def _thd():
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    q, k, v = _noise(9, 4, 8), _noise(9, 2, 8), _noise(9, 2, 16)
    inputs = Inputs(q=q, k=k, v=v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    spec = Spec(layout="thd", lengths="cu_seqlens", lse_grad=True)
    return Case.of(spec, inputs, _noise(9, 4, 16), _noise(4, 9).t(), max_seqlen=(4, 5))


def _everything():
    q = _noise(6, 2, 4, 8, dtype=torch.float16)
    k = _noise(7, 2, 1, 8, dtype=torch.float16).expand(7, 2, 2, 8)
    v = _noise(8, 2, 7, 2, dtype=torch.float16).permute(2, 1, 3, 0)
    inputs = Inputs(
        q=q,
        k=k,
        v=v,
        padding_mask_q=torch.zeros(2, 6, dtype=torch.bool),
        padding_mask_kv=torch.arange(7).expand(2, 7) > 4,
        bias=_noise(1, 4, 6, 1).expand(1, 4, 6, 7),
        alibi_slopes=_noise(2, 4),
        softmax_offset=_noise(4),
        dropout_seed=torch.tensor(-5),
    )
    spec = Spec(
        layout="sbhd",
        lengths="padding_mask",
        bias="post_scale",
        alibi=True,
        softmax="learnable",
        dropout_p=0.25,
        softcap=30.0,
    )
    return Case.of(
        spec, inputs, _noise(6, 2, 4, 8, dtype=torch.float16), provenance={"layer": 3, "model": "é"}
    )


def _empty():
    q, k = _noise(2, 0, 4, 8), _noise(2, 3, 4, 8)
    return Case.of(Spec(), Inputs(q=q, k=k, v=k), q.clone())


def _unaligned():
    buffer = _noise(1003)
    q, k, v = (buffer[at : at + 80].view(1, 10, 1, 8) for at in (501, 601, 702))
    return Case.of(Spec(), Inputs(q=q, k=k, v=v), v)


_MAKERS = (_packed, _thd, _everything, _empty, _unaligned)


@pytest.mark.parametrize("make", _MAKERS)
def test_round_trip(make, tmp_path):
    case = make()
    path = tmp_path / "case.safetensors"
    written = case.save(path)
    assert written == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [entry.name for entry in tmp_path.iterdir()] == ["case.safetensors"]
    found = Case.load(path)
    assert found.id == written == case.id
    assert (found.problem, found.provenance, found.history) == (
        case.problem,
        case.provenance,
        case.history,
    )
    assert found.tensors().keys() == case.tensors().keys()
    for name, tensor in case.tensors().items():
        read = found.tensors()[name]
        assert torch.equal(read, tensor), name
        assert (read.stride(), read.dtype) == (tensor.stride(), tensor.dtype), name
        if tensor.numel():
            assert read.data_ptr() % 16 == tensor.data_ptr() % 16, name
    assert found.to_bytes() == path.read_bytes()


@pytest.mark.parametrize("make", _MAKERS)
def test_bytes_are_stable(make):
    assert len({make().to_bytes() for _ in range(4)}) == 1


def test_shared_storage_stays_shared():
    found = Case.from_bytes(_packed().to_bytes())
    addresses = {
        t.untyped_storage().data_ptr() for t in (found.inputs.q, found.inputs.k, found.inputs.v)
    }
    assert len(addresses) == 1
    found.inputs.q.zero_()
    assert bool(found.inputs.v.any()), "writing q must not reach v"
    assert found.dout.untyped_storage().nbytes() == 2


def test_moved_case_keeps_strides_and_sharing():
    case = _everything()
    moved = case.to("cpu")
    assert moved.problem == case.problem
    assert moved.inputs.q.data_ptr() != case.inputs.q.data_ptr()
    assert {n: t.stride() for n, t in moved.tensors().items()} == {
        n: t.stride() for n, t in case.tensors().items()
    }
    assert moved.to_bytes() == case.to_bytes()


def test_a_view_of_a_huge_buffer_stores_only_what_it_touches():
    buffer = torch.zeros(3_000_000)
    far = [buffer[at : at + 80].view(1, 10, 1, 8) for at in (0, 1_000_000, 2_900_000)]
    case = Case.of(Spec(), Inputs(q=far[0], k=far[1], v=far[2]), far[0])
    assert len(case.to_bytes()) < 4000


def test_what_lies_between_the_elements_is_kept():
    buffer = _noise(1, 6, 2, 16)
    q = buffer[..., :8]
    found = Case.from_bytes(Case.of(Spec(), Inputs(q=q, k=q, v=q), q).to_bytes())
    whole = found.inputs.q.as_strided((11, 16), (16, 1), found.inputs.q.storage_offset())
    assert torch.equal(whole, buffer.view(12, 16)[:11])


def test_requires_grad_is_not_in_the_way():
    q = _noise(1, 3, 1, 4).requires_grad_()
    found = Case.from_bytes(Case.of(Spec(), Inputs(q=q, k=q, v=q), q.detach()).to_bytes())
    assert torch.equal(found.inputs.q, q)


def test_nan_and_signed_zero_survive():
    q = torch.tensor([float("nan"), -0.0, float("inf"), -float("inf")]).view(1, 1, 1, 4)
    found = Case.from_bytes(Case.of(Spec(), Inputs(q=q, k=q, v=q), q).to_bytes()).inputs.q
    assert torch.equal(found.view(torch.int32), q.view(torch.int32))


def test_an_unfinished_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "case.safetensors"
    _packed().save(path)
    before = path.read_bytes()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        _thd().save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["case.safetensors"]


def test_machine_facts_are_provenance():
    case = replace(_packed(), provenance=machine_facts() | {"layer": 7})
    found = Case.from_bytes(case.to_bytes()).provenance
    assert found["torch"] == torch.__version__
    assert found["layer"] == 7
    assert found["processor"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": _noise(2, 5, 3, 8), "v": _noise(2, 5, 3, 8)}, "multiple of num_gqa_groups"),
        ({"k": _noise(3, 5, 4, 8), "v": _noise(3, 5, 4, 8)}, "k's batch is 3, expected 2"),
        ({"k": _noise(2, 5, 4, 9)}, "k's last dim is 9, expected 8"),
        ({"v": _noise(2, 6, 4, 8)}, r"v's places is \(2, 6\), expected \(2, 5\)"),
        ({"v": _noise(2, 5, 4, 8, dtype=torch.float16)}, "v is torch.float16"),
        ({"q": _noise(5, 4, 8)}, r"q has shape \[5, 4, 8\], expected 4 dims"),
        ({"bias": _noise(1, 1, 5, 5)}, "bias is given"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, "cu_seqlens_q is given"),
        ({"softmax_offset": _noise(4)}, "softmax_offset is given"),
        ({"dout": _noise(2, 5, 4, 7)}, r"dout is torch.float32 \[2, 5, 4, 7\], expected"),
        ({"dlse": _noise(2, 4, 5)}, "expected a Spec with lse_grad"),
    ],
)
def test_tensors_that_contradict(change, message):
    q = _noise(2, 5, 4, 8)
    given = {"q": q, "k": q, "v": q, "dout": q} | change
    dout, dlse = given.pop("dout"), given.pop("dlse", None)
    with pytest.raises(InvalidProblem, match=message):
        Case.of(Spec(), Inputs(**given), dout, dlse)


@pytest.mark.parametrize(
    "provenance", [{"a": 1.5}, {"a": True}, {"a": None}, {"a": ["x"]}, {1: "x"}]
)
def test_provenance_is_texts_and_ints(provenance):
    with pytest.raises(InvalidProblem, match="provenance has"):
        replace(_packed(), provenance=provenance)


def test_problem_must_be_that_of_the_tensors():
    case = _packed()
    with pytest.raises(InvalidProblem, match="its tensors say"):
        replace(case, problem=replace(case.problem, seqlen_q=6))
