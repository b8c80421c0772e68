"""A script that shows a finding: it makes the inputs, runs the backend, prints wrong beside right, and exits with 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gradtruth.backends import Backend
from gradtruth.backends.peers.keywords import keywords_of, unsayable
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.cases.provenance import installed_version
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.findings import Kind
from gradtruth.verify.minimise.finding import Calls, Finding
from gradtruth.verify.minimise.literal import expression, helpers_of
from gradtruth.verify.standard import Standard

__all__ = ["FORMS", "MOST_LINES", "Form", "script"]

Form = Literal["torch", "attention", "check"]
FORMS: tuple[Form, ...] = ("torch", "attention", "check")
"""What a script calls: torch alone, ``gradtruth.attention_forward`` and ``_backward``, or the check itself."""

MOST_LINES = 29
_WIDTH = 118
_SDPA = {
    "sdpa_math": "MATH",
    "sdpa_flash": "FLASH_ATTENTION",
    "sdpa_efficient": "EFFICIENT_ATTENTION",
    "sdpa_cudnn": "CUDNN_ATTENTION",
}
_VALUES = (Kind.VALUE, Kind.NONFINITE, Kind.NOT_ZERO)
_RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsoftmax_offset")
_LEAVES = ("out", "dq", "dk", "dv")
_TRANSPOSED = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}


def script(
    case: Case,
    backend: Backend,
    finding: Finding,
    *,
    preceding: Sequence[Case] = (),
    form: Form = "attention",
    files: Sequence[str] = (),
    name: str | None = None,
) -> str:
    """A Python file of fewer than 30 lines.

    It exits with 1 where the fault shows and with 0 where it does not. In the forms "torch" and "attention" the
    right values stand in the script, and the fault shows where an element is further from them than halfway between
    what a healthy computation of that precision is and what the backend was when this was called.

    Args:
        case: the judged call.
        backend: that is wrong; it is run once.
        finding: what is wrong.
        preceding: calls made before.
        form: what the script calls; see ``FORMS``. "torch" is for scaled_dot_product_attention.
        files: names of case files beside the script, preceding ones first: the tensors are read from them; for
            the form "check". Without, they are written into the script.
        name: of the backend in the script, "module:function" for one of a user; its own by default.

    Raises:
        InvalidProblem: the form does not know such a problem, backend or finding, or the script would be too long.
    """
    calls, name = (*preceding, case), name or backend.name
    if form == "check":
        lines = _check_form(calls, name, finding, files)
    elif form == "torch":
        lines = _torch_form(calls, backend, finding)
    else:
        lines = _attention_form(calls, backend, name, finding)
    versions = f"gradtruth {installed_version('gradtruth')}, torch {torch.__version__}"
    what = f"{_plain(name)} on {case.problem.label()} ({versions})"
    head = (f'"""{_plain(str(finding))}', f'{what}."""')
    whole = [*head, *lines]
    if len(whole) > MOST_LINES:
        raise InvalidProblem(f"the script has {len(whole)} lines, expected at most {MOST_LINES}")
    return "\n".join(whole) + "\n"


def _attention_form(calls: Calls, backend: Backend, name: str, finding: Finding) -> list[str]:
    for case in calls:
        found = [str(reason) for reason in unsayable(case.problem)]
        if found or case.problem.spec.allow_tf32:
            raise InvalidProblem("; ".join(found) or "allow_tf32 is no argument of attention")
    right, limit = _right(calls, backend, finding)
    body = _listed("calls", [_keywords(case) for case in calls], calls)
    place = _RESULTS.index(finding.tensor or "")
    code = [
        "def run(q, k, v, dout, dlse=None, **options):",
        f'    options["backend"] = {name!r}',
        "    out, lse, _ = gradtruth.attention_forward(q, k, v, **options)",
        "    grads = gradtruth.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)",
        f"    return (out, lse, *grads)[{place}].double()  # {finding.tensor}",
        "found = [run(**call) for call in calls][-1]",
        *_verdict(finding.tensor, right, limit),
    ]
    return _file(["sys"], ["import torch, gradtruth"], [*body, *code], calls)


def _torch_form(calls: Calls, backend: Backend, finding: Finding) -> list[str]:
    kernel = _SDPA.get(backend.name)
    if kernel is None or not all(map(_is_plain, calls)) or finding.tensor not in _LEAVES:
        raise InvalidProblem(f"{backend.name} on such a problem is no plain call of torch")
    right, limit = _right(calls, backend, finding)
    body = _listed(
        "calls",
        [{name: expression(tensor) for name, tensor in _qkv(case).items()} for case in calls],
        calls,
    )
    spec, problem = calls[-1].problem.spec, calls[-1].problem
    order = _TRANSPOSED[spec.layout]
    back = tuple(order.index(dim) for dim in range(4))
    options = (
        f"is_causal={spec.right == 0}, scale={problem.scale!r}, enable_gqa={problem.group_size > 1}"
    )
    code = [
        "def run(q, k, v, dout):",
        f"    q, k, v = (x.permute{order}.detach().requires_grad_() for x in (q, k, v))",
        f"    with sdpa_kernel(SDPBackend.{kernel}):",
        f"        out = F.scaled_dot_product_attention(q, k, v, {options})",
        f"    grads = torch.autograd.grad(out, (q, k, v), dout.permute{order})",
        f"    return (out, *grads)[{_LEAVES.index(finding.tensor)}].detach().permute{back}.double()",
        "found = [run(**call) for call in calls][-1]",
        *_verdict(finding.tensor, right, limit),
    ]
    imports = [
        "import torch",
        "import torch.nn.functional as F",
        "from torch.nn.attention import SDPBackend, sdpa_kernel",
    ]
    return _file(["sys"], imports, [*body, *code], calls)


def _check_form(calls: Calls, backend: str, finding: Finding, files: Sequence[str]) -> list[str]:
    imports = ["import torch", "from gradtruth.verify.minimise.replay import replay"]
    if files:
        imports[0] = "from pathlib import Path"
        body = [f"calls = [Path(__file__).with_name(name) for name in {list(files)!r}]"]
    else:
        body = _listed("calls", [_whole(case) for case in calls], calls)
    expected = finding.tensor, finding.kind.value
    where = str(calls[-1].device)
    more = "" if finding.memory is None else f", memory={finding.memory:#04x}"
    code = [
        f"found = replay({backend!r}, {finding.check!r}, {expected!r}, calls, {where!r}{more})",
        "sys.exit(found)",
    ]
    return _file(["sys"], imports, [*body, *code], None if files else calls)


def _file(
    modules: list[str], imports: list[str], body: list[str], calls: Calls | None
) -> list[str]:
    """The lines in their order, with what the expressions need."""
    more, numbers, helpers = helpers_of("\n".join(body))
    place = []
    if calls is not None and calls[-1].device.type != "cpu":
        place = [f"torch.set_default_device({str(calls[-1].device)!r})"]
    first = f"import {', '.join(sorted([*modules, *more]))}"
    return [first, *numbers, *imports, *place, *helpers, *body]


def _verdict(tensor: str | None, right: str, limit: float) -> list[str]:
    return [
        f"right = {right}",
        'error = (found - right).abs().nan_to_num(float("inf")).where(found != right, 0).flatten()',
        "worst = error.argsort(descending=True)[:6]",
        f'print("{tensor} found", found.flatten()[worst].tolist())',
        f'print("{tensor} right", right.flatten()[worst].tolist())',
        f"sys.exit(int(error.max() > {limit:.3g}))",
    ]


def _right(calls: Calls, backend: Backend, finding: Finding) -> tuple[str, float]:
    """What is right, as an expression, and what tells wrong from it.

    That is halfway between the error of a healthy computation and the one that is there.
    """
    name = finding.tensor
    if finding.memory is not None:
        raise InvalidProblem(f"{finding} needs memory that is filled")
    of_one_call = finding.check in ("forward", "backward")
    if finding.kind not in _VALUES or name not in _RESULTS or not of_one_call:
        raise InvalidProblem(f"{finding} is not about a value of one call")
    *preceding, case = calls
    standard = Standard(case)
    found = Subject(case, backend, standard, preceding=tuple(preceding)).run().tensors.get(name)
    if found is None:
        raise InvalidProblem(f"the backend did not return {name}")
    right, healthy = standard.own.values[name], standard.own.yardstick[name]
    observed, usual = _furthest(found, right), _furthest(healthy, right)
    if not observed > 2 * usual:
        raise InvalidProblem(f"no element of {name} is further off than rounding explains")
    limit = usual + (1.0 if observed == float("inf") else (observed - usual) / 2)
    return expression(right.contiguous()), limit


def _furthest(found: Tensor, right: Tensor) -> float:
    error = (found.double() - right).abs().nan_to_num(float("inf"))
    return float(torch.where(found.double() == right, 0.0, error).amax()) if error.numel() else 0.0


def _is_plain(case: Case) -> bool:
    spec = case.problem.spec
    causal = spec.right == 0 and spec.left is None and spec.alignment == "top_left"
    return (
        spec.lengths == "full"
        and spec.layout in _TRANSPOSED
        and (spec.band.open or causal)
        and not (spec.arbitrary or spec.alibi or spec.sink or spec.softcap or spec.dropout_p)
        and spec.bias == "none"
        and case.dlse is None
        and not spec.max_logit
    )


def _qkv(case: Case) -> dict[str, Tensor]:
    inputs = case.inputs
    return {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": case.dout}


def _keywords(case: Case) -> dict[str, str]:
    """Keywords of ``gradtruth.attention`` with q, k, v, dout and dlse, as expressions."""
    given: dict[str, Any] = {**_qkv(case), **keywords_of(case.problem, case.inputs)}
    if case.dlse is not None:
        given["dlse"] = case.dlse
    return {name: _said(value) for name, value in given.items()}


def _whole(case: Case) -> dict[str, str]:
    problem = case.problem
    return {
        "spec": repr(problem.spec.encode()),
        "bounds": repr((problem.max_seqlen_q, problem.max_seqlen_kv)),
        **{name: expression(tensor) for name, tensor in case.tensors().items()},
    }


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return expression(value)
    if isinstance(value, tuple) and any(isinstance(part, Tensor) for part in value):
        return "(" + ", ".join("None" if part is None else _said(part) for part in value) + ")"
    return repr(value)


def _listed(name: str, calls: list[dict[str, str]], cases: Calls) -> list[str]:
    """``name = [dict(...), ...]``, as many entries a line as fit."""
    lines = [f"{name} = ["]
    for call, case in zip(calls, cases, strict=True):
        line = "    dict("
        for at, entry in enumerate(f"{key}={value}" for key, value in call.items()):
            if len(line) + len(entry) > _WIDTH and at:
                lines.append(line.rstrip())
                line = " " * 8
            line += f"{entry}, "
        lines.append(line.rstrip(", ") + f"),  # {case.problem.label()}")
    return [*lines, "]"]


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace('"', "'")
