"""Replay: what a script of the form "check" calls."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gradtruth.backends import get
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import named
from gradtruth.verify.engine import find
from gradtruth.verify.minimise.finding import Calls
from gradtruth.verify.minimise.memory import with_memory

__all__ = ["replay"]


def replay(
    backend: str,
    check: str,
    expected: tuple[str | None, str],
    calls: Sequence[Mapping[str, Any] | str | os.PathLike[str]],
    device: str = "cpu",
    memory: int | None = None,
) -> int:
    """Ask a check about a backend and print what it finds.

    Args:
        backend: its name.
        check: its name.
        expected: the tensor and the kind of fault that should be found.
        calls: case files, or tensors by name with "spec" (its string) and "bounds" (max_seqlen of queries and keys);
            the last one is judged, the others are made before.
        device: where.
        memory: the byte that fresh memory holds in every call; None as the allocator hands it out.

    Returns:
        1 where the fault is found, else 0.
    """
    *preceding, case = _cases(calls, device)
    asked = with_memory(get(backend), memory)
    found = find(case, asked, named((check,))[0], preceding=tuple(preceding))
    for answer in found:
        print(answer.tensor, answer.kind, *answer.detail)  # noqa: T201 - a script's output
    wrong = any((answer.tensor, answer.kind) == expected for answer in found)
    print("WRONG" if wrong else "right")  # noqa: T201
    return int(wrong)


def _cases(calls: Sequence[Mapping[str, Any] | str | os.PathLike[str]], device: str) -> Calls:
    return tuple(
        (_case(call) if isinstance(call, Mapping) else Case.load(Path(call))).to(
            torch.device(device)
        )
        for call in calls
    )


def _case(given: Mapping[str, Any]) -> Case:
    tensors = dict(given)
    spec, bounds = Spec.decode(tensors.pop("spec")), tensors.pop("bounds")
    dout, dlse = tensors.pop("dout"), tensors.pop("dlse", None)
    return Case.of(spec, Inputs(**tensors), dout, dlse, max_seqlen=bounds)
