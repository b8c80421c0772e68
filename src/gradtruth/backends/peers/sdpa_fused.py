"""sdpa_flash, sdpa_efficient and sdpa_cudnn: the fused kernels of torch's SDPA, by their aten operators.

Called directly, because the operators return the lse and their backwards take (out, lse) from anywhere.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gradtruth.backends.peers.sdpa_cpu import FlashCpu
from gradtruth.backends.peers.sdpa_cuda import CudnnCuda, EfficientCuda, FlashCuda
from gradtruth.backends.peers.views import empty_forward, empty_grads, has_no_elements
from gradtruth.core.problem import Problem
from gradtruth.core.support import Claims, Reason, ReasonCode, Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["SdpaFused"]


class _Kernel(Protocol):
    """One kernel on one kind of device; the problems that reach it have elements."""

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]: ...

    def claims(self, problem: Problem) -> Claims: ...

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


_KERNELS: dict[str, dict[str, _Kernel]] = {
    "sdpa_flash": {"cpu": FlashCpu(), "cuda": FlashCuda()},
    "sdpa_efficient": {"cuda": EfficientCuda()},
    "sdpa_cudnn": {"cuda": CudnnCuda()},
}


class SdpaFused:
    """A fused kernel of torch's SDPA, by device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._kernels = _KERNELS[name]

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """The kernel's reasons, or that there is no kernel for the device."""
        kernel = self._kernels.get(device.type)
        if kernel is None:
            known = " or ".join(name.upper() for name in self._kernels)
            return Support(
                (Reason(ReasonCode.DEVICE, f"device is {device.type}, a {known} device is needed"),)
            )
        return Support(tuple(kernel.reasons(problem, device)))

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """The kernel's claims; none without a kernel."""
        kernel = self._kernels.get(device.type)
        return Claims() if kernel is None else kernel.claims(problem)

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """out and lse."""
        if has_no_elements(problem, inputs):
            return empty_forward(problem, inputs)
        out, lse = self._kernels[inputs.q.device.type].forward(problem, inputs)
        return Forward(out=out, lse=lse)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """The wanted gradients, from (out, lse) made here or elsewhere. Problems with a dlse are refused."""
        del dlse
        if has_no_elements(problem, inputs):
            return empty_grads(inputs, wanted)
        dq, dk, dv = self._kernels[inputs.q.device.type].backward(problem, inputs, forward, dout)
        return Grads(
            dq=dq if wanted.dq else None, dk=dk if wanted.dk else None, dv=dv if wanted.dv else None
        )
