"""strides: views give what copies give, for each tensor on its own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.variants import variant
from gradtruth.verify.checks.verdicts import differences
from gradtruth.verify.findings import Kind
from gradtruth.verify.suite.arrangement import arrange_dout

__all__ = ["STRIDES"]

_NAMES = ("q", "k", "v", "dout")
_WAYS = ("other_layout", "second_row", "wide")


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """A dO with other strides than O gave wrong gradients; slices of a packed projection were read as contiguous.

    Dao-AILab/flash-attention#355, NVIDIA/TransformerEngine#1195.
    """
    case = subject.case
    dense = variant(case, {name: _tensor(case, name).contiguous() for name in _NAMES})
    if subject.supports(dense) is not None:
        yield NotReached("it takes no contiguous tensors")
        return
    expected = subject.run(dense)
    if expected.error is not None:
        yield NotReached(f"the call on copies raised {expected.error}")
        return
    for way in _WAYS:
        for names in ((name,) for name in _NAMES) if way != "second_row" else (_NAMES,):
            moved: dict[str, Tensor | None] = {
                name: arrange_dout(_tensor(dense, name), way) for name in names
            }
            part = variant(dense, moved)
            if subject.supports(part) is not None:
                continue
            run = subject.run(part)
            what = f"contiguous copies, with {way} {', '.join(names)}"
            if run.error is not None:
                yield Judged(kind=Kind.RAISED, detail=(f"{what}: {run.error}",))
                continue
            yield from differences(subject, run.tensors, expected.tensors, what)


def _tensor(case: Case, name: str) -> Tensor:
    return case.dout if name == "dout" else getattr(case.inputs, name)


STRIDES = Check("strides", _run)
