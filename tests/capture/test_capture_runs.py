"""Captures of whole runs: layers, steps, ranks, budgets, calls without a backward, checkpoints, our own calls."""

import gc
import logging
import sys

import pytest
import torch
from tests.capture.captured import bits, cases, index, only_case, results, same
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradtruth
from gradtruth.backends import get
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import named
from gradtruth.verify.engine import verify_case
from gradtruth.verify.findings import Row, Verdict


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24, dtype=torch.float64)

    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.transpose(1, 2).flatten(2)


class Net(nn.Module):
    """``way`` is a function that runs a block."""

    def __init__(self, layers=3, way=lambda block, x: block(x)):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.way = way

    def forward(self, x):
        for block in self.blocks:
            x = self.way(block, x)
        return x


def _batch(seed=0):
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _train(net, steps, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        net(_batch(step).requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _where(lines):
    return [(line["layer"], line["step"], line["call"]) for line in lines]


def test_layers_and_steps(tmp_path):
    with gradtruth.capture(tmp_path, layer="blocks.1,2", step="0,2-:2") as captured:
        _train(Net(), 5)
    # A backward goes from the last layer to the first.
    expected = [(f"blocks.{n}", step, 0) for step in (0, 2, 4) for n in (2, 1)]
    lines = index(tmp_path)
    assert _where(lines) == expected
    assert captured.tally.unselected == 3
    assert captured.step_number == 5
    for line, path in zip(lines, captured.files, strict=True):
        case = Case.load(path)
        assert line == {
            "file": path.name, "layer": case.provenance["layer"], "step": case.provenance["step"],
            "call": 0, "rank": None, "entry": "torch.nn.functional.scaled_dot_product_attention",
            "problem": "b2 s5 h2/2 d4 fp64 bshd causal", "dout": "captured",
            "bytes": path.stat().st_size, "id": case.id,
        }  # fmt: skip
    assert sum(line["bytes"] for line in lines) == sum(p.stat().st_size for p in captured.files)


def test_what_was_captured_is_what_was_computed(tmp_path):
    torch.manual_seed(0)
    net, seen = Net(2), {}
    block = net.blocks[1].qkv
    block.register_forward_hook(lambda _m, _i, out: seen.update(qkv=out.detach().clone()))
    block.register_full_backward_hook(lambda _m, _i, grads: seen.update(dqkv=grads[0].clone()))
    with gradtruth.capture(tmp_path, layer="blocks.1") as captured:
        net(_batch().requires_grad_()).square().mean().backward()
    case = only_case(captured)
    found = results(case)
    for n, name in enumerate("qkv"):
        bits(getattr(case.inputs, name), seen["qkv"].unflatten(-1, (3, 2, 4))[:, :, n])
        same(found[f"d{name}"], seen["dqkv"].unflatten(-1, (3, 2, 4))[:, :, n])
    events = verify_case(case, [get("reference")], name="x", checks=named(("values",)))
    rows = [event for event in events if isinstance(event, Row)]
    assert rows
    assert {row.verdict for row in rows} == {Verdict.RIGHT}


def test_calls_of_a_step_are_numbered(tmp_path):
    net = Net(1)
    with gradtruth.capture(tmp_path, call="1") as captured:
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(2):
            for micro in range(3):
                net(_batch(micro)).sum().backward()
            optimizer.step()
    assert _where(index(tmp_path)) == [("blocks.0", 0, 1), ("blocks.0", 1, 1)]
    assert captured.tally.unselected == 4


def test_the_first_optimizer_counts_steps(tmp_path):
    net = Net(2)
    one, other = (torch.optim.SGD(block.parameters()) for block in net.blocks)
    with gradtruth.capture(tmp_path, layer=0) as captured:
        for _ in range(2):
            net(_batch()).sum().backward()
            one.step()
            other.step()
    assert [line["step"] for line in index(tmp_path)] == [0, 1]
    assert captured.step_number == 2


def test_steps_by_hand(tmp_path):
    net = Net(1)
    optimizer = torch.optim.SGD(net.parameters())
    with gradtruth.capture(tmp_path, step="1") as captured:
        for _ in range(3):
            net(_batch()).sum().backward()
            captured.step()
            optimizer.step()
    assert [line["step"] for line in index(tmp_path)] == [1]
    net(_batch()).sum().backward()
    optimizer.step()
    assert captured.step_number == 3, "nothing is counted after the end"
    assert len(captured.files) == 1


def test_max_cases(tmp_path, caplog):
    with gradtruth.capture(tmp_path, max_cases=4) as captured:
        _train(Net(), 3)
    assert len(captured.files) == len(index(tmp_path)) == 4
    assert captured.tally.dropped == {"max_cases is 4": 5}
    assert "dropped 5: max_cases is 4" in captured.summary()
    (record,) = [r for r in caplog.records if r.name == "gradtruth"]
    assert record.levelno == logging.WARNING
    assert "dropped 5" in record.getMessage()


def test_max_bytes(tmp_path):
    with gradtruth.capture(tmp_path / "a") as free:
        _train(Net(), 1)
    size = max(path.stat().st_size for path in free.files)
    with gradtruth.capture(tmp_path / "b", max_bytes=2 * size) as captured:
        _train(Net(), 1)
    assert len(captured.files) == 2
    assert sum(path.stat().st_size for path in (tmp_path / "b").glob("*.safetensors")) <= 2 * size
    ((limit, count),) = captured.tally.dropped.items()
    assert limit.startswith("max_bytes is ")
    assert count == 1


def test_a_small_case_still_fits_after_a_large_one_did_not(tmp_path):
    small, large = (torch.randn(1, 1, n, 4, requires_grad=True) for n in (2, 2000))
    with gradtruth.capture(tmp_path, max_bytes="20kB") as captured:
        for x in (large, small):
            F.scaled_dot_product_attention(x, x, x).sum().backward()
    assert only_case(captured).problem.seqlen_q == 2
    assert sum(captured.tally.dropped.values()) == 1


def test_the_summary_stays_in_the_folder(tmp_path):
    import json

    for _ in range(2):
        with gradtruth.capture(tmp_path, max_cases=1) as captured:
            _train(Net(2), 1)
    lines = [json.loads(line) for line in (tmp_path / "summary.jsonl").read_text().splitlines()]
    assert lines[0] == lines[1]
    assert lines[0]["cases"] == 1
    assert lines[0]["dropped"] == {"max_cases is 1": 1}
    assert captured.files[0].name.endswith(".2.safetensors"), "the first was not written over"


# ---------------------------------------------------------------- no backward


def _forwards():
    net = Net(1)
    with torch.no_grad():
        net(_batch(1))
    net(_batch(2))  # differentiable, and dropped
    gc.collect()
    kept = net(_batch(3))
    net(_batch(4)).sum().backward()
    return kept


def test_calls_without_a_backward_are_counted(tmp_path):
    with gradtruth.capture(tmp_path) as captured:
        kept = _forwards()
    assert len(captured.files) == 1
    assert captured.tally.skipped == {"no backward came": 3}
    kept.sum().backward()
    assert len(captured.files) == 1, "after the end nothing is captured"


def test_calls_without_a_backward_can_be_saved(tmp_path):
    with gradtruth.capture(tmp_path, forward_only=True) as captured:
        kept = _forwards()
    assert kept.requires_grad
    lines = index(tmp_path)
    made = [line for line in lines if line["dout"] != "captured"]
    assert (len(lines), len(made)) == (4, 3)
    assert {line["dout"] for line in made} == {"made: noise of seed 0, no backward came"}
    douts = [case.dout for case in cases(captured) if case.provenance["dout"] != "captured"]
    assert all(torch.equal(dout, douts[0]) for dout in douts)
    assert 0.5 < douts[0].std() < 2
    for case in cases(captured):
        results(case)


def test_the_inputs_of_a_dead_graph_are_let_go(tmp_path):
    with gradtruth.capture(tmp_path) as captured:
        q = torch.randn(1, 1, 3, 4, requires_grad=True)
        k = q * 2
        out = F.scaled_dot_product_attention(q, k, k)
        memory = StorageWeakRef(k.untyped_storage())
        del out, k
        gc.collect()
        assert memory.expired()
    assert captured.tally.skipped == {"no backward came": 1}


def test_inputs_that_were_written_to_are_not_saved(tmp_path):
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    mask = torch.zeros(3, 3)
    with gradtruth.capture(tmp_path) as captured:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        mask.fill_(-5)
        out.sum().backward()
    assert captured.files == []
    assert captured.tally.skipped == {"an input was written to between forward and backward": 1}


def test_only_the_first_of_several_backwards(tmp_path):
    q = torch.randn(1, 1, 3, 4, requires_grad=True, dtype=torch.float64)
    with gradtruth.capture(tmp_path) as captured:
        out = F.scaled_dot_product_attention(q, q, q)
        out.backward(torch.full_like(out, 2), retain_graph=True)
        out.backward(torch.full_like(out, 3))
    assert set(only_case(captured).dout.flatten().tolist()) == {2.0}


def _crash(folder):
    with gradtruth.capture(folder):
        Net(1)(_batch()).sum().backward()
        assert len(list(folder.glob("*.safetensors"))) == len(index(folder)) == 1
        raise ZeroDivisionError


def test_a_case_is_there_before_a_crash_and_everything_is_put_back_after(tmp_path):
    before = F.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError):
        _crash(tmp_path)
    assert F.scaled_dot_product_attention is before
    Net(1)(_batch()).sum().backward()
    assert len(index(tmp_path)) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(tmp_path, reentrant):
    def way(block, x):
        return checkpoint(block, x, use_reentrant=reentrant)

    plain, net = Net(), Net(way=way)
    net.load_state_dict(plain.state_dict())
    with gradtruth.capture(tmp_path / "plain") as expected:
        _train(plain, 2)
    with gradtruth.capture(tmp_path / "checkpointed") as captured:
        _train(net, 2)
    assert [p.name for p in captured.files] == [p.name for p in expected.files]
    for found, wanted in zip(cases(captured), cases(expected), strict=True):
        for name, tensor in wanted.tensors().items():
            bits(found.tensors()[name], tensor)
    assert not +captured.tally.skipped


def test_disk_trouble_does_not_end_the_run(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with gradtruth.capture(tmp_path) as captured:
        monkeypatch.setattr("pathlib.Path.write_bytes", full)
        _train(Net(1), 1)
    ((reason, count),) = captured.tally.skipped.items()
    assert "No space left on device" in reason
    assert count == 1
    assert captured.files == []
    assert not list(tmp_path.glob("*.safetensors"))


# ---------------------------------------------------------------- ranks, roots, provenance


def test_the_rank_of_a_process_group(tmp_path, monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a process group puts one of its own
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with gradtruth.capture(tmp_path, rank="0") as captured:
            _train(Net(1), 1)
        with gradtruth.capture(tmp_path, rank="1-") as none:
            _train(Net(1), 1)
    finally:
        dist.destroy_process_group()
    assert captured.files[0].name == "rank00000-step000000-blocks.0-call0.safetensors"
    assert only_case(captured).provenance["rank"] == 0
    assert none.files == []
    assert none.tally.unselected == 1


def test_a_rank_that_is_told(tmp_path):
    with gradtruth.capture(tmp_path, this_rank=3, rank="2-3") as captured:
        _train(Net(1), 1)
    assert index(tmp_path)[0]["rank"] == 3
    assert captured.files[0].name.startswith("rank00003-")


def test_root_and_provenance(tmp_path):
    net, other = Net(1), Net(2)
    facts = {"run": "nightly", "seed": 7}
    with gradtruth.capture(tmp_path, root=net, provenance=facts, prefix="n") as captured:
        other(_batch()).sum().backward()
        net(_batch()).sum().backward()
    case = only_case(captured)
    assert facts.items() <= case.provenance.items()
    assert case.provenance["torch"] == torch.__version__
    assert captured.files[0].name == "n-step000000-blocks.0-call0.safetensors"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"this_rank": -1}, "this_rank is -1"),
        ({"provenance": {"a": 1.5}}, "provenance has 'a': 1.5"),
        ({"functions": ["nowhere:f"]}, "nowhere"),
        ({"max_bytes": "much"}, "max_bytes is 'much'"),
        ({"step": "later"}, "step is 'later'"),
    ],
)
def test_bad_arguments(tmp_path, given, message):
    with pytest.raises(InvalidProblem, match=message):
        gradtruth.capture(tmp_path, **given)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with gradtruth.capture(None) as captured:
        _train(Net(2), 2)
    assert list(tmp_path.iterdir()) == []
    assert [
        (one.index, one.layer, one.calls, one.differentiable)
        for one in captured.tally.seen.values()
    ] == [(0, "blocks.0", 2, 2), (1, "blocks.1", 2, 2)]
    assert "blocks.1" in captured.tally.table()


