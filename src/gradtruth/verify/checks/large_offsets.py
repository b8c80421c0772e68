"""large_offsets: elements past 2^31 of a tensor are found where they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks.check import Check, Judged, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.variants import variant
from gradtruth.verify.checks.verdicts import differences
from gradtruth.verify.findings import Kind
from gradtruth.verify.suite.families import noise
from gradtruth.verify.trial import wanted_of

__all__ = ["LARGE_OFFSETS"]

_ROWS, _STRIDE = 200, 11_000_000
_NEEDED = 12 << 30  # bytes


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """Offsets were multiplied in 32 bits: a batch of 8,300 was non-finite, a seq-major key cache an illegal access.

    Dao-AILab/flash-attention#2260, pytorch/pytorch#190857. A few rows lie 11 million elements apart.
    """
    device = subject.case.device
    if torch.cuda.mem_get_info(device)[0] < _NEEDED:
        yield NotReached("less than 12 GiB of the device are free")
        return
    # Some take no mask only, some causal ones only.
    forms = [_case(subject.case, spec) for spec in (Spec(), Spec(right=0))]
    reasons = [subject.supports(form) for form in forms]
    if None not in reasons:
        yield NotReached(reasons[0] or "")
        return
    compact = forms[reasons.index(None)]
    key = f"large_offsets {compact.problem.label()}"
    own = Subject(compact, subject.backend, subject.standard.derived(key, compact))
    if own.first.error is not None:
        yield NotReached(f"the compact call raised {own.first.error}")
        return
    for name in ("q", "k", "v", "dout"):
        try:
            found = _apart(own, name)
        except torch.OutOfMemoryError as error:
            yield NotReached(f"{name} apart does not fit: {error}")
            return
        except Exception as error:  # noqa: BLE001 - that it raises is the finding
            text = f"{name} apart: {type(error).__name__}: {error}"
            yield Judged(kind=Kind.RAISED, detail=(text,))
            return
        if isinstance(found, str):
            yield NotReached(f"{name} apart: {found}")
            continue
        yield from differences(own, found, own.first.tensors, f"compact tensors, with {name} apart")


def _case(case: Case, spec: Spec) -> Case:
    shape, dtype = (1, _ROWS, 1, 64), case.problem.torch_dtype
    q, k, v, dout = (noise(at, *shape, device=case.device).to(dtype) for at in range(1, 5))
    return Case.of(spec, Inputs(q=q, k=k, v=v), dout)


def _apart(own: Subject, name: str) -> dict[str, Tensor] | str:
    """The call with the rows of one tensor far apart, straight to the backend, for a copy would be compact.

    A text where the backend refuses it.
    """
    like = own.case.tensors()[name]
    last = like.shape[-1]
    buffer = torch.empty(_STRIDE * (_ROWS - 1) + last, dtype=like.dtype, device=like.device)
    view = buffer.as_strided(like.shape, (_STRIDE * _ROWS, _STRIDE, last, 1)).copy_(like)
    case, backend = variant(own.case, {name: view}), own.backend
    refusal = own.supports(case)
    if refusal is not None:
        return refusal
    with torch.no_grad():
        forward = backend.forward(case.problem, case.inputs)
        grads = backend.backward(
            case.problem, case.inputs, forward, case.dout, None, wanted_of(case)
        )
    torch.cuda.synchronize(case.device)
    return {"out": forward.out, "lse": forward.lse, **dict(grads.items())}


LARGE_OFFSETS = Check("large_offsets", _run, quick=False, device="cuda", once=True)
