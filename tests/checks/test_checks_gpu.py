"""The checks on memory and execution on a GPU: pool, graphs, streams, large offsets, launch limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.checks.small_cases import answers, dense, details, kinds, packed
from tests.checks.test_check_execution import ShortOffsets
from tests.mutants.wrap import Wrapped

from gradtruth.backends import get
from gradtruth.verify.checks.allocator_churn import ALLOCATOR_CHURN
from gradtruth.verify.checks.autograd_contract import AUTOGRAD_CONTRACT
from gradtruth.verify.checks.call_order import CALL_ORDER
from gradtruth.verify.checks.check import Judged, NotClaimed
from gradtruth.verify.checks.compile_equals_eager import COMPILE_EQUALS_EAGER
from gradtruth.verify.checks.determinism import DETERMINISM
from gradtruth.verify.checks.graph_stream import GRAPH_STREAM
from gradtruth.verify.checks.inputs_unchanged import INPUTS_UNCHANGED
from gradtruth.verify.checks.large_offsets import LARGE_OFFSETS
from gradtruth.verify.checks.launch_limits import LAUNCH_LIMITS
from gradtruth.verify.checks.outside_unchanged import OUTSIDE_UNCHANGED
from gradtruth.verify.checks.poisoned_memory import POISONED_MEMORY
from gradtruth.verify.checks.shielded import SHIELDED
from gradtruth.verify.checks.strides import STRIDES
from gradtruth.verify.memory.filled import filled_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALL = {
    check.name: check
    for check in (
        CALL_ORDER,
        POISONED_MEMORY,
        ALLOCATOR_CHURN,
        DETERMINISM,
        OUTSIDE_UNCHANGED,
        INPUTS_UNCHANGED,
        STRIDES,
        SHIELDED,
        AUTOGRAD_CONTRACT,
        COMPILE_EQUALS_EAGER,
        GRAPH_STREAM,
        LAUNCH_LIMITS,
        LARGE_OFFSETS,
    )
}


def found_wrong(case, backend, check):
    return [
        answer
        for answer in answers(case, backend, check)
        if isinstance(answer, Judged) and answer.kind
    ]


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("make", [dense, packed])
@pytest.mark.parametrize("own", ["reference", "unfused"])
def test_health_passes_on_the_gpu(check, make, own):
    assert found_wrong(make(device="cuda"), get(own), ALL[check]) == []


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_the_pool_fills_what_operators_allocate_inside(byte):
    device = torch.device("cuda", torch.cuda.current_device())
    with filled_memory(device, byte) as how:
        made = [torch.empty(n, dtype=torch.uint8, device=device) for n in (1, 5000, 3 << 20)]
        assert all(bool((x == byte).all()) for x in made)
        made[1].fill_(7)
        del made[1]
        # Freed and dirty: filled again before the next operator, whoever allocates in it.
        torch.cuda._sleep(1)
        again = torch.ops.aten.empty.memory_format([5000], dtype=torch.uint8, device=device)
        assert bool((again == byte).all())
    assert how.words.startswith("every segment of a pool of its own")
    with filled_memory(device, byte, operators=False):
        # No dispatch mode: only the pool can have filled it.
        assert bool((torch.empty(5 << 20, dtype=torch.uint8, device=device) == byte).all())


class ReadsFresh(Wrapped):
    """Adds what a fresh block holds to dk; ``resize_`` allocates without any empty operator."""

    def change_backward(self, found, inputs, forward, dout):
        scratch = torch.zeros(0, dtype=torch.uint8, device=found.dk.device)
        scratch.resize_(4 << 20)
        return replace(found, dk=found.dk + scratch[1 << 20].to(found.dk.dtype))


def test_scratch_that_no_empty_operator_made_is_poisoned():
    found = details(dense(device="cuda"), ReadsFresh(), POISONED_MEMORY)
    assert found
    assert "every segment of a pool" in found[0]


class GapsLeftAsTheyWere(Wrapped):
    def change_backward(self, found, inputs, forward, dout):
        dk = torch.empty_like(found.dk)
        dk[0:3], dk[4:9] = found.dk[0:3], found.dk[4:9]
        return replace(found, dk=dk)


def test_rows_that_are_not_written_are_found_on_the_gpu():
    assert kinds(packed(device="cuda"), GapsLeftAsTheyWere(), POISONED_MEMORY) == {("dk", "bits")}


def test_without_a_compiler_the_weaker_form_says_so(monkeypatch):
    monkeypatch.setattr(
        "gradtruth.verify.memory.allocator.compile_allocator", lambda: (None, "no C compiler")
    )
    found = details(packed(device="cuda"), GapsLeftAsTheyWere(), POISONED_MEMORY)
    assert found
    assert "the weaker form, freed blocks only: no C compiler" in found[0]


# ---------------------------------------------------------------- graph_stream


class WrongOnASideStream(Wrapped):
    def change_backward(self, found, inputs, forward, dout):
        side = torch.cuda.current_stream() != torch.cuda.default_stream()
        return replace(found, dq=found.dq * 2) if side else found


class Waits(Wrapped):
    def change_forward(self, found, problem, inputs):
        found.out.sum().item()
        return found


class KeepsTheScaleOfTheCapture(Wrapped):
    """What was read on the host stays in the graph."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def change_forward(self, found, problem, inputs):
        if not torch.cuda.is_current_stream_capturing():
            self.kept[inputs.q.data_ptr()] = float(inputs.q[0, 0, 0, 0])
        sign = 1.0 if self.kept[inputs.q.data_ptr()] > 0 else -1.0
        return replace(found, out=found.out * sign * inputs.q[0, 0, 0, 0].sign())


