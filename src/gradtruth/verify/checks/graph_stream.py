"""graph_stream: a captured graph, a side stream and another current device give what a plain call gives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradtruth.core.tensors import Inputs
from gradtruth.verify.checks.again import again, same
from gradtruth.verify.checks.check import Check, Judged, NotClaimed, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import unanswered
from gradtruth.verify.findings import Kind
from gradtruth.verify.trial import Given, as_called, wanted_of

__all__ = ["GRAPH_STREAM"]

_LIVE = ("q", "k", "v", "dout")


def _run(subject: Subject) -> Iterator[Judged | NotReached | NotClaimed]:
    """A graph was replayed with lengths that no longer matched; kernels were launched on the wrong device.

    sgl-project/sgl-flash-attn#47, Dao-AILab/flash-attention#54. The call is made on a side stream, with another device
    current, with an error at every wait of the host, and from a captured graph that is replayed with new data in place.
    """
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    found = [*_side_stream(subject), *_other_device(subject)]
    yield from found or [Judged(detail=("a side stream and the current device change nothing",))]
    for claim, ask in (("no_sync", _waits), ("graph_capturable", _graph)):
        if getattr(subject.claims, claim):
            yield from ask(subject)
        else:
            yield NotClaimed(f"{claim}: it is not promised")


def _side_stream(subject: Subject) -> Iterator[Judged]:
    """On a stream of its own, with the inputs made there."""
    stream = torch.cuda.Stream(subject.case.device)
    stream.wait_stream(torch.cuda.current_stream(subject.case.device))
    with torch.cuda.stream(stream):
        run = subject.run()
    stream.synchronize()
    yield from again(subject, run, "the first run, on a side stream")


def _other_device(subject: Subject) -> Iterator[Judged]:
    count, own = torch.cuda.device_count(), subject.case.device.index or 0
    if count > 1:
        with torch.cuda.device((own + 1) % count):
            run = subject.run()
        yield from again(subject, run, "the first run, with another device current")


def _waits(subject: Subject) -> Iterator[Judged]:
    """PyTorch raises where the host waits for the device."""
    given = as_called(subject.case, subject.case.to(subject.case.device).tensors())
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _call(subject, given)
    except RuntimeError as error:
        text = f"the host waits for the device: {error}".splitlines()[0]
        yield Judged(kind=Kind.RAISED, breaks="no_sync", detail=(text,))
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _graph(subject: Subject) -> Iterator[Judged]:
    """Capture both halves on static tensors of other values, then replay with the case's."""
    case = subject.case
    static = case.to(case.device).tensors()
    live = [name for name in _LIVE if _is_distinct(static[name])]
    for name in live:
        static[name].neg_()
    given = as_called(case, static)
    graph = torch.cuda.CUDAGraph()
    try:
        stream = torch.cuda.Stream(case.device)
        stream.wait_stream(torch.cuda.current_stream(case.device))
        with torch.cuda.stream(stream):
            _call(subject, given)
        stream.synchronize()
        with torch.cuda.graph(graph):
            captured = _call(subject, given)
    except Exception as error:  # noqa: BLE001 - that it cannot be captured is the finding
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        yield Judged(kind=Kind.RAISED, breaks="graph_capturable", detail=(f"capture: {text}",))
        return
    # What the call was given: a copy where the last dim is not contiguous.
    places = {**dict(given.inputs.items()), "dout": given.dout}
    for name in live:
        places[name].copy_(case.tensors()[name])
    for tensor in captured.values():
        tensor.zero_()
    graph.replay()
    torch.cuda.synchronize(case.device)
    expected = {name: x for name, x in subject.first.tensors.items() if name in captured}
    yield from same(subject, captured, expected, "the first run, from a replayed graph")


def _is_distinct(tensor: Tensor) -> bool:
    """No two elements share memory, so it can be written."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return all(stride != 0 or size <= 1 for size, stride in pairs)


def _call(subject: Subject, given: Given) -> dict[str, Tensor]:
    """Both halves, straight from the backend."""
    case, backend = subject.case, subject.backend
    inputs: Inputs = given.inputs
    with torch.no_grad():
        forward = backend.forward(case.problem, inputs)
        grads = backend.backward(
            case.problem, inputs, forward, given.dout, given.dlse, wanted_of(case)
        )
    return {"out": forward.out, "lse": forward.lse, **dict(grads.items())}


GRAPH_STREAM = Check("graph_stream", _run, device="cuda")
