"""A backend whose fresh memory holds a known byte: what it reads before it writes is the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from gradtruth.backends import Backend
from gradtruth.backends.protocol import ReadsContent
from gradtruth.core.problem import Problem
from gradtruth.core.support import Claims, Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted
from gradtruth.verify.memory.filled import Filled, filled_memory

__all__ = ["BYTES", "CLEAN", "with_memory"]

BYTES = (0x3C, 0xFF)
"""Finite in every float type, then NaN."""
CLEAN = 0x00


def with_memory(backend: Backend, byte: int | None) -> Backend:
    """The backend, in calls of which every fresh allocation holds this byte; itself for None."""
    if byte is None:
        return backend
    kind = _FilledReading if isinstance(backend, ReadsContent) else _Filled
    return kind(backend, byte)


class _Filled:
    """Calls within filled memory; what they return is copied out of it."""

    def __init__(self, inner: Backend, byte: int) -> None:
        self.name, self._inner, self._byte = inner.name, inner, byte
        self._kept: list[Filled] = []  # their pools hold what the backend keeps between calls

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """The backend's answer."""
        return self._inner.supports(problem, device)

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """The backend's."""
        return self._inner.claims(problem, device)

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """The backend's, in filled memory."""
        return self._call(inputs.q.device, lambda: self._inner.forward(problem, inputs))

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """The backend's, in filled memory."""

        def call() -> Grads:
            return self._inner.backward(problem, inputs, forward, dout, dlse, wanted)

        return self._call(dout.device, call)

    def _call(self, device: torch.device, call: Callable[[], Any]) -> Any:
        with filled_memory(device, self._byte) as how:
            self._kept.append(how)
            found = call()
        copies = {
            field.name: value.clone()
            for field in fields(found)
            if isinstance(value := getattr(found, field.name), Tensor)
        }
        return replace(found, **copies)


class _FilledReading(_Filled):
    """Of a backend that reads lengths before it says whether it takes them."""

    def supports_content(self, problem: Problem, inputs: Inputs) -> Support:
        """The backend's answer."""
        inner = self._inner
        return (
            inner.supports_content(problem, inputs)
            if isinstance(inner, ReadsContent)
            else Support(())
        )
