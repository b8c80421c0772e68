"""The operator pair gradtruth::attention_forward and attention_backward: schemas, fakes, autograd.

One pair serves every backend. The Spec travels as a string, so one compiled graph serves every length.
Nothing here imports Triton.

In plain eager code ``attend`` skips the dispatcher (with 18 arguments it costs more than the rest); under
torch.compile, dispatch modes and tensor subclasses the registered operators are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtruth.backends.protocol import Backend
from gradtruth.backends.select import Selection, select
from gradtruth.core.layout import pack_gradients, split_packed
from gradtruth.core.problem import Problem
from gradtruth.core.recent import Recent
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Forward, Inputs, Wanted
from gradtruth.errors import InvalidProblem

__all__ = ["Plan", "attend", "attend_backward", "is_plain", "metadata", "plan_of"]

Tensors = tuple[Tensor | None, ...]
_NAMES = tuple(Inputs.__dataclass_fields__)
_BIAS, _OFFSET = _NAMES.index("bias"), _NAMES.index("softmax_offset")
_DIFFERENTIABLE = (0, 1, 2, _BIAS, _OFFSET)
_PLAIN = (Tensor, torch.nn.Parameter)

_TENSOR_ARGUMENTS = ", ".join(("Tensor q", *(f"Tensor? {name}" for name in _NAMES[1:])))
_OPTIONS = "SymInt? max_seqlen_q, SymInt? max_seqlen_kv, str spec, str backend"
_lib = torch.library.Library("gradtruth", "DEF")
_lib.define(f"attention_forward({_TENSOR_ARGUMENTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
_lib.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] output_mask, "
    f"{_TENSOR_ARGUMENTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


# ---------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call with this metadata runs: the problem and the chosen backends."""

    spec: str
    backend: str
    bounds: tuple[int | None, int | None]
    problem: Problem
    selection: Selection
    forward: Backend
    backward: Backend
    present: tuple[int, ...]

    def spread(self, present: Sequence[Any]) -> tuple[Any, ...]:
        """What belongs to the tensors that are there, at their places among all, None elsewhere."""
        places: list[Any] = [None] * len(_NAMES)
        for at, value in zip(self.present, present, strict=True):
            places[at] = value
        return tuple(places)

    def inputs(self, tensors: Tensors) -> Inputs:
        """The tensors as a backend sees them: q, k, v as views of what was given, last dims contiguous."""
        if self.problem.spec.packing == "separate" and not self.selection.copies:
            return Inputs(*tensors)  # type: ignore[arg-type]
        q, k, v = split_packed(self.problem.spec.packing, *tensors[:3])  # type: ignore[arg-type]
        if self.selection.copies:
            q, k, v = (
                _unit(t, n, self.selection.copies) for t, n in ((q, "q"), (k, "k"), (v, "v"))
            )
        return Inputs(q, k, v, *tensors[3:])


def _unit(tensor: Tensor, name: str, copies: tuple[str, ...]) -> Tensor:
    return tensor.contiguous() if name in copies else tensor


def metadata(tensor: Tensor | None) -> tuple | None:
    """What a plan depends on, hashable."""
    if tensor is None:
        return None
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15)


_plans: Recent[Plan] = Recent(4096)


def plan_of(
    spec: str, backend: str, bounds: tuple[int | None, int | None], tensors: Tensors
) -> Plan:
    """The plan of a call; the same object for the same metadata, least recently used ones are dropped.

    Raises:
        UnsupportedProblem: the named backend, or every backend, refuses.
    """
    key = (spec, backend, bounds, *map(metadata, tensors))
    found = _plans.get(key)
    if found is None:
        found = _make_plan(spec, backend, bounds, tensors)
        _plans.put(key, found)
    return found


def _make_plan(
    spec: str, backend: str, bounds: tuple[int | None, int | None], tensors: Tensors
) -> Plan:
    decoded = Spec.decode(spec)
    q, k, v = split_packed(decoded.packing, *tensors[:3])  # type: ignore[arg-type]
    problem = Problem.of(decoded, Inputs(q, k, v, *tensors[3:]), *bounds)
    selection = select(problem, q.device, backend)
    if selection.forward is None or selection.backward is None:
        raise InvalidProblem(f"backend is {backend!r}, expected one that was selected")
    present = tuple(at for at, tensor in enumerate(tensors) if tensor is not None)
    chosen = (selection.forward, selection.backward)
    return Plan(spec, backend, bounds, problem, selection, *chosen, present)


# ---------------------------------------------------------------- what the operators run


