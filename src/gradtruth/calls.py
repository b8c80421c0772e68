"""calls: from collected arguments to the operator.

Everything that is not an argument (``use``, autocast, PyTorch's TF32 switch) is read here, once per call, and
travels on as an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor

from gradtruth.arguments import (
    Options,
    TensorArguments,
    check_contents,
    check_tensor,
    inputs_of,
    max_seqlens,
    spec_of,
)
from gradtruth.backends.select import Selection, select
from gradtruth.core.recent import Recent
from gradtruth.core.tensors import Forward
from gradtruth.errors import InvalidProblem
from gradtruth.ops import Plan, attend, attend_backward, is_plain, metadata, plan_of

__all__ = ["Backends", "Policy", "run_backward", "run_forward", "select_for", "settle", "use"]

Backends = str | tuple[str, str]


class Policy(NamedTuple):
    """How a call is run; none of it changes what is computed."""

    backend: Backends = "auto"
    check_inputs: bool | None = None
    context_parallel: object = None
    settled: bool = False  # True: what is not an argument has been read, see ``settle``


_LSE_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_GRADIENTS = ("dq", "dk", "dv", "dbias", "dsoftmax_offset")

# ---------------------------------------------------------------- what is not an argument


class _Ambient(threading.local):
    """The backend that ``use`` chose in this thread. torch.compile guards on it; a ContextVar it cannot read."""

    def __init__(self) -> None:
        # Of the instance, in every thread: torch.compile does not see that one comes to hide a class attribute.
        self.backend: str = "auto"
        self.entered: list[list[str]] = []


_ambient = _Ambient()


@contextmanager
def use(*, backend: Backends) -> Iterator[None]:
    """Choose the backend of every call in the block that says ``backend="auto"``.

    Holds for the current thread. Compiled code is compiled again for another backend.

    Args:
        backend: a name, a pair (forward, backward), or "auto".
    """
    entry, entered = [_joined(backend)], _ambient.entered
    entered.append(entry)
    _ambient.backend = entry[0]
    try:
        yield
    finally:
        # By identity: a generator may leave its block after one that began later, or in another thread.
        entered[:] = [other for other in entered if other is not entry]
        if entered is _ambient.entered:
            _ambient.backend = entered[-1][0] if entered else "auto"


def _joined(backend: object) -> str:
    if isinstance(backend, str):
        return backend
    if (
        isinstance(backend, tuple | list)
        and len(backend) == 2
        and all(isinstance(b, str) and b != "auto" for b in backend)
    ):
        return ",".join(backend)
    raise InvalidProblem(
        f"backend is {backend!r}, expected 'auto', a backend's name, or a pair of names (forward, backward)"
    )


def _backend_name(policy: Policy) -> str:
    backend, context_parallel = policy.backend, policy.context_parallel
    if context_parallel is not None:
        raise NotImplementedError(
            f"context_parallel is {context_parallel!r}, expected None: not available in this release"
        )
    name = _joined(backend)
    return _ambient.backend if name == "auto" and not policy.settled else name


def settle(tensors: TensorArguments, options: Options, policy: Policy) -> tuple[Options, Policy]:
    """Read now what is not an argument, for a call that is made again later, in a backward.

    By then ``use`` may have ended, and autograd runs CUDA's backward in threads that never saw it. Autocast is
    left to checkpointing, which restores it.
    """
    if isinstance(tensors.query, Tensor) and _tf32(_autocast(tensors)):
        options = options._replace(allow_tf32=True)
    return options, policy._replace(backend=_backend_name(policy), settled=True)


def _autocast(tensors: TensorArguments) -> TensorArguments:
    """Under autocast q, k, v are cast to its dtype (fp64 stays), nothing else is."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    kind = tensors.query.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    casted = {
        name: given.to(dtype)
        for name in ("query", "key", "value")
        if isinstance(given := getattr(tensors, name), Tensor)
        and given.is_floating_point()
        and given.dtype != torch.float64
    }
    return tensors._replace(**casted)


def _tf32(tensors: TensorArguments) -> bool:
    """PyTorch's own switch, where it means something."""
    q = tensors.query
    return bool(q.is_cuda and q.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32)


# ---------------------------------------------------------------- the calls

_prepared: Recent[Plan] = Recent(4096)


