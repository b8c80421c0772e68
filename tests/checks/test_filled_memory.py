"""Filled memory: what it fills, that it stops, and the allocator for CUDA on a runtime that is a stand-in."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch

from gradtruth.verify.memory import allocator, filled
from gradtruth.verify.memory.allocator import FillingPool, compile_allocator, filling_pool
from gradtruth.verify.memory.filled import filled_memory
from gradtruth.verify.memory.operators import EmptyFilled, Guarding

CPU = torch.device("cpu")
FRESH = {
    "empty": lambda like: torch.empty(3, 5),
    "empty_like": torch.empty_like,
    "new_empty": lambda like: like.new_empty(7),
    "empty_strided": lambda like: torch.empty_strided((3, 5), (7, 1)),
    "new_empty_strided": lambda like: like.new_empty_strided((3, 5), (7, 1)),
    "empty_permuted": lambda like: torch.empty_permuted((3, 5), (1, 0)),
}


def byte_of_malloc(size=8192):
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    block = libc.malloc(size)
    found = ctypes.cast(block, ctypes.POINTER(ctypes.c_ubyte))[size // 2]
    libc.free(block)
    return found


@pytest.mark.parametrize("name", FRESH)
@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_what_torch_makes_empty_holds_the_byte(name, byte):
    with filled_memory(CPU, byte) as how:
        made = FRESH[name](torch.ones(3, 5))
    storage = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
    assert storage.numel() >= made.numel() * 4
    assert (storage == byte).all()
    assert "every tensor made empty" in how.words
    assert how.nothing == ""


def test_malloc_holds_it_in_the_block_and_not_behind_it():
    with filled_memory(CPU, 0x00, operators=False) as how:
        assert byte_of_malloc() == 0x00
    with filled_memory(CPU, 0xFF, operators=False):
        assert byte_of_malloc() == 0xFE
        assert byte_of_malloc(20 << 20) == 0xFE  # would be a fresh mapping, and 0
    assert how.words == "malloc"
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    with filled_memory(CPU, 0x33, operators=False):
        block = libc.malloc(8192)
    # The block is over: what is freed keeps its bytes, which filling at a free would change.
    libc.free(block)
    assert (ctypes.c_ubyte * 8192).from_address(block)[4096] == 0x33


def test_a_system_without_mallopt_says_what_was_left(monkeypatch):
    monkeypatch.setattr(filled.ctypes, "CDLL", lambda _: object())
    with filled_memory(CPU, 0xFF) as how:
        assert torch.empty(3).isnan().all()
    assert how.words == "every tensor made empty"
    with filled_memory(CPU, 0xFF, operators=False) as how:
        pass
    assert how.nothing == "malloc of this system cannot be told to fill"


# ---------------------------------------------------------------- the allocator

RUNTIME = """
#include <stdlib.h>
#include <string.h>
static int allocated = 0, refuse = 0;
int cudaMalloc(void **p, size_t n) { if (refuse) return 2; ++allocated; *p = malloc(n); return 0; }
int cudaFree(void *p) { --allocated; free(p); return 0; }
int cudaMemset(void *p, int b, size_t n) { memset(p, b, n); return 0; }
int cudaMemsetAsync(void *p, int b, size_t n, void *s) { memset(p, b, n); return s != NULL; }
int cudaDeviceSynchronize(void) { return 0; }
int living(void) { return allocated; }
void set_refuse(int value) { refuse = value; }
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """A CUDA runtime made of malloc."""
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "runtime.c").write_text(RUNTIME)
    target = folder / "libcudart.so"
    compiler = shutil.which("cc")
    subprocess.run(
        [compiler, "-shared", "-fPIC", str(folder / "runtime.c"), "-o", str(target)], check=True
    )
    return str(target)


def test_the_allocator_fills_frees_and_says_when_there_is_no_room(runtime):
    path, reason = compile_allocator()
    assert reason == ""
    own, cuda = ctypes.CDLL(path), ctypes.CDLL(runtime)
    assert own.gradtruth_open(b"/nowhere/libcudart.so") == 1
    assert own.gradtruth_open(runtime.encode()) == 0
    own.gradtruth_alloc.restype = ctypes.c_void_p
    own.gradtruth_alloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    own.gradtruth_free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    own.gradtruth_fill.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    own.gradtruth_byte(0xA7)
    block = own.gradtruth_alloc(1000, 0, None)
    assert bytes((ctypes.c_ubyte * 1000).from_address(block)) == b"\xa7" * 1000
    assert own.gradtruth_fill(block, 0x12, 10, None) == 0
    assert bytes((ctypes.c_ubyte * 12).from_address(block)) == b"\x12" * 10 + b"\xa7" * 2
    assert cuda.living() == 1
    own.gradtruth_free(block, 1000, 0, None)
    assert cuda.living() == 0
    cuda.set_refuse(1)
    assert own.gradtruth_alloc(1000, 0, None) is None
    cuda.set_refuse(0)