def _run_forward(plan: Plan, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and max_logit (None when not asked for). Called where grad mode is off."""
    found = plan.forward.forward(plan.problem, plan.inputs(tensors))
    return found.out, found.lse, found.max_logit


def _run_backward(
    plan: Plan,
    tensors: Tensors,
    forward: Forward,
    dout: Tensor,
    dlse: Tensor | None,
    mask: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    packing = plan.problem.spec.packing
    if packing in ("3hd", "h3d"):
        wanted = Wanted(mask[0], mask[0], mask[0], *mask[3:])
    elif packing in ("2hd", "h2d"):
        wanted = Wanted(mask[0], mask[1], mask[1], *mask[3:])
    else:
        wanted = Wanted(*mask)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    grads = plan.backward.backward(plan.problem, plan.inputs(tensors), forward, dout, dlse, wanted)
    dq, dk, dv = grads.dq, grads.dk, grads.dv
    if packing in ("3hd", "h3d") and mask[0]:
        dq, dk, dv = pack_gradients(packing, (dq, dk, dv)), None, None  # type: ignore[arg-type]
    elif packing in ("2hd", "h2d") and mask[1]:
        dk, dv = pack_gradients(packing, (dk, dv)), None  # type: ignore[arg-type]
    doffset, offset = grads.dsoftmax_offset, tensors[_OFFSET]
    if doffset is not None and offset is not None:
        doffset = doffset.to(offset.dtype)  # as the fake says: compiled code reads its memory so
    return dq, dk, dv, grads.dbias, doffset


def _forward_impl(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, max_q, max_kv, spec, backend = arguments
    plan = plan_of(spec, backend, (max_q, max_kv), tuple(tensors))
    with torch.no_grad():
        out, lse, max_logit = _run_forward(plan, tuple(tensors))
    return out, lse, lse.new_empty(0) if max_logit is None else max_logit


def _backward_impl(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    output_mask: list[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    *tensors, max_q, max_kv, spec, backend = arguments
    plan = plan_of(spec, backend, (max_q, max_kv), tuple(tensors))
    forward = Forward(out=out, lse=lse)
    with torch.no_grad():
        grads = _run_backward(plan, tuple(tensors), forward, dout, dlse, tuple(output_mask))
    return tuple(dout.new_empty(0) if grad is None else grad for grad in grads)


# ---------------------------------------------------------------- fakes


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, _max_q, _max_kv, spec, _backend = arguments
    decoded = Spec.decode(spec)
    q, _k, v = split_packed(decoded.packing, *tensors[:3])
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads = q.shape[-2]
    if decoded.layout == "thd":
        lse = q.new_empty((heads, q.shape[0]), dtype=dtype).t()
    elif decoded.layout == "bshd":
        lse = q.new_empty((q.shape[0], heads, q.shape[1]), dtype=dtype)
    else:
        lse = q.new_empty((q.shape[1], heads, q.shape[0]), dtype=dtype)
    max_logit = (
        q.new_empty((heads,), dtype=torch.float32)
        if decoded.max_logit
        else q.new_empty(0, dtype=dtype)
    )
    return out, lse, max_logit


def _backward_fake(
    dout: Tensor,
    _dlse: Tensor | None,
    _out: Tensor,
    _lse: Tensor,
    output_mask: list[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    sources = tuple(arguments[at] for at in _DIFFERENTIABLE)
    return tuple(
        dout.new_empty(source.shape, dtype=source.dtype)
        if want and source is not None
        else dout.new_empty(0)
        for source, want in zip(sources, output_mask, strict=True)
    )


# ---------------------------------------------------------------- autograd


_NO_JVP = "gradtruth attention has no forward-mode derivative; use reverse mode"


class _PlannedAttention(torch.autograd.Function):
    """The pair as a differentiable function, for plain calls with a plan.

    Only the tensors that are there are arguments, and ctx stands in forward: with fifteen arguments and a
    separate setup_context a call costs 30 us more in Python.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, options: tuple, *present: Tensor) -> tuple:
        found = _run_forward(plan, plan.spread(present))
        _save(ctx, plan, options, present, found)
        return found

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _dmax: None) -> tuple:
        plan: Plan = ctx.plan
        out, lse, *present = ctx.saved_tensors
        needs = plan.spread(ctx.needs_input_grad[2:])
        grads = _differentiate(ctx, needs, plan.spread(present), (out, lse, dout, dlse))
        return (None, None, *(grads[at] for at in plan.present))

    @staticmethod
    def jvp(ctx: Any, *_tangents: Any) -> None:
        raise NotImplementedError(_NO_JVP)