def test_nothing_matches(tmp_path):
    with gradtruth.capture(tmp_path, layer="*.attention") as captured:
        _train(Net(2), 1)
    assert "layers seen: blocks.0, blocks.1" in captured.summary()


# ---------------------------------------------------------------- ours


def _ours(*heads, seed=0):
    return [
        torch.randn(2, 5, n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + at))
        .requires_grad_() for at, n in enumerate(heads)
    ]  # fmt: skip


def test_attention_with_everything(tmp_path):
    q, k, v = _ours(4, 2, 2)
    bias = torch.randn(1, 4, 5, 5, dtype=torch.float64).requires_grad_()
    sink = torch.randn(4, dtype=torch.float64).requires_grad_()
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    options = {
        "attn_mask_type": "padding_causal_bottom_right", "cu_seqlens_q": cu, "cu_seqlens_kv": cu, "softcap": 3.0,
        "bias": bias, "softmax_type": "learnable", "softmax_offset": sink, "dropout_p": 0.3, "dropout_seed": 5,
        "max_seqlen_q": 5,
    }  # fmt: skip
    with gradtruth.capture(tmp_path) as captured:
        out, lse = gradtruth.attention_with_lse(q, k, v, **options)
        (out.square().sum() + lse.masked_fill(lse.isinf(), 0).sum()).backward()
    case = only_case(captured)
    found = results(case)
    assert case.dlse is not None
    assert case.problem.max_seqlen_q == 5
    for name, leaf in zip(
        ("dq", "dk", "dv", "dbias", "dsoftmax_offset"), (q, k, v, bias, sink), strict=True
    ):
        same(found[name], leaf.grad)


