"""A trial: one run of one half of a backend, on tensors of its own, with what it did wrong beside numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradtruth.backends.protocol import Backend, ReadsContent
from gradtruth.core.layout import empty_like_query, empty_lse
from gradtruth.core.support import Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted
from gradtruth.verify.cases import storage
from gradtruth.verify.cases.case import Case
from gradtruth.verify.same_bits import all_same_bits

__all__ = [
    "Given",
    "Trial",
    "as_called",
    "run_backward",
    "run_forward",
    "support_of",
    "wanted_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a run returned.

    Attributes:
        returned: what the backend returned; None when it raised.
        tensors: its tensors by name, those of the right shape, dtype and device.
        wrong: per tensor what is wrong with it in words; the name is that of an input that was written, or of a
            result that is missing or of the wrong form.
        error: the exception in words.
        seconds: time of the run, device included.
    """

    returned: Forward | Grads | None = None
    tensors: dict[str, Tensor]
    wrong: dict[str, str]
    error: str | None = None
    seconds: float


def wanted_of(case: Case) -> Wanted:
    """All gradients that the case has."""
    has_bias = case.inputs.bias is not None
    return Wanted(dbias=has_bias, dsoftmax_offset=case.problem.spec.softmax == "learnable")


def run_forward(case: Case, backend: Backend) -> Trial:
    """Run the forward."""
    found = _run(case, lambda given: backend.forward(case.problem, given.inputs))
    return _checked(found, _forward_like(case))


def run_backward(case: Case, backend: Backend, forward: Forward) -> Trial:
    """Run the backward from this forward."""
    wanted = wanted_of(case)

    def call(given: Given) -> Grads:
        own = replace(forward, out=forward.out.clone(), lse=forward.lse.clone())
        return backend.backward(case.problem, given.inputs, own, given.dout, given.dlse, wanted)

    return _checked(_run(case, call), _grads_like(case))


@dataclass(frozen=True, slots=True)
class Given:
    """Tensors for one run.

    Attributes:
        inputs, dout, dlse: as a backend gets them.
    """

    inputs: Inputs
    dout: Tensor
    dlse: Tensor | None


def _run(case: Case, call: Callable[[Given], Forward | Grads]) -> Trial:
    """Call on copies of the case's tensors, and see afterwards whether they were written."""
    bases, views = storage.split(case.tensors())
    copies = {name: base.clone() for name, base in bases.items()}
    given = as_called(case, storage.join(copies, views))
    start = time.perf_counter()
    try:
        with torch.no_grad():
            returned = call(given)
        tensors = dict(_items(returned))
        if case.device.type == "cuda":
            torch.cuda.synchronize(case.device)
    except Exception as error:  # noqa: BLE001 - that it raises is a finding, whatever it raises
        text = f"{type(error).__name__}: {error}"
        return Trial(tensors={}, wrong={}, error=text, seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    kept = all_same_bits((base, copies[name]) for name, base in bases.items())
    wrong = {
        name: "the backend wrote its input"
        for name, unchanged in zip(bases, kept, strict=True)
        if not unchanged
    }
    return Trial(returned=returned, tensors=tensors, wrong=wrong, seconds=seconds)


def as_called(case: Case, tensors: dict[str, Tensor]) -> Given:
    """The tensors as the library hands them to backends: a last dim that is not contiguous is copied.

    Args:
        case: whose problem says so.
        tensors: those of ``case.tensors()``, or copies of them.
    """
    tensors = dict(tensors)
    for name in ("q", "k", "v"):
        if not case.problem.stride_class(name).unit:
            tensors[name] = tensors[name].contiguous()
    dout, dlse = tensors.pop("dout"), tensors.pop("dlse", None)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    return Given(Inputs(**tensors), dout, dlse)


def _items(returned: Forward | Grads) -> Iterator[tuple[str, Tensor]]:
    if isinstance(returned, Grads):
        yield from returned.items()
        return
    yield "out", returned.out
    yield "lse", returned.lse
    if returned.max_logit is not None:
        yield "max_logit", returned.max_logit


def _forward_like(case: Case) -> dict[str, Tensor]:
    q, problem = case.inputs.q.to("meta"), case.problem
    like = {
        "out": empty_like_query(q, problem.head_dim_v),
        "lse": empty_lse(q, problem.layout),
    }
    if problem.spec.max_logit:
        like["max_logit"] = torch.empty(problem.num_heads, dtype=torch.float32, device="meta")
    return like


def _grads_like(case: Case) -> dict[str, Tensor]:
    inputs, wanted = case.inputs, wanted_of(case)
    like = {f"d{name}": getattr(inputs, name) for name in ("q", "k", "v")}
    if wanted.dbias and inputs.bias is not None:
        like["dbias"] = inputs.bias
    if wanted.dsoftmax_offset and inputs.softmax_offset is not None:
        like["dsoftmax_offset"] = inputs.softmax_offset
    return like


def _checked(trial: Trial, like: dict[str, Tensor]) -> Trial:
    """The trial with tensors of the wrong form moved to ``wrong``."""
    if trial.error is not None:
        return trial
    wrong, right = dict(trial.wrong), {}
    for name, expected in like.items():
        found = trial.tensors.get(name)
        if found is None:
            wrong[name] = f"{name} is missing"
        elif found.shape != expected.shape or found.dtype != expected.dtype:
            wrong[name] = (
                f"{name} is {found.dtype} {list(found.shape)}, "
                f"expected {expected.dtype} {list(expected.shape)}"
            )
        else:
            right[name] = found
    return replace(trial, tensors=right, wrong=wrong)


def support_of(case: Case, backend: Backend) -> Support:
    """What speaks against the problem, or else against these tensors."""
    support = backend.supports(case.problem, case.device)
    if support.ok and isinstance(backend, ReadsContent):
        return backend.supports_content(case.problem, case.inputs)
    return support
