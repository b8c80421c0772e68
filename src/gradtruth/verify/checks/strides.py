"""strides: views give what copies give, for each tensor on its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Run, Subject
from gradtruth.verify.checks.variants import variant
from gradtruth.verify.checks.verdicts import differences
from gradtruth.verify.findings import Kind
from gradtruth.verify.suite.arrangement import arrange_dout

__all__ = ["STRIDES"]

_NAMES = ("q", "k", "v", "dout")
_WAYS = ("other_layout", "wide")
_EXPANDED = (("k", "v"), ("dout",))
_Moved = tuple[str, dict[str, Tensor | None]]


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """A dO with other strides than O gave wrong gradients; slices of a packed projection were read as contiguous.

    Dao-AILab/flash-attention#355, NVIDIA/TransformerEngine#1195. Each of q, k, v and dout alone as the transposed view
    of the other layout and as the middle of longer rows; all as every second row; q, k and v as slices of one
    projection; k and v, and dout, with one head expanded to all; dout as one row expanded to all, the gradient of a
    sum over tokens and heads.
    """
    case = subject.case
    dense = _dense(case)
    refusal = subject.supports(dense)
    expected = None if refusal is not None else subject.run(dense)
    if expected is None or expected.error is not None:
        reason = refusal or f"the call on copies raised {expected and expected.error}"
        yield NotReached(f"it takes no contiguous tensors: {reason}")
        return
    for what, moved in _moved(dense):
        yield from _compared(subject, variant(dense, moved), expected, what)
    for what, moved in _expanded(dense):
        part = variant(dense, moved)
        if subject.supports(part) is not None:
            continue
        copies = _copied(dense, moved)
        own = Subject(copies, subject.backend, subject.standard.derived(_key(what), copies))
        yield from _compared(own, part, own.run(copies), what)


def _dense(case: Case) -> Case:
    return variant(case, {name: _tensor(case, name).contiguous() for name in _NAMES})


def _copied(dense: Case, moved: dict[str, Tensor | None]) -> Case:
    """The same values, contiguous."""
    return variant(dense, {n: None if x is None else x.contiguous() for n, x in moved.items()})


def _moved(dense: Case) -> Iterator[_Moved]:
    """The same values lying in other ways."""
    for way in _WAYS:
        for name in _NAMES:
            yield f"{way} {name}", {name: arrange_dout(_tensor(dense, name), way)}
    rows: dict[str, Tensor | None] = {
        name: arrange_dout(_tensor(dense, name), "second_row") for name in _NAMES
    }
    yield f"second_row {', '.join(_NAMES)}", rows
    q, k, v = (_tensor(dense, name) for name in ("q", "k", "v"))
    if q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1] == v.shape[-1]:
        heads = [q.shape[-2], k.shape[-2], v.shape[-2]]
        slices = torch.cat([q, k, v], -2).split(heads, -2)
        yield "slices of one projection", dict(zip(("q", "k", "v"), slices, strict=True))
    elif k.shape == v.shape:
        pair = torch.stack([k, v], -2).unbind(-2)
        yield "slices of one projection of k and v", dict(zip(("k", "v"), pair, strict=True))


def _expanded(dense: Case) -> Iterator[_Moved]:
    """Other values: one head, or one element, seen as many."""
    for names in _EXPANDED:
        if _tensor(dense, names[0]).shape[-2] > 1:
            moved: dict[str, Tensor | None] = {
                name: arrange_dout(_tensor(dense, name), "expanded_heads") for name in names
            }
            yield f"expanded_heads {', '.join(names)}", moved
    if dense.dout.numel():
        # With the last dim expanded too, the library makes a copy.
        row = dense.dout.flatten(0, -2)[0].clone()
        yield "one row expanded to all of dout", {"dout": row.expand(dense.dout.shape)}


def _compared(subject: Subject, part: Case, expected: Run, what: str) -> Iterator[Judged]:
    """A call on views against one on copies."""
    if subject.supports(part) is not None or expected.error is not None:
        return
    run = subject.run(part)
    what = f"contiguous copies, with {what}"
    if run.error is not None:
        yield Judged(kind=Kind.RAISED, detail=(f"{what}: {run.error}",))
        return
    yield from differences(subject, run.tensors, expected.tensors, what)


def _tensor(case: Case, name: str) -> Tensor:
    return case.dout if name == "dout" else getattr(case.inputs, name)


def _key(what: str) -> str:
    return f"strides {what}"


def _derived(case: Case) -> dict[str, Case]:
    dense = _dense(case)
    return {_key(what): _copied(dense, moved) for what, moved in _expanded(dense)}


STRIDES = Check("strides", _run, derived=_derived)