class _Attention(torch.autograd.Function):
    """The pair as a differentiable function that calls the operators, for everything else."""

    @staticmethod
    def forward(options: tuple, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.gradtruth.attention_forward.default(*tensors, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        _save(ctx, None, inputs[0], inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _dmax: None) -> tuple:
        out, lse, *tensors = ctx.saved_tensors
        grads = _differentiate(
            ctx, ctx.needs_input_grad[1:], tuple(tensors), (out, lse, dout, dlse)
        )
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, *_tangents: Any) -> None:
        raise NotImplementedError(_NO_JVP)

    @staticmethod
    def vmap(*_arguments: Any) -> None:
        raise NotImplementedError(
            "gradtruth attention cannot be vmapped; fold the mapped dim into the batch (or into heads)"
        )


def _save(ctx: Any, plan: Plan | None, options: tuple, tensors: Tensors, output: tuple) -> None:
    out, lse, max_logit = output
    ctx.plan, ctx.options = plan, options
    ctx.set_materialize_grads(False)
    fixed = [] if max_logit is None else [max_logit]
    if not Spec.decode(options[2]).lse_grad:
        fixed.append(lse)
    ctx.mark_non_differentiable(*fixed)
    ctx.save_for_backward(out, lse, *tensors)


def _differentiate(
    ctx: Any,
    needs: tuple[bool | None, ...],
    tensors: Tensors,
    given: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
) -> list[Tensor | None]:
    """Gradients of ``tensors``, None where not needed; given is (out, lse, dout, dlse)."""
    out, lse, dout, dlse = given
    mask = tuple(bool(needs[at]) for at in _DIFFERENTIABLE)
    if dout is None:
        dout = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
    plan = ctx.plan
    if plan is not None:
        # Saved-tensor hooks (offloading, say) may hand back other strides than were saved.
        plan = plan_of(plan.spec, plan.backend, plan.bounds, tensors)
    once = _AttentionBackward.apply if torch.is_grad_enabled() else _backward_once
    grads = once(plan, ctx.options, mask, dout, dlse, out, lse, *tensors)
    placed: list[Tensor | None] = [None] * len(_NAMES)
    for at, grad, want in zip(_DIFFERENTIABLE, grads, mask, strict=True):
        placed[at] = grad if want else None
    return placed


class _AttentionBackward(torch.autograd.Function):
    """The backward under create_graph=True: right once, an error when differentiated again."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        return _backward_once(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> None:
        raise NotImplementedError(
            "gradtruth attention has no second derivative; the gradient was asked for with create_graph=True and "
            "then differentiated. Compute attention out of PyTorch operations for that, or detach the gradient"
        )

    @staticmethod
    def vmap(*_arguments: Any) -> None:
        raise NotImplementedError(
            "the backward of gradtruth attention cannot be vmapped; call it once per gradient"
        )


def _backward_once(
    plan: Plan | None,
    options: tuple,
    mask: tuple[bool, ...],
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *tensors: Tensor | None,
) -> tuple[Tensor | None, ...]:
    if plan is not None:
        return _run_backward(plan, tensors, Forward(out=out, lse=lse), dout, dlse, mask)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.gradtruth.attention_backward.default(
            dout, dlse, out, lse, mask, *tensors, *options
        )


def _forward_autograd(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    count = len(_NAMES)
    return _Attention.apply(arguments[count:], *arguments[:count])  # type: ignore[return-value]


def _backward_autograd(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    output_mask: list[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    count = len(_NAMES)
    return _AttentionBackward.apply(  # type: ignore[return-value]
        None, arguments[count:], tuple(output_mask), dout, dlse, out, lse, *arguments[:count]
    )


_lib.impl("attention_forward", _forward_impl, "CompositeExplicitAutograd")
_lib.impl("attention_backward", _backward_impl, "CompositeExplicitAutograd")
_lib.impl("attention_forward", _forward_autograd, "Autograd")
_lib.impl("attention_backward", _backward_autograd, "Autograd")
torch.library.register_fake("gradtruth::attention_forward", _forward_fake, lib=_lib)
torch.library.register_fake("gradtruth::attention_backward", _backward_fake, lib=_lib)


# ---------------------------------------------------------------- entry points


def _in_transform() -> bool:
    """True inside torch.func.grad, vmap and the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]


def is_plain(*given: Any) -> bool:
    """True when nothing listens in: no compiler, no dispatch mode, no functorch, no tensor subclass."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if _in_transform():
        return False
    return not any(isinstance(x, Tensor) and type(x) not in _PLAIN for x in given)


def attend(
    plan: Plan | None, options: tuple, tensors: Tensors
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and max_logit (None or empty when not asked for), differentiable.

    Args:
        plan: from ``plan_of`` for plain calls, None to go through the operators.
        options: (max_seqlen_q, max_seqlen_kv, spec string, backend).
        tensors: in the order of ``Inputs``'s fields; k or v None where packed.
    """
    if plan is not None:
        if torch.is_grad_enabled():
            present = [tensor for tensor in tensors if tensor is not None]
            return _PlannedAttention.apply(plan, options, *present)  # type: ignore[return-value]
        return _run_forward(plan, tensors)
    if not torch.compiler.is_compiling() and _in_transform():
        return _Attention.apply(options, *tensors)  # type: ignore[return-value]
    return torch.ops.gradtruth.attention_forward.default(*tensors, *options)


def attend_backward(
    plan: Plan | None,
    options: tuple,
    tensors: Tensors,
    forward: Forward,
    dout: Tensor,
    dlse: Tensor | None,
    mask: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dbias, dsoftmax_offset (None or empty where not wanted), without autograd."""
    if plan is not None:
        return _run_backward(plan, tensors, forward, dout, dlse, mask)
    return torch.ops.gradtruth.attention_backward.default(
        dout, dlse, forward.out, forward.lse, mask, *tensors, *options
    )
