"""triton: the whole contract in fused kernels, on every GPU that Triton supports.

README.md beside this file derives what is computed and says why the tiles are what they are.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from gradtruth.core.problem import Problem
from gradtruth.core.support import DEFAULT_CLAIMS, Claims, Reason, ReasonCode, Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["Triton", "create"]

_DTYPES = ("bfloat16", "float16", "float32")
_NARROW, _WIDEST = (
    256,
    576,
)  # head dims: in every dtype, and in 16 bits where the shared memory is large
_WIDE_SHARED = 131_072  # bytes that a tile of head dims over 256 takes
_CAPABILITY = (8, 0)


class Triton:
    """Fused forward and backward in O(S) memory, deterministic, without atomics and without a host sync.

    Cannot: fp64, head dims over 576 (256 in fp32 and where a block has less than 128 KB of shared memory), GPUs
    older than sm_80. On the CPU it runs only in Triton's interpreter, which is for tests and has no bf16.

    Numerics: scores, softmax, dP, delta and sums in fp32; P and dS are rounded to the input dtype as operands of
        products; products of fp32 inputs are three passes of TF32, or one where the Spec allows TF32.
    """

    name = "triton"

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """Every reason against."""
        reasons = _device_reasons(problem, device)
        if problem.dtype not in _DTYPES:
            text = f"dtype is {problem.dtype}, expected one of {', '.join(_DTYPES)}"
            reasons.append(Reason(ReasonCode.DTYPE, text))
        limit, why = _head_dim_limit(problem, device)
        for name in ("head_dim_qk", "head_dim_v"):
            value = getattr(problem, name)
            if value > limit:
                reasons.append(
                    Reason(ReasonCode.HEAD_DIM, f"{name} is {value}, at most {limit} {why}")
                )
        return Support(tuple(reasons))

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """The default set, and batch invariance where it is asked for.

        Tiles are counted from the start of a sequence and no tile size depends on the batch, but whether the work
        of a small grid is shared out does, unless ``spec.batch_invariant`` forbids it.
        """
        return replace(DEFAULT_CLAIMS, batch_invariant=problem.spec.batch_invariant)

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """See ``launch.attend``."""
        from gradtruth.backends.triton.launch import attend

        with _on(inputs.q.device):
            return attend(problem, inputs)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """See ``launch.differentiate``."""
        from gradtruth.backends.triton.launch import differentiate

        with _on(inputs.q.device):
            return differentiate(problem, inputs, forward, dout, dlse, wanted)


def _device_reasons(problem: Problem, device: torch.device) -> list[Reason]:
    if not _installed():
        return [Reason(ReasonCode.NOT_INSTALLED, "triton is not installed")]
    if device.type == "cuda":
        found = _capability(device)
        if found < _CAPABILITY:
            text = f"compute capability is {found[0]}.{found[1]}, at least 8.0 is needed"
            return [Reason(ReasonCode.DEVICE, text)]
        return []
    if device.type != "cpu" or not _interpreted():
        text = f"device is {device.type}, expected cuda, or cpu in Triton's interpreter"
        return [Reason(ReasonCode.DEVICE, text)]
    if problem.dtype == "bfloat16":
        return [Reason(ReasonCode.DTYPE, "bf16 products are wrong in Triton's interpreter")]
    return []


def _head_dim_limit(problem: Problem, device: torch.device) -> tuple[int, str]:
    """The largest head dim, and what limits it."""
    if problem.dtype == "float32":
        return _NARROW, "fits the shared memory in fp32"
    shared = _shared_memory(device) if device.type == "cuda" else _WIDE_SHARED
    if shared < _WIDE_SHARED:
        return _NARROW, f"fits the {shared} bytes of shared memory (more takes {_WIDE_SHARED})"
    return _WIDEST, "fits the shared memory"


@cache
def _shared_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _interpreted() -> bool:
    """Whether kernels that are compiled from now on run in the interpreter.

    Triton's own switch decides, and who sets it has imported Triton: nothing is imported for the answer.
    """
    module = sys.modules.get("triton")
    return module is not None and bool(module.knobs.runtime.interpret)


def _on(device: torch.device) -> torch.cuda.device:
    """Triton launches on the current device: make it that of the tensors."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def create(name: str) -> Triton:
    """The backend."""
    return Triton()
