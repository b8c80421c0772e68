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
_HEAD_DIM = 256
_CAPABILITY = (8, 0)


class Triton:
    """Fused forward and backward in O(S) memory, deterministic, without atomics and without a host sync.

    Cannot: fp64, head dims over 256, GPUs older than sm_80. On the CPU it runs only in Triton's interpreter,
    which is for tests and has no bf16.

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
        for name in ("head_dim_qk", "head_dim_v"):
            value = getattr(problem, name)
            if value > _HEAD_DIM:
                text = f"{name} is {value}, at most {_HEAD_DIM} fits the shared memory"
                reasons.append(Reason(ReasonCode.HEAD_DIM, text))
        return Support(tuple(reasons))

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """All: tiles are counted from the start of a sequence, and no schedule looks at the batch."""
        return replace(DEFAULT_CLAIMS, batch_invariant=True)

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
