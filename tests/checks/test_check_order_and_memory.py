"""call_order, poisoned_memory, allocator_churn, determinism: each passes health and finds its planted fault."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace

import pytest
import torch
from tests.checks.small_cases import answers, dense, details, kinds, packed, padded
from tests.mutants.wrap import Wrapped

from gradtruth.verify.checks.allocator_churn import ALLOCATOR_CHURN
from gradtruth.verify.checks.call_order import CALL_ORDER
from gradtruth.verify.checks.check import NotReached
from gradtruth.verify.checks.determinism import DETERMINISM
from gradtruth.verify.checks.poisoned_memory import POISONED_MEMORY

CHECKS = {
    check.name: check for check in (CALL_ORDER, POISONED_MEMORY, ALLOCATOR_CHURN, DETERMINISM)
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("make", [dense, packed, padded])
@pytest.mark.parametrize("own", ["reference", "unfused"])
def test_health_passes(check, make, own):
    assert answers(make(), Wrapped(own), CHECKS[check]) == []


@pytest.mark.parametrize("check", CHECKS)
def test_a_call_that_raises_leaves_nothing_to_compare(check):
    class Raises(Wrapped):
        def forward(self, problem, inputs):
            raise ValueError("no")

    (answer,) = answers(dense(), Raises(), CHECKS[check])
    assert isinstance(answer, NotReached)
    assert "ValueError: no" in answer.reason


# ---------------------------------------------------------------- call_order


class Kept(Wrapped):
    """Keeps a thing per key from its first call."""

    def __init__(self, key=lambda problem: (problem.batch, problem.num_heads), **claims):
        super().__init__(**claims)
        self.key, self.kept = key, {}


class PlanWithoutTheScale(Kept):
    def forward(self, problem, inputs):
        scale = self.kept.setdefault(inputs.q.shape, problem.scale)
        return super().forward(replace(problem, spec=replace(problem.spec, scale=scale)), inputs)


def test_a_plan_that_leaves_the_scale_out_of_its_key_is_found_by_the_call_after():
    found = details(dense(), PlanWithoutTheScale(), CALL_ORDER)
    assert found
    assert all("a call with another scale" in text for text in found)


class PlanWithoutTheDtype(Kept):
    def change_forward(self, found, problem, inputs):
        first = self.kept.setdefault(inputs.q.shape, problem.dtype)
        return found if problem.dtype == first else replace(found, lse=found.lse + 1)


def test_a_plan_that_leaves_the_dtype_out_of_its_key_is_found_by_the_call_after():
    found = details(dense(), PlanWithoutTheDtype(), CALL_ORDER)
    assert found
    assert all("a call with another dtype" in text for text in found)


class LseOfTheLastForward(Kept):
    """Right as long as every backward follows its own forward."""

    def forward(self, problem, inputs):
        self.last = super().forward(problem, inputs)
        return self.last

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        given = self.last if self.last.lse.shape == forward.lse.shape else forward
        return super().backward(problem, inputs, given, dout, dlse, wanted)


def test_a_half_that_reads_the_last_call_is_found_by_interleaving_only():
    case = dense()
    found = details(case, LseOfTheLastForward(), CALL_ORDER)
    assert found
    assert all("in the order" in text for text in found)
    assert ("dq", "value") in kinds(case, LseOfTheLastForward(), CALL_ORDER)


class Workspace(Wrapped):
    """dk and dv of a sequence without queries come from the call before."""

    kept = None

    def change_backward(self, found, inputs, forward, dout):
        if self.kept is not None and self.kept.shape == found.dk.shape:
            found.dk[0:3] = self.kept[4:7]
        self.kept = found.dk.clone()
        return found


def test_a_workspace_that_is_not_cleared_is_found_where_nothing_overwrites_it():
    assert ("dk", "value") in kinds(packed(), Workspace(), CALL_ORDER)


class LastBit(Wrapped):
    """From the second forward on the last bit of one element differs."""

    def change_forward(self, found, problem, inputs):
        if self.calls > 1:
            found.out.view(torch.int16)[0, 0, 0, 0] ^= 1
        return found


def test_one_bit_breaks_purity_where_it_is_claimed():
    assert ("out", "bits") in kinds(dense(), LastBit(), CALL_ORDER)
    assert kinds(dense(), LastBit(deterministic=False), CALL_ORDER) == set()
    assert kinds(dense(), LastBit(pure=False), CALL_ORDER) == set()


def test_an_error_in_a_later_call_is_a_finding():
    class RaisesLater(Wrapped):
        def change_forward(self, found, problem, inputs):
            if self.calls > 1:
                raise ValueError("stale handle")
            return found

    found = details(dense(), RaisesLater(), CALL_ORDER)
    assert found
    assert any("ValueError: stale handle" in text for text in found)


# ---------------------------------------------------------------- poisoned_memory


class GapsLeftAsTheyWere(Wrapped):
    """Rows of dk that no sequence owns are not written."""

    def change_backward(self, found, inputs, forward, dout):
        dk = torch.empty_like(found.dk)
        dk[0:3], dk[4:9] = found.dk[0:3], found.dk[4:9]
        return replace(found, dk=dk)


def test_rows_that_are_not_written_are_found():
    assert kinds(packed(), GapsLeftAsTheyWere(), POISONED_MEMORY) == {("dk", "bits")}


class ScratchOfMalloc(Wrapped):
    """Adds the content of memory that no operator made."""

    def change_backward(self, found, inputs, forward, dout):
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        libc.free.argtypes = (ctypes.c_void_p,)
        block = libc.malloc(8192)
        byte = ctypes.cast(block, ctypes.POINTER(ctypes.c_ubyte))[4096]
        libc.free(block)
        found.dv.add_(float(byte))
        return found


def test_memory_that_no_operator_made_is_poisoned_too():
    assert ("dv", "value") in kinds(dense(), ScratchOfMalloc(), POISONED_MEMORY)


class RefusesModes:
    """Raises under a dispatch mode, as some compiled operators do."""

    def forward(self, problem, inputs):
        if torch._C._len_torch_dispatch_stack():
            raise NotImplementedError("no rule for this mode")
        return super().forward(problem, inputs)


class HealthyWithoutModes(RefusesModes, Wrapped):
    pass


class FaultyWithoutModes(RefusesModes, ScratchOfMalloc):
    pass


def test_a_backend_that_runs_under_no_dispatch_mode_is_examined_without_it():
    assert kinds(dense(), HealthyWithoutModes(), POISONED_MEMORY) == set()
    assert ("dv", "value") in kinds(dense(), FaultyWithoutModes(), POISONED_MEMORY)


class TrustsMalloc(RefusesModes, Wrapped):
    def change_forward(self, found, problem, inputs):
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        libc.free.argtypes = (ctypes.c_void_p,)
        block = libc.malloc(8192)
        byte = ctypes.cast(block, ctypes.POINTER(ctypes.c_ubyte))[4096]
        libc.free(block)
        if byte == 0xFE:
            raise ValueError("corrupt plan")
        return found


def test_an_error_that_memory_causes_is_a_finding():
    assert kinds(dense(), TrustsMalloc(), POISONED_MEMORY) == {(None, "raised")}


def test_other_devices_are_not_reached(monkeypatch):
    monkeypatch.setattr("gradtruth.verify.checks.poisoned_memory.filled_memory", _as_if_on("xpu"))
    (answer,) = answers(dense(), Wrapped(), POISONED_MEMORY)
    assert answer == NotReached("memory of a xpu device cannot be filled")


def _as_if_on(kind):
    from gradtruth.verify.memory.filled import filled_memory

    return lambda device, byte, operators: filled_memory(
        torch.device(kind), byte, operators=operators
    )


# ---------------------------------------------------------------- allocator_churn


@pytest.fixture
def arena(monkeypatch):
    """The last block that was filled, as a caching allocator would hand it out again."""
    seen = []
    full = torch.full

    def recording(size, fill_value, **options):
        seen.append((fill_value, options.get("dtype")))
        return full(size, fill_value, **options)

    monkeypatch.setattr(torch, "full", recording)
    return seen


@pytest.mark.parametrize("half", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_half_that_reads_freed_blocks_of_one_dtype_is_found(arena, half, dtype):
    class ReadsFreed(Wrapped):
        def dirty(self):
            return [fill for fill, of in arena if of == dtype][-1:] or [0.0]

        def change_forward(self, found, problem, inputs):
            return found if half == "backward" else replace(found, out=found.out + self.dirty()[0])

        def change_backward(self, found, inputs, forward, dout):
            return found if half == "forward" else replace(found, dk=found.dk + self.dirty()[0])

    tensor = "out" if half == "forward" else "dk"
    assert (tensor, "nonfinite") in kinds(dense(), ReadsFreed(), ALLOCATOR_CHURN)


def test_blocks_are_freed_between_the_halves_too(arena):
    class MadeBetween(Wrapped):
        """Reads only what was freed since its forward."""

        def change_forward(self, found, problem, inputs):
            self.before = len(arena)
            return found

        def change_backward(self, found, inputs, forward, dout):
            # Of oracle and guard, none comes between; a churn does.
            dirty = arena[self.before :]
            return replace(found, dq=found.dq + dirty[-1][0]) if dirty else found

    assert ("dq", "nonfinite") in kinds(dense(), MadeBetween(), ALLOCATOR_CHURN)


# ---------------------------------------------------------------- determinism


def test_bits_that_change_are_found_where_they_are_promised():
    assert ("out", "bits") in kinds(dense(), LastBit(), DETERMINISM)
    assert kinds(dense(), LastBit(deterministic=False), DETERMINISM) == set()


def test_bits_that_change_only_under_load_are_found():
    idle = threading.active_count()

    class UnderLoad(Wrapped):
        def change_backward(self, found, inputs, forward, dout):
            if threading.active_count() > idle:
                found.dq.view(torch.int16)[0, 0, 0, 0] ^= 1
            return found

    found = details(dense(), UnderLoad(), DETERMINISM)
    assert found == ["1 of 1536 elements differ from the first run, in run 3 under load"]
    assert threading.active_count() == idle


def test_a_repetition_that_raises_is_found():
    class Once(Wrapped):
        def change_forward(self, found, problem, inputs):
            if self.calls > 1:
                raise ValueError("only once")
            return found

    assert kinds(dense(), Once(), DETERMINISM) == {(None, "raised")}
