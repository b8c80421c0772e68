"""Small cases that the checks on memory and execution are tried on."""

from __future__ import annotations

import torch

from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import Subject
from gradtruth.verify.engine import find
from gradtruth.verify.standard import Standard
from gradtruth.verify.suite.noise import noise


def _tensors(dtype, device, *shapes):
    return (noise(at, *shape, device=device).to(dtype) for at, shape in enumerate(shapes, start=1))


def dense(dtype=torch.bfloat16, device="cpu", batch=2, lse_grad=False, s=12):
    """[2, 12, 4/2, 16], causal: every place belongs to a sequence."""
    wide, narrow = (batch, s, 4, 16), (batch, s, 2, 16)
    q, k, v, dout = _tensors(dtype, device, wide, narrow, narrow, wide)
    dlse = noise(9, batch, 4, s, device=device).float() if lse_grad else None
    return Case.of(Spec(right=0, lse_grad=lse_grad), Inputs(q=q, k=k, v=v), dout, dlse)


def packed(device="cpu"):
    """thd, two sequences with gaps and a tail; the first has keys and no queries."""
    q, k, v, dout = _tensors(
        torch.float16, device, (12, 4, 16), (12, 2, 16), (12, 2, 16), (12, 4, 16)
    )

    def cu(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    lengths = {
        "cu_seqlens_q": cu(0, 0, 5),
        "cu_seqlens_kv": cu(0, 3, 8),
        "cu_seqlens_q_padded": cu(0, 2, 10),
        "cu_seqlens_kv_padded": cu(0, 4, 11),
    }
    spec = Spec(layout="thd", lengths="cu_seqlens")
    return Case.of(spec, Inputs(q=q, k=k, v=v, **lengths), dout)


def padded():
    """bshd, lengths 9 and 4 of 12."""
    case = dense(torch.float32)
    lengths = torch.tensor([0, 9, 13], dtype=torch.int32)
    inputs = Inputs(
        q=case.inputs.q,
        k=case.inputs.k,
        v=case.inputs.v,
        cu_seqlens_q=lengths,
        cu_seqlens_kv=lengths,
    )
    return Case.of(Spec(lengths="cu_seqlens"), inputs, case.dout)


def kinds(case, backend, check):
    """(tensor, kind) of everything found."""
    return {(answer.tensor, str(answer.kind)) for answer in find(case, backend, check)}


def details(case, backend, check):
    """The words of everything found."""
    return [answer.detail[0] for answer in find(case, backend, check)]


def answers(case, backend, check):
    """Every answer, findings or not."""
    return list(check.run(Subject(case, backend, Standard(case))))
