"""The first call of a new length compiles nothing: what Triton would specialise on is the same for all lengths."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Forward, Inputs, Wanted

LENGTHS = ((1040, 1024), (17, 2064), (999, 1001), (2, 16), (1, 1), (5, 3))
KERNELS = {"forward", "rows", "backward_keys", "backward_queries"}


def specialised(s: int, t: int, spec: Spec, processors: int) -> set[tuple]:
    """A key for each launch of a forward and backward: alignments, strides that are 1 or multiples of 16, constants."""
    from gradtruth.backends.triton import arguments, compiled, launch
    from gradtruth.backends.triton.schedule import tiles_for

    thd, found = spec.layout == "thd", set()
    q, k, v = (
        torch.zeros((n, h, 48) if thd else (2, n, h, 48), dtype=torch.bfloat16)
        for n, h in ((s, 6), (t, 3), (t, 3))
    )
    cu = torch.tensor([0, 1, 2], dtype=torch.int32) if thd else None
    inputs = Inputs(q=q, k=k, v=v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    problem = Problem.of(spec, inputs)
    tiles = tiles_for(problem, large=True)

    def record(kernel, programs, tensors, strides, numbers, constants):
        function = kernel._function
        names = function.arg_names[len(tensors) :]
        free = function.do_not_specialize
        # Numbers come after the strides; none of them may be specialised on.
        late = names[len(strides) : len(strides) + len(numbers)]
        whole = [n for n, x in zip(late, numbers, strict=True) if isinstance(x, int)]
        assert set(whole) <= set(free), set(whole) - set(free)
        found.add(
            (
                function.__name__,
                tuple(x.data_ptr() % 16 == 0 for x in tensors),
                tuple(
                    (n, x == 1, x % 16 == 0)
                    for n, x in zip(names, strides, strict=False) if n not in free
                ),
                str(constants),
            )
        )  # fmt: skip

    with ExitStack() as stack:
        stack.enter_context(patch.object(compiled.Kernel, "__call__", record))
        stack.enter_context(patch.object(arguments, "schedule", lambda *_: tiles))
        stack.enter_context(patch.object(arguments, "processors", lambda _: processors))
        forward = launch.attend(problem, inputs)
        given = Forward(out=forward.out, lse=forward.lse)
        launch.differentiate(problem, inputs, given, q, None, Wanted())
    return found


@pytest.mark.parametrize(
    "spec", [Spec(right=0), Spec(layout="thd", lengths="cu_seqlens"), Spec(max_logit=True)], ids=str
)
def test_lengths_are_not_specialised_on(spec):
    first = specialised(1024, 1024, spec, 0)
    assert {key[0] for key in first} >= KERNELS
    for s, t in LENGTHS:
        assert specialised(s, t, spec, 0) == first, (s, t)


def test_small_grids_add_one_variant_at_most():
    """Where work is shared out another kernel runs: with parts and without are all that there can be."""
    seen: dict[str, set] = {}
    for s, t in ((1024, 1024), *LENGTHS):
        for key in specialised(s, t, Spec(right=0), 132):
            seen.setdefault(key[0], set()).add(key)
    assert {name: len(keys) for name, keys in seen.items() if len(keys) > 2} == {}
