"""Explicit: ``gradtruth.attention_backward`` and what is built on it, where one call brings everything."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

import gradtruth.calls
from gradtruth.core.layout import split_packed
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.verify.interception.call import Meaning
from gradtruth.verify.interception.layers import Layers
from gradtruth.verify.interception.patches import Patches

__all__ = ["ENTRY", "Explicit"]

ENTRY = "gradtruth.attention_backward"

OnBackward = Callable[[str, Meaning, Tensor, Tensor | None], None]


class Explicit:
    """While open, tells of every explicit backward: layer, what it is the backward of, dout and dlse.

    Args:
        on_backward: gets them before the call is made.
        root: only calls made by modules of this model.
    """

    def __init__(self, on_backward: OnBackward, root: torch.nn.Module | None = None) -> None:
        self._on_backward, self._layers = on_backward, Layers(root)
        self._patches = Patches()

    def open(self) -> None:
        """Replace the function that all of them call, where they do."""
        original = gradtruth.calls.attend_backward

        @wraps(original)
        def call(plan: Any, options: tuple, tensors: tuple, *rest: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._tell(options, tensors, rest)
            return original(plan, options, tensors, *rest)

        self._patches.put(gradtruth.calls, "attend_backward", call)

    def close(self) -> None:
        """Put it back."""
        self._patches.undo()

    def _tell(self, options: tuple, tensors: tuple, rest: tuple) -> None:
        layer = self._layers.current()
        if layer is None:
            return
        _, dout, dlse, _ = rest
        max_q, max_kv, text, _ = options
        spec = Spec.decode(text)
        inputs = Inputs(*split_packed(spec.packing, *tensors[:3]), *tensors[3:])
        problem = Problem.of(spec, inputs, max_q, max_kv)
        self._on_backward(layer, Meaning(problem, inputs, known_dropout=True), dout, dlse)
