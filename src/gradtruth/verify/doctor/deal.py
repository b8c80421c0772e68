"""A deal: calls that several threads take in order, each as soon as it may begin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Deal"]


def _at_once() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class _Call:
    """What is to be called, when it may begin, and where its result goes."""

    call: Callable[[], Any]
    may_begin: Callable[[], bool]
    future: Future[Any] = field(default_factory=Future)


class Deal:
    """Calls in order, dealt to threads; one that may not begin yet keeps no thread from a later one.

    A condition may change only where a call ends. Use as a context: leaving it waits for what has begun.

    Args:
        threads: how many calls at once.
    """

    def __init__(self, threads: int) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Call] = []
        self._closed = False
        # Nobody waits for them where a call never ends.
        self._threads = [
            threading.Thread(target=self._take, daemon=True) for _ in range(max(1, threads))
        ]

    def add(self, call: Callable[[], Any], may_begin: Callable[[], bool] = _at_once) -> Future[Any]:
        """Put a call at the end.

        Args:
            call: without arguments.
            may_begin: asked whenever a thread is free, one thread at a time; what it allows begins.
        """
        made = _Call(call, may_begin)
        with self._changed:
            self._waiting.append(made)
            self._changed.notify()
        return made.future

    def __enter__(self) -> Deal:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(cancel=kind is not None)
        if kind is None:
            for thread in self._threads:
                thread.join()

    def close(self, *, cancel: bool) -> None:
        """Nothing is added any more.

        Args:
            cancel: what has not begun does not begin.
        """
        with self._changed:
            self._closed = True
            dropped = self._waiting if cancel else []
            self._waiting = [] if cancel else self._waiting
            self._changed.notify_all()
        for call in dropped:
            call.future.cancel()
            call.future.set_running_or_notify_cancel()  # only this wakes who waits for it

    def _take(self) -> None:
        while (call := self._next()) is not None:
            try:
                result = call.call()
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
                call.future.set_exception(error)
            else:
                call.future.set_result(result)
            with self._changed:
                self._changed.notify_all()

    def _next(self) -> _Call | None:
        """The first call that may begin; None where none will."""
        with self._changed:
            while True:
                for call in self._waiting:
                    if call.may_begin():
                        self._waiting.remove(call)
                        call.future.set_running_or_notify_cancel()
                        return call
                if self._closed and not self._waiting:
                    return None
                self._changed.wait()
