"""Seconds of compiling: spans inside spans count once, and torch.compile is heard."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from gradtruth.backends.peers import compiling as module


@pytest.fixture
def clock(monkeypatch):
    made = module._Clock()
    monkeypatch.setattr(module, "_CLOCK", made)
    return made


def test_spans_add_up_and_one_inside_another_counts_once(clock, monkeypatch):
    now = iter([1.0, 4.0, 10.0, 10.5])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    with module.compiling(), module.compiling():
        clock.add(100.0)
    assert module.compiling_seconds() == 3.0
    with module.compiling():
        pass
    clock.add(2.0)
    assert module.compiling_seconds() == 5.5


def test_a_span_ends_where_compiling_fails(clock):
    with pytest.raises(KeyError), module.compiling():
        raise KeyError
    before = module.compiling_seconds()
    time.sleep(0.01)
    assert module.compiling_seconds() == before


def test_torch_compile_is_heard_and_its_calls_are_not(clock):
    from torch._dynamo.callback import callback_handler

    module.watch_compilers(triton=False)
    try:
        call = torch.compile(lambda x: x.sin() + 1, backend="eager")
        call(torch.ones(3))
        compiled = module.compiling_seconds()
        assert compiled > 0
        call(torch.ones(3))
        assert module.compiling_seconds() == compiled
    finally:
        callback_handler.remove_start_callback(clock.enter)
        callback_handler.remove_end_callback(clock.leave)
        torch.compiler.reset()


def test_what_cute_compiles_is_heard_once(clock, monkeypatch):
    class CompileCallable:
        def __call__(self, function, *, options=""):
            clock.now += 2.0
            return function, options

    clock.now = 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    monkeypatch.setitem(
        sys.modules, "cutlass.base_dsl.compiler", SimpleNamespace(CompileCallable=CompileCallable)
    )
    module.watch_cute()
    assert CompileCallable()("f", options="-O3") == ("f", "-O3")
    assert module.compiling_seconds() == 0.0, "nobody watches"
    clock.watching = True
    module.watch_cute()
    module.watch_cute()
    assert CompileCallable()("f", options="-O3") == ("f", "-O3")
    assert module.compiling_seconds() == 2.0
