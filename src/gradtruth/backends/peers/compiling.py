"""compiling: how long this process has spent on making kernels, so that it can be told from running them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

__all__ = ["compiling", "compiling_seconds", "watch_compilers", "watch_cute"]

_CUTE = "cutlass.base_dsl.compiler"


class _Clock:
    """Adds up spans; one inside another counts once."""

    def __init__(self) -> None:
        self.seconds, self._depth, self._start = 0.0, 0, 0.0
        self.watching = False

    def enter(self, _: object = None) -> None:
        """A span begins."""
        if self._depth == 0:
            self._start = time.perf_counter()
        self._depth += 1

    def leave(self, _: object = None) -> None:
        """A span ends."""
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._start

    def add(self, seconds: float) -> None:
        """A span that is over."""
        if self._depth == 0:
            self.seconds += seconds


_CLOCK = _Clock()


@contextmanager
def compiling() -> Iterator[None]:
    """What runs inside makes kernels or plans."""
    _CLOCK.enter()
    try:
        yield
    finally:
        _CLOCK.leave()


def compiling_seconds() -> float:
    """Seconds so far: of ``compiling`` blocks, and of torch.compile, Triton and CuTe since ``watch_compilers``.

    What libraries compile or plan out of sight, in a C++ call, is not in it.
    """
    return _CLOCK.seconds


def watch_compilers(*, triton: bool) -> None:
    """Count what torch.compile does from now on, and Triton too where kernels of it may run. Once a process.

    Args:
        triton: import it and listen.
    """
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(_CLOCK.enter)
    callback_handler.register_end_callback(_CLOCK.leave)
    _CLOCK.watching = True
    if triton:
        _watch_triton()


def watch_cute() -> None:
    """Count what CuTe DSL compiles in a process that watches; call it where a library that uses it is imported."""
    compiler = getattr(sys.modules.get(_CUTE), "CompileCallable", None)
    if compiler is None or not _CLOCK.watching or hasattr(compiler.__call__, "__wrapped__"):
        return
    compile_ = compiler.__call__

    @wraps(compile_)
    def call(*arguments: Any, **options: Any) -> Any:
        with compiling():
            return compile_(*arguments, **options)

    compiler.__call__ = call


def _watch_triton() -> None:
    """Triton tells a listener what each compilation took, in microseconds."""
    try:
        from triton import knobs
    except ImportError:
        return

    def listener(*, times: Any, **_: Any) -> None:
        _CLOCK.add(times.total / 1e6)

    knobs.compilation.listener = listener
