"""te_module: TransformerEngine's DotProductAttention and PyTorch's autograd through it, as models use it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gradtruth.backends.peers.own_lse import own_lse
from gradtruth.backends.peers.rerun import differentiate
from gradtruth.backends.peers.slots import slots_of
from gradtruth.backends.peers.te_library import MODULE, library_reasons, selection_reasons
from gradtruth.backends.peers.te_terms import Terms, common_terms_reasons, terms_of
from gradtruth.backends.peers.views import empty_forward, empty_grads, has_no_elements
from gradtruth.core.problem import Problem
from gradtruth.core.support import Claims, Reason, ReasonCode, Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["TeModule"]

_NAME = "DotProductAttention"


class TeModule:
    """The module, made for every call, with the flash or fused kernel that its own selection chooses.

    Beside translating: the module returns no lse, so that is computed here from the definition and takes no
    gradient; with dropout PyTorch's generator is seeded with dropout_seed and put back; max_logit, which is in q's
    dtype, is widened.
    """

    name = "te_module"

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """Half precision without mask tensors, as far as its selection finds a flash or fused kernel."""
        found = [
            *library_reasons(device.type, MODULE, (_NAME,)),
            *common_terms_reasons(problem, _NAME),
        ]
        return Support(
            tuple(found or _softcap(problem) or selection_reasons(problem, "flash or fused"))
        )

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """That it repeats its bits where it was told to. Not foreign_lse: the backward runs the forward again."""
        del device
        return Claims(
            deterministic=terms_of(problem).deterministic, global_dropout=not problem.spec.dropout_p
        )

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """out, lse and, when asked for, max_logit."""
        if has_no_elements(problem, inputs):
            return empty_forward(problem, inputs)
        with torch.no_grad():
            out, max_logit = _run(problem, inputs)
        return Forward(out=out.contiguous(), lse=own_lse(problem, inputs), max_logit=max_logit)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Grads:
        """The wanted gradients, by autograd; ``forward`` is not read. Problems with a dlse are refused."""
        del forward, dlse
        if has_no_elements(problem, inputs):
            return empty_grads(inputs, wanted)
        return differentiate(
            lambda p, given: (_run(p, given)[0], None), problem, inputs, dout, None, wanted
        )


def _softcap(problem: Problem) -> list[Reason]:
    """A reason where the release has no softcap."""
    if problem.spec.softcap is None:
        return []
    module = getattr(import_module(MODULE), _NAME)
    if "softcap" in inspect.signature(module.__init__).parameters:
        return []
    text = f"softcap is {problem.spec.softcap:g}, and the installed {_NAME} has none"
    return [Reason(ReasonCode.SOFTCAP, text)]


def _run(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """out in q's storage layout, on autograd's tape, and max_logit."""
    terms = terms_of(problem)
    arguments = (inputs.q, inputs.k, inputs.v)
    named = {**_masking(terms), **_lengths(problem, inputs), **_bias(terms, inputs)}
    module = _module(problem, terms)
    with _seeded(problem, inputs):
        if inputs.softmax_offset is None:
            found = module(*arguments, **named)
        else:
            # The parameter is the offset itself, so that its gradient is the offset's.
            state = {"softmax_offset": inputs.softmax_offset}
            found = torch.func.functional_call(module, state, arguments, named)
    out, max_logit = found if problem.spec.max_logit else (found, None)
    out = out.unflatten(-1, (problem.num_heads, problem.head_dim_v))
    return out, None if max_logit is None else max_logit.detach().float()


def _module(problem: Problem, terms: Terms) -> torch.nn.Module:
    spec = problem.spec
    capped: dict[str, Any] = {} if spec.softcap is None else {"softcap": spec.softcap}
    with _deterministic(wanted=terms.deterministic):
        return getattr(import_module(MODULE), _NAME)(
            problem.num_heads,
            (problem.head_dim_qk, problem.head_dim_v),
            num_gqa_groups=problem.num_gqa_groups,
            attention_dropout=spec.dropout_p,
            qkv_format=terms.qkv_format,
            attention_type=terms.attention_type,
            softmax_scale=problem.scale,
            softmax_type=spec.softmax,
            return_max_logit=spec.max_logit,
            **_masking(terms),
            **capped,
        )


def _masking(terms: Terms) -> dict[str, Any]:
    return {
        "attn_mask_type": terms.attn_mask_type,
        "window_size": terms.window_size,
        "bottom_right_diagonal": terms.bottom_right_diagonal,
    }


def _lengths(problem: Problem, inputs: Inputs) -> dict[str, Any]:
    """Nothing for full sequences; offsets only where the caller gave some, for then gaps are looked for."""
    if "padding" not in terms_of(problem).attn_mask_type:
        return {}
    slots = slots_of(problem, inputs)
    found: dict[str, Any] = {
        "cu_seqlens_q": slots.cu_seqlens_q,
        "cu_seqlens_kv": slots.cu_seqlens_kv,
    }
    if problem.layout == "thd":
        found |= {"max_seqlen_q": slots.longest_q, "max_seqlen_kv": slots.longest_kv}
        apart = (
            inputs.cu_seqlens_q_padded,
            inputs.cu_seqlens_kv_padded,
            problem.max_seqlen_q,
            problem.max_seqlen_kv,
        )
        if any(given is not None for given in apart):
            found |= {
                "cu_seqlens_q_padded": slots.offset_q,
                "cu_seqlens_kv_padded": slots.offset_kv,
            }
    return found


def _bias(terms: Terms, inputs: Inputs) -> dict[str, Any]:
    if terms.attn_bias_type == "no_bias":
        return {}
    given = {"core_attention_bias_type": terms.attn_bias_type}
    if terms.attn_bias_type == "alibi":
        return {**given, "alibi_slopes": inputs.alibi_slopes}
    return {**given, "core_attention_bias": inputs.bias}


@contextmanager
def _deterministic(*, wanted: bool) -> Iterator[None]:
    """The module reads PyTorch's switch when it is made, and has no argument for it."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True, warn_only=True)  # noqa: FBT003 - its only form
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextmanager
def _seeded(problem: Problem, inputs: Inputs) -> Iterator[None]:
    """PyTorch's generator of the device at dropout_seed, and as it was afterwards."""
    if not problem.spec.dropout_p:
        yield
        return
    device = inputs.q.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(inputs.dropout_seed.item())
        yield