def run_forward(
    tensors: TensorArguments,
    options: Options,
    policy: Policy,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run attention on collected arguments: what ``attention`` and the module have in common.

    Returns:
        (out, lse, max_logit); lse is differentiable when ``options.lse_grad``.
    """
    plan, call, inputs = _prepare(tensors, options, policy)
    return attend(plan, call, inputs)


def run_backward(
    tensors: TensorArguments,
    options: Options,
    policy: Policy,
    given: tuple[Tensor, Tensor, Tensor, Tensor | None],
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Run the backward on collected arguments; given is (dout, out, lse, dlse)."""
    if options.dropout_p and tensors.dropout_seed is None:
        raise InvalidProblem(
            "dropout_seed is None with dropout_p > 0, expected the seed of the forward"
        )
    if len(output_mask) != len(_GRADIENTS) or not all(
        isinstance(want, bool) for want in output_mask
    ):
        raise InvalidProblem(
            f"output_mask is {output_mask!r}, expected five bools: dq, dk, dv, dbias, dsoftmax_offset"
        )
    with torch.no_grad():
        plan, call, inputs = _prepare(tensors, options, policy)
    # Under autocast the forward that made out computed in its dtype.
    query, value = cast("Tensor", inputs[0]), cast("Tensor", inputs[2])
    forward, dout, dlse = _checked_forward(query, value, options.qkv_format, given)
    sources = (tensors.query, tensors.key, tensors.value, tensors.bias, tensors.softmax_offset)
    mask = tuple(
        want and source is not None for want, source in zip(output_mask, sources, strict=True)
    )
    with torch.no_grad():
        found = attend_backward(plan, call, inputs, forward, dout, dlse, mask)
    dq, dk, dv = (
        grad.to(source.dtype) if want and grad is not None and source is not None else None
        for grad, want, source in zip(found[:3], mask, sources, strict=False)
    )
    dbias, doffset = (
        grad if want else None for grad, want in zip(found[3:], mask[3:], strict=True)
    )
    return dq, dk, dv, dbias, doffset


def _checked_forward(
    query: Tensor,
    value: Tensor,
    qkv_format: str,
    given: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> tuple[Forward, Tensor, Tensor | None]:
    """Check dout, out, lse and dlse of a backward against the problem; lse and dlse in fp32 (fp64 for fp64).

    Raises:
        InvalidProblem: wrong shape, dtype or device.
    """
    dout, out, lse, dlse = given
    out_shape = (*query.shape[:-1], value.shape[-1])
    tokens_or = {"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "thd": (0, 1)}[qkv_format]
    lse_shape = tuple(query.shape[dim] for dim in tokens_or)
    for name, tensor, shape, dtypes in (
        ("dout", dout, out_shape, (query.dtype,)),
        ("out", out, out_shape, (query.dtype,)),
        ("lse", lse, lse_shape, _LSE_FLOATS),
        ("dlse", dlse, lse_shape, _LSE_FLOATS),
    ):
        if tensor is None and name == "dlse":
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidProblem(
                f"{name} is {type(tensor).__name__}, expected a tensor {list(shape)}"
            )
        if tuple(tensor.shape) != shape:
            raise InvalidProblem(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype not in dtypes:
            raise InvalidProblem(
                f"{name} has dtype {tensor.dtype}, expected {' or '.join(map(str, dtypes))}"
            )
        if tensor.device != query.device:
            raise InvalidProblem(
                f"{name} is on {tensor.device}, expected query's device, {query.device}"
            )
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return Forward(out=out, lse=lse.to(dtype)), dout, None if dlse is None else dlse.to(dtype)


def select_for(tensors: TensorArguments, options: Options, policy: Policy) -> Selection:
    """The selection that ``run_forward`` would make."""
    name = _backend_name(policy)
    check_tensor("query", tensors.query)
    problem = _plan(_autocast(tensors), options, name).problem
    return select(problem, tensors.query.device, name, whole=True)


def _prepare(
    tensors: TensorArguments,
    options: Options,
    policy: Policy,
) -> tuple[Plan | None, tuple, tuple[Tensor | None, ...]]:
    """The plan (None where the operators must be called), the operators' options, and the tensors."""
    name = _backend_name(policy)
    check_inputs = policy.check_inputs
    if check_inputs is not None and not isinstance(check_inputs, bool):
        raise InvalidProblem(f"check_inputs is {check_inputs!r}, expected True, False or None")
    if not isinstance(tensors.query, Tensor):
        check_tensor("query", tensors.query)
    tensors = _autocast(tensors)
    if not policy.settled and _tf32(tensors):
        options = options._replace(allow_tf32=True)
    plain = is_plain(*tensors)
    if plain:
        plan = _plan(tensors, options, name)
        spec, bounds = plan.spec, plan.bounds
    else:
        plan, spec, bounds = None, spec_of(options, tensors), max_seqlens(options, tensors)
    slopes = tensors.alibi_slopes
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise InvalidProblem(
            "alibi_slopes.requires_grad is True, expected False: slopes get no gradient"
        )
    if check_inputs or (check_inputs is None and plain and tensors.query.device.type == "cpu"):
        check_contents(options, tensors, bounds)
    return plan, (*bounds, spec, name), inputs_of(options, tensors)


def _plan(tensors: TensorArguments, options: Options, backend: str) -> Plan:
    """The plan of a plain call; validation is skipped when the same metadata was seen before."""
    if isinstance(options.window_size, list):
        options = options._replace(window_size=tuple(options.window_size))
    try:
        # True == 1 == 1.0, but validation tells them apart.
        kinds = tuple(map(type, (*options, *(options.window_size or ()))))
        key = (options, kinds, backend, *map(_described, tensors))
        found = _prepared.get(key)
    except (TypeError, AttributeError, RuntimeError):
        # An argument of a wrong type or without strides, which spec_of names.
        key, found = None, None
    if found is not None:
        return found
    spec = spec_of(options, tensors)
    bounds = max_seqlens(options, tensors)
    # Seed 0: making a plan must not draw from the generator.
    seeded = tensors if tensors.dropout_seed is not None else tensors._replace(dropout_seed=0)
    plan = plan_of(spec, backend, bounds, inputs_of(options, seeded))
    if key is not None:
        _prepared.put(key, plan)
    return plan


def _described(given: object) -> object:
    """What validation depends on, hashable."""
    if given is None:
        return None
    if isinstance(given, Tensor):
        return metadata(given)
    if isinstance(given, int):
        # A dropout seed: of a legal one, the value decides nothing.
        return type(given), -(2**63) <= given < 2**63
    return tuple(map(_described, given))  # type: ignore[arg-type] - a pair of padding masks