def test_only_lse_gets_a_gradient(tmp_path):
    q, k, v = _ours(2, 2, 2)
    with gradtruth.capture(tmp_path) as captured:
        gradtruth.attention_with_lse(q, k, v)[1].sum().backward()
    case = only_case(captured)
    assert case.provenance["dout"] == "zeros: only lse got a gradient"
    same(results(case)["dq"], q.grad)


def test_the_module_and_its_packed_buffer(tmp_path):
    module = gradtruth.DotProductAttention(2, 4, qkv_format="bshd", attn_mask_type="causal")
    qkv = torch.randn(2, 5, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    with gradtruth.capture(tmp_path) as captured:
        module(*qkv.unbind(2)).sum().backward()
    case = only_case(captured)
    assert case.provenance["layer"] == "DotProductAttention"
    assert case.provenance["captured_from"] == "gradtruth.attention"
    assert case.inputs.q.untyped_storage().data_ptr() == case.inputs.v.untyped_storage().data_ptr()
    found = results(case)
    same(torch.stack([found["dq"], found["dk"], found["dv"]], 2), qkv.grad)


def test_the_explicit_pair(tmp_path):
    q, k, v = (x.detach() for x in _ours(2, 2, 2))
    dout = torch.ones_like(q)
    with gradtruth.capture(tmp_path) as captured:
        out, lse, _ = gradtruth.attention_forward(q, k, v, attn_mask_type="causal")
        grads = gradtruth.attention_backward(dout, q, k, v, out, lse, attn_mask_type="causal")
    case = only_case(captured)
    assert case.provenance["captured_from"] == "gradtruth.attention_backward"
    same(results(case)["dk"], grads[1])
    assert captured.tally.skipped == {"no backward came": 1}, "of the explicit forward"


def test_a_function_of_the_users(tmp_path):
    from tests.capture import users

    q, k, v = _ours(2, 2, 2)
    name = "tests.capture.users:attend"
    with gradtruth.capture(tmp_path, functions=[name]) as captured:
        users.attend(q, k, v, softmax_scale=0.3).sum().backward()
    case = only_case(captured)
    assert case.provenance["captured_from"] == name
    assert case.problem.spec.scale == 0.3
    same(results(case)["dq"], q.grad)


INNER = "tests.interception.borrowed:attend"  # calls F.scaled_dot_product_attention


def _inner(**selected):
    from tests.interception import borrowed

    q, k, v = _ours(2, 2, 2)
    with gradtruth.capture(selected.pop("folder"), functions=[INNER], **selected) as captured:
        borrowed.attend(q, k, v).sum().backward()
    return captured


def test_a_call_inside_another_one_is_part_of_that(tmp_path):
    assert [case.provenance["captured_from"] for case in cases(_inner(folder=tmp_path))] == [INNER]
    # One call was made, whatever it calls.
    none = _inner(folder=tmp_path / "none", call="1")
    assert (none.files, none.tally.calls, none.tally.unselected) == ([], 1, 1)


def test_a_call_inside_another_one_by_its_entry_point(tmp_path):
    captured = _inner(folder=tmp_path, entry="scaled_dot*", call="0")
    assert only_case(captured).provenance["captured_from"].endswith("scaled_dot_product_attention")
    assert captured.tally.other_entries == {INNER: 1}
    assert f"other entry points: {INNER} (1)" in captured.summary()


def test_two_captures_at_once(tmp_path):
    q, k, v = _ours(2, 2, 2)
    with gradtruth.capture(tmp_path / "a") as one, gradtruth.capture(tmp_path / "b") as other:
        gradtruth.attention(q, k, v).square().sum().backward()
    for name, tensor in only_case(one).tensors().items():
        bits(only_case(other).tensors()[name], tensor)
    same(results(only_case(one))["dq"], q.grad)