def test_a_side_stream_that_changes_the_result_is_found():
    found = details(dense(device="cuda"), WrongOnASideStream(), GRAPH_STREAM)
    assert any("on a side stream" in text for text in found)


def test_a_wait_of_the_host_is_found_where_none_is_promised():
    case = dense(device="cuda")
    found = details(case, Waits(), GRAPH_STREAM)
    assert any("the host waits for the device" in text for text in found)
    assert any("capture: " in text for text in found)
    unclaimed = Waits(no_sync=False, graph_capturable=False)
    assert kinds(case, unclaimed, GRAPH_STREAM) == set()
    said = [a.reason for a in answers(case, unclaimed, GRAPH_STREAM) if isinstance(a, NotClaimed)]
    assert said == ["no_sync: it is not promised", "graph_capturable: it is not promised"]


def test_data_that_a_graph_does_not_read_again_is_found():
    found = details(dense(device="cuda"), KeepsTheScaleOfTheCapture(), GRAPH_STREAM)
    assert any("from a replayed graph" in text for text in found)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_wrong_device_is_found():
    class CurrentDevice(Wrapped):
        def change_forward(self, found, problem, inputs):
            here = torch.cuda.current_device() == inputs.q.device.index
            return found if here else replace(found, out=found.out * 2)

    found = details(dense(device="cuda:0"), CurrentDevice(), GRAPH_STREAM)
    assert any("another device current" in text for text in found)


# ---------------------------------------------------------------- sizes


class Short32(ShortOffsets):
    limit = 1 << 31


def test_offsets_in_32_bits_are_found():
    found = details(dense(device="cuda"), Short32(), LARGE_OFFSETS)
    assert found
    assert all("with k apart" in text for text in found)


@pytest.mark.parametrize("dim", [0, 2])
def test_what_no_launch_covers_is_found(dim):
    class Past(Wrapped):
        def change_forward(self, found, problem, inputs):
            if found.out.shape[dim] > 65_535:
                found.out.narrow(dim, 65_535, found.out.shape[dim] - 65_535).zero_()
            return found

    assert kinds(dense(device="cuda"), Past(), LAUNCH_LIMITS) == {("out", "value")}


def test_a_call_that_depends_on_a_full_allocator_is_found(monkeypatch):
    emptied = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(1))

    class NeedsItsCache(Wrapped):
        def change_forward(self, found, problem, inputs):
            return replace(found, lse=found.lse + 1) if emptied else found

    found = details(dense(device="cuda"), NeedsItsCache(), ALLOCATOR_CHURN)
    assert found
    assert "after the allocator was emptied" in found[0]
