"""flash_attn_2, flash_attn_3 and flash_attn_4: the public functions of the three generations of FlashAttention.

Their diagonal ends at the bottom right. Each has a function for full tensors and one for tokens; both are used.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from gradtruth.backends.peers.bands import band_reasons, common_reasons, widths
from gradtruth.backends.peers.compact import Compact
from gradtruth.backends.peers.compiling import watch_cute
from gradtruth.backends.peers.installed import library_on_cuda
from gradtruth.backends.peers.operands import aligned, finite_rows, halves_only, head_dims
from gradtruth.backends.peers.refusals import unable
from gradtruth.backends.peers.varlen import Varlen
from gradtruth.backends.protocol import Backend
from gradtruth.core.layout import canonical, stored
from gradtruth.core.problem import Problem
from gradtruth.core.scores import sink_logit
from gradtruth.core.support import Claims, Reason, ReasonCode
from gradtruth.core.tensors import Inputs

__all__ = ["create"]

_FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func")


def create(name: str) -> Backend:
    """The backend of this name: flash_attn_2, flash_attn_3 or flash_attn_4."""
    return {"flash_attn_2": Flash2, "flash_attn_3": Flash3, "flash_attn_4": Flash4}[name](name)


class _Flash(Varlen):
    """What the generations share: layouts, and where their functions are.

    Attributes:
        module: that holds the functions.
        project: what to install.
        capability: the least compute capability of the backward.
    """

    module: str
    project: str
    capability: tuple[int, int]

    def options(self, problem: Problem, inputs: Inputs) -> dict[str, Any]:
        """Keyword arguments of both functions."""
        raise NotImplementedError

    def rows(self, problem: Problem, tokens: Compact | None, lse: Tensor) -> Tensor | None:
        """The returned lse, [B, H, S] or [tokens, H], in the contract's form; None where it is of other scores."""
        raise NotImplementedError

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """Deterministic where the Spec asks for it, because the functions are asked for it too."""
        base = super().claims(problem, device)
        return Claims(
            global_dropout=True, no_sync=base.no_sync, deterministic=problem.spec.deterministic
        )

    def common(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Reasons of all three. The library is imported only where there is a device for it."""
        return [
            *library_on_cuda(device.type, self.capability, self.module, self.project, _FUNCTIONS),
            *common_reasons(problem, self.name),
            *halves_only(problem),
            *band_reasons(problem, self.native, "windows"),
        ]

    def attend(
        self, problem: Problem, inputs: Inputs, tokens: Compact
    ) -> tuple[Tensor, Tensor | None]:
        """flash_attn_varlen_func."""
        longest_q, longest_kv = tokens.longest
        out, lse = self._call(
            "flash_attn_varlen_func",
            aligned(tokens.queries(inputs.q)),
            aligned(tokens.keys(inputs.k)),
            aligned(tokens.keys(inputs.v)),
            cu_seqlens_q=tokens.cu_seqlens_q,
            cu_seqlens_k=tokens.cu_seqlens_kv,
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_kv,
            **self.options(problem, inputs),
        )
        return out, None if lse is None else self.rows(problem, tokens, lse.t())

    def attend_dense(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """flash_attn_func."""
        layout = problem.layout
        out, lse = self._call(
            "flash_attn_func",
            *(aligned(canonical(x, layout)) for x in (inputs.q, inputs.k, inputs.v)),
            **self.options(problem, inputs),
        )
        out = stored(out, layout).contiguous()
        return out, None if lse is None else self.rows(problem, None, lse)

    def _call(
        self, function: str, *tensors: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """out and lse; whether lse is asked for, and how, differs between the generations and their releases."""
        call = getattr(import_module(self.module), function)
        watch_cute()
        known = signature(call).parameters
        for name in ("return_attn_probs", "return_lse"):
            if name in known:
                options[name] = True
        found = call(*tensors, **options)
        return (found, None) if isinstance(found, Tensor) else found[:2]


def _windowed(problem: Problem) -> dict[str, Any]:
    """What generations 2 and 3 call alike; -1 is unlimited."""
    window = widths(problem)
    return {
        "softmax_scale": problem.scale,
        "causal": window == (-1, 0),
        "window_size": window,
        "softcap": problem.spec.softcap or 0.0,
        "deterministic": problem.spec.deterministic,
    }


class Flash2(_Flash):
    """flash_attn: windows, softcap, ALiBi, GQA; dropout with a mask of its own, which is refused."""

    module = "flash_attn.flash_attn_interface"
    project = "flash-attn"
    capability = (8, 0)

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Against sinks, bias, gradients of lse, unequal head dims."""
        return [
            *self.common(problem, device),
            *unable(problem, (ReasonCode.SOFTCAP, ReasonCode.ALIBI)),
            *head_dims(problem, 1, 256, equal=True),
        ]

    def options(self, problem: Problem, inputs: Inputs) -> dict[str, Any]:
        """The window, softcap, slopes and determinism."""
        return {**_windowed(problem), "alibi_slopes": inputs.alibi_slopes}

    def rows(self, problem: Problem, tokens: Compact | None, lse: Tensor) -> Tensor | None:
        """-inf for rows without a key; none of a causal kernel with ALiBi, which adds slope * j to the scores."""
        longest = problem.seqlen_kv if tokens is None else tokens.longest[1]
        left, right = widths(problem)
        if problem.spec.alibi and right == 0 and not 0 <= left < longest:
            return None
        return finite_rows(lse)


class Flash3(_Flash):
    """flash_attn_interface (hopper/): windows, softcap, GQA."""

    module = "flash_attn_interface"
    project = "flash-attn-3"
    capability = (9, 0)

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Against sinks, bias, ALiBi, gradients of lse, and unequal head dims but those that it was built for."""
        found = [
            *self.common(problem, device),
            *unable(problem, (ReasonCode.SOFTCAP,)),
            *head_dims(problem, 8, 256, equal=False),
        ]
        dim, dim_v = problem.head_dim_qk, problem.head_dim_v
        if dim != dim_v and not (128 < dim <= 192 and 96 < dim_v <= 128) and dim > 64:
            text = f"head_dim_qk is {dim} and head_dim_v {dim_v}: unequal dims need up to 64, or 192 and 128"
            found.append(Reason(ReasonCode.HEAD_DIM, text))
        if problem.spec.deterministic and max(dim, dim_v) > 192:
            text = f"head dim is {max(dim, dim_v)}, its deterministic backward takes up to 192"
            found.append(Reason(ReasonCode.GUARANTEE, text))
        return found

    def options(self, problem: Problem, inputs: Inputs) -> dict[str, Any]:
        """The window, softcap and determinism."""
        del inputs
        return _windowed(problem)

    def rows(self, problem: Problem, tokens: Compact | None, lse: Tensor) -> Tensor | None:
        """-inf for rows without a key."""
        del problem, tokens
        return finite_rows(lse)


class Flash4(_Flash):
    """flash_attn.cute: windows, softcap, sinks with a gradient, gradients of lse, unequal head dims."""

    module = "flash_attn.cute"
    project = "flash-attn-4"
    capability = (9, 0)

    def reasons(self, problem: Problem, device: torch.device) -> list[Reason]:
        """Against bias, ALiBi, and what its backward asserts."""
        able = (ReasonCode.SOFTCAP, ReasonCode.SOFTMAX, ReasonCode.LSE_GRAD)
        spec, dim, dim_v = problem.spec, problem.head_dim_qk, problem.head_dim_v
        found = [
            *self.common(problem, device),
            *unable(problem, able),
            *head_dims(problem, 8, 256, equal=False),
        ]
        major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
        if problem.group_size > 1 and dim != dim_v:
            text = f"{problem.group_size} query heads share a KV head and head dims are {dim} and {dim_v}, not equal"
            found.append(Reason(ReasonCode.HEAD_DIM, text))
        if spec.softmax == "learnable" and spec.lse_grad:
            text = "lse may receive a gradient beside a learnable sink, and rows without a key add it to the sink's"
            found.append(Reason(ReasonCode.LSE_GRAD, text))
        if major in (10, 11):
            found += _blackwell(problem)
        elif major == 12:
            found += _small_blackwell(problem)
        return found

    def options(self, problem: Problem, inputs: Inputs) -> dict[str, Any]:
        """The window, softcap, sink and determinism; None is unlimited."""
        spec = problem.spec
        causal = (spec.left, spec.right) == (None, 0)
        return {
            "softmax_scale": problem.scale,
            "causal": causal,
            "window_size": (None, None) if causal else (spec.left, spec.right),
            "softcap": spec.softcap or 0.0,
            "learnable_sink": sink_logit(problem, inputs),
            "deterministic": spec.deterministic,
        }

    def rows(self, problem: Problem, tokens: Compact | None, lse: Tensor) -> Tensor | None:
        """As they are: the sink is in, rows without a key have -inf or the sink."""
        del problem, tokens
        return lse


def _blackwell(problem: Problem) -> list[Reason]:
    """What the kernels of compute capability 10 and 11 assert."""
    dims = (problem.head_dim_qk, problem.head_dim_v)
    found = []
    if max(dims) > 128 and dims not in ((192, 128), (256, 256)):
        text = f"head dims are {dims}, up to 128, (192, 128) or (256, 256) are taken"
        found.append(Reason(ReasonCode.HEAD_DIM, text))
    spec = problem.spec
    if dims == (256, 256) and (spec.softcap is not None or spec.sink or spec.lse_grad):
        text = "head dim is 256, its backward takes no softcap, no sink and no gradient of lse"
        found.append(Reason(ReasonCode.HEAD_DIM, text))
    return found


def _small_blackwell(problem: Problem) -> list[Reason]:
    """What the kernels of compute capability 12 assert."""
    spec, found = problem.spec, []
    if spec.deterministic:
        text = "its backward is not deterministic on compute capability 12"
        found.append(Reason(ReasonCode.GUARANTEE, text))
    if spec.softcap is not None or spec.sink:
        text = "its backward takes no softcap and no sink on compute capability 12"
        found.append(Reason(ReasonCode.SOFTCAP, text))
    return found