def test_only_free_blocks_are_filled_again(monkeypatch, runtime):
    path, _ = compile_allocator()
    ctypes.CDLL(path).gradtruth_open(runtime.encode())
    memory = (ctypes.c_ubyte * 64)()
    start = ctypes.addressof(memory)
    blocks = [
        {"size": 16, "state": "active_allocated"},
        {"size": 8, "state": "inactive"},
        {"size": 24, "state": "active_pending_free"},
        {"size": 16, "state": "inactive"},
    ]

    class Pool:
        def __init__(self, given):
            self.given = given

        def snapshot(self):
            return [{"address": start, "stream": 0, "blocks": blocks}]

    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    freed = 5
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats_as_nested_dict",
        lambda _: {"active": {"all": {"freed": freed}}},
    )
    monkeypatch.setattr(allocator, "_allocator", lambda library: library)
    pool = FillingPool(path, 0xFF)
    pool.refill(CPU)
    filled = b"\0" * 16 + b"\xff" * 8 + b"\0" * 24 + b"\xff" * 16
    assert bytes(memory) == filled
    memory[20] = 1  # nothing was freed since, so nothing free was in use
    pool.refill(CPU)
    assert memory[20] == 1
    freed = 6
    pool.refill(CPU)
    assert bytes(memory) == filled


def test_what_is_missing_is_a_reason(monkeypatch):
    monkeypatch.setattr(allocator, "_cuda_runtime", lambda: None)
    assert filling_pool(0) == "no CUDA runtime library is loaded"
    monkeypatch.setattr(allocator, "_cuda_runtime", lambda: "/nowhere/libcudart.so")
    assert filling_pool(0) == "/nowhere/libcudart.so has no cudaMalloc"
    monkeypatch.setattr(allocator, "compile_allocator", lambda: (None, "no C compiler is found"))
    assert filling_pool(0) == "no C compiler is found"


def test_without_a_compiler_there_is_no_allocator(monkeypatch):
    monkeypatch.setattr(allocator.shutil, "which", lambda _: None)
    assert compile_allocator.__wrapped__() == (None, "no C compiler is found")
    monkeypatch.setattr(allocator.shutil, "which", lambda _: "/bin/false")
    path, reason = compile_allocator.__wrapped__()
    assert path is None
    assert reason.startswith("/bin/false says")


# ---------------------------------------------------------------- guards


def test_fresh_tensors_lie_between_bands_and_hold_what_they_held():
    guarding = Guarding()
    with guarding:
        made = {
            "zeros": torch.zeros(3, 5),
            "full": torch.full((2,), 7, dtype=torch.int64),
            "ones_like": torch.ones_like(torch.zeros(4, dtype=torch.bfloat16)),
            "none": torch.empty(0),
        }
        made["sum"] = made["zeros"] + 1
    assert made["full"].tolist() == [7, 7]
    assert made["ones_like"].tolist() == [1.0] * 4
    assert len(guarding.made) == 4  # not the sum, and not the one without elements
    assert guarding.written(made) == []
    beside = torch.as_strided(made["full"], (1,), (1,), made["full"].storage_offset() + 2)
    beside.fill_(3)
    before = torch.as_strided(made["zeros"], (1,), (1,), made["zeros"].storage_offset() - 1)
    before.fill_(3.0)
    assert guarding.written(made) == [("zeros", 4, (3, 5)), ("full", 8, (2,))]
    assert guarding.written({}) == [(None, 4, (3, 5)), (None, 8, (2,))]


@pytest.mark.parametrize("mode", [lambda: EmptyFilled(0xFF), Guarding], ids=["filled", "guarding"])
def test_compiled_code_stays_compiled_under_the_modes_and_after_them(mode):
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph

    def attend(x, y):
        scratch = torch.empty_like(x)
        return scratch.copy_(x) @ y

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend=compiler)
    x = torch.eye(4)
    with mode():
        assert torch.equal(compiled(x, 2 * x), 2 * x)
        assert len(graphs) == 1
        assert torch.equal(compiled(x, 3 * x), 3 * x)
    assert torch.equal(compiled(x[:3], x), x[:3])
    assert len(graphs) == 2
    torch.compiler.reset()
