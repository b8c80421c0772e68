"""graph_stream: a captured graph, a side stream and another current device give what a plain call gives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradtruth.core.tensors import Inputs
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import bits, differences, unanswered
from gradtruth.verify.findings import Kind
from gradtruth.verify.trial import wanted_of

__all__ = ["GRAPH_STREAM"]

_LIVE = ("q", "k", "v", "dout")


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """A graph was replayed with lengths that no longer matched; kernels were launched on the wrong device.

    sgl-project/sgl-flash-attn#47, Dao-AILab/flash-attention#54.
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    yield from _side_stream(subject)
    yield from _other_device(subject)
    if subject.claims.graph_capturable:
        yield from _graph(subject)


def _side_stream(subject: Subject) -> Iterator[Judged]:
    stream = torch.cuda.Stream(subject.case.device)
    stream.wait_stream(torch.cuda.current_stream(subject.case.device))
    with torch.cuda.stream(stream):
        run = subject.run()
    stream.synchronize()
    yield from _same(subject, run.tensors, "the first run, on a side stream")


def _other_device(subject: Subject) -> Iterator[Judged]:
    count, own = torch.cuda.device_count(), subject.case.device.index or 0
    if count > 1:
        with torch.cuda.device((own + 1) % count):
            run = subject.run()
        yield from _same(subject, run.tensors, "the first run, with another device current")


def _graph(subject: Subject) -> Iterator[Judged]:
    """Capture both halves on static tensors of other values, then replay with the case's."""
    case, backend = subject.case, subject.backend
    static = {name: tensor.clone() for name, tensor in case.tensors().items()}
    for name in _LIVE:
        static[name].neg_()
    dout, dlse = static["dout"], static.get("dlse")
    inputs = Inputs(**{name: x for name, x in static.items() if name not in ("dout", "dlse")})

    def call() -> dict[str, Tensor]:
        forward = backend.forward(case.problem, inputs)
        grads = backend.backward(case.problem, inputs, forward, dout, dlse, wanted_of(case))
        return {"out": forward.out, "lse": forward.lse, **dict(grads.items())}

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad():
            stream = torch.cuda.Stream(case.device)
            with torch.cuda.stream(stream):
                call()
            stream.synchronize()
            with torch.cuda.graph(graph):
                captured = call()
    except Exception as error:  # noqa: BLE001 - that it cannot be captured is the finding
        text = f"{type(error).__name__}: {error}"
        yield Judged(kind=Kind.RAISED, breaks="graph_capturable", detail=(f"capture: {text}",))
        return
    for name in _LIVE:
        static[name].copy_(case.tensors()[name])
    for tensor in captured.values():
        tensor.zero_()
    graph.replay()
    torch.cuda.synchronize(case.device)
    yield from _same(subject, captured, "the first run, from a replayed graph")


def _same(subject: Subject, found: dict[str, Tensor], what: str) -> Iterator[Judged]:
    first = subject.first.tensors
    values = list(differences(subject, found, first, what))
    yield from values
    if not values and subject.claims.deterministic:
        yield from bits(found, first, what, "pure")


GRAPH_STREAM = Check("graph_stream", _run, device="cuda")
