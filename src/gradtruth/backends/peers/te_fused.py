"""te_fused: TransformerEngine's fused_attn_fwd and fused_attn_bwd, cuDNN's attention without its module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gradtruth.backends.peers.slots import Slots, slots_of
from gradtruth.backends.peers.te_library import (
    FUSED,
    library_reasons,
    ragged_statistics,
    selection_reasons,
)
from gradtruth.backends.peers.te_terms import common_terms_reasons, terms_of
from gradtruth.backends.peers.views import empty_forward, empty_grads, has_no_elements
from gradtruth.core.layout import PACKED_DIM, canonical
from gradtruth.core.problem import Problem
from gradtruth.core.scores import sink_logit
from gradtruth.core.support import Claims, Reason, ReasonCode, Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["TeFused"]

_NAMES = ("fused_attn_fwd", "fused_attn_bwd", "FusedAttnBackend")


class TeFused:
    """Both functions with the F16_arbitrary_seqlen kernels; out and lse may be made elsewhere.

    Beside translating: outside every sequence the lse that is returned is -inf, and the out and lse that the
    backward gets are 0 there, as TransformerEngine's own forward fills its output; with dropout its generator is
    seeded with dropout_seed; max_logit, rounded to q's dtype by the function, is widened.
    """

    name = "te_fused"

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """Half precision without softcap, mask tensors, pre_scale bias and ALiBi, as far as its selection agrees."""
        found = [
            *library_reasons(device.type, FUSED, _NAMES),
            *common_terms_reasons(problem, "fused_attn_fwd"),
            *_own_reasons(problem),
        ]
        return Support(tuple(found or selection_reasons(problem, "fused")))

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """That it repeats its bits where it was told to, and that out and lse may come from elsewhere."""
        del device
        return Claims(
            deterministic=terms_of(problem).deterministic,
            global_dropout=not problem.spec.dropout_p,
            foreign_lse=True,
        )

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """out, lse and, when asked for, max_logit."""
        if has_no_elements(problem, inputs):
            return empty_forward(problem, inputs)
        call = _Call(problem, inputs)
        functions, q = import_module(FUSED), inputs.q
        out, aux, *rest = functions.fused_attn_fwd(
            True,  # noqa: FBT003 - is_training: without it there are no statistics
            *call.lengths(),
            *call.operands,
            q.dtype,
            functions.FusedAttnBackend["F16_arbitrary_seqlen"],
            attn_bias=inputs.bias,
            o_format=call.terms.qkv_format,
            rng_gen=call.generator(),
            softmax_offset=call.sink(),
            return_max_logit=problem.spec.max_logit,
            **call.options(),
        )
        return Forward(
            out=out.contiguous(),
            lse=call.slots.lse_of(aux[0]),
            max_logit=rest[0].float() if problem.spec.max_logit else None,
        )

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
        call = _Call(problem, inputs)
        functions, terms = import_module(FUSED), call.terms
        later = {
            "o_format": terms.qkv_format,
            "do_format": terms.qkv_format,
            "dqkv_layout": call.options()["qkv_layout"],
            "dqkv_dtype": inputs.q.dtype,
        }
        known = _parameters(functions.fused_attn_bwd)
        found = functions.fused_attn_bwd(
            *call.lengths(),
            *call.operands,
            call.slots.cleared(forward.out.contiguous()),
            dout.contiguous(),
            inputs.q.dtype,
            aux_ctx_tensors=call.saved(forward),
            fused_attention_backend=functions.FusedAttnBackend["F16_arbitrary_seqlen"],
            deterministic=terms.deterministic,
            **{name: later[name] for name in later if name in known},
            **call.options(),
        )
        return _grads(inputs, found, wanted)


def _own_reasons(problem: Problem) -> list[Reason]:
    found = []
    if problem.spec.alibi:
        text = "alibi_slopes are given, and fused_attn_fwd takes none: it knows only the paper's"
        found.append(Reason(ReasonCode.ALIBI, text))
    if problem.spec.softcap is not None:
        text = f"softcap is {problem.spec.softcap:g}, and fused_attn_fwd has none"
        found.append(Reason(ReasonCode.SOFTCAP, text))
    return found


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Releases differ in these arguments."""
    return frozenset(inspect.signature(function).parameters)


def _grads(inputs: Inputs, found: list[Tensor | None], wanted: Wanted) -> Grads:
    """What fused_attn_bwd returns, in the contract's form."""
    dq, dk, dv, dbias, dsink = found

    def kept(grad: Tensor | None, like: Tensor | None, *, want: bool) -> Tensor | None:
        if not want or like is None or grad is None:
            return None
        return grad.reshape(like.shape).to(like.dtype).contiguous()

    return Grads(
        dq=kept(dq, inputs.q, want=wanted.dq),
        dk=kept(dk, inputs.k, want=wanted.dk),
        dv=kept(dv, inputs.v, want=wanted.dv),
        dbias=kept(dbias, inputs.bias, want=wanted.dbias),
        dsoftmax_offset=kept(dsink, inputs.softmax_offset, want=wanted.dsoftmax_offset),
    )


class _Call:
    """What both functions are given."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self.problem, self.inputs = problem, inputs
        self.slots: Slots = slots_of(problem, inputs)
        self.packed = _shares_a_buffer(problem, inputs)
        self.terms = terms_of(problem, packed=self.packed)
        given = (inputs.q, inputs.k, inputs.v)
        # Kernels derive strides from the layout's name and take only the address.
        packed = {"3hd": given, "h3d": given, "2hd": given[1:], "h2d": given[1:]}
        kept = packed.get(problem.spec.packing, ()) if self.packed else ()
        self.operands = tuple(x if any(x is y for y in kept) else x.contiguous() for x in given)

    def lengths(self) -> tuple[int, int, Tensor, Tensor]:
        """Longest sequences and actual lengths cumulated."""
        slots = self.slots
        return slots.longest_q, slots.longest_kv, slots.cu_seqlens_q, slots.cu_seqlens_kv

    def options(self) -> dict[str, Any]:
        """Arguments that both functions take by name."""
        terms, slots = self.terms, self.slots
        thd = self.problem.layout == "thd"
        return {
            "cu_seqlens_q_padded": slots.offset_q if thd else slots.cu_seqlens_q,
            "cu_seqlens_kv_padded": slots.offset_kv if thd else slots.cu_seqlens_kv,
            "attn_scale": self.problem.scale,
            "dropout": self.problem.spec.dropout_p,
            "qkv_layout": terms.qkv_layout,
            "attn_bias_type": terms.attn_bias_type,
            "attn_mask_type": terms.attn_mask_type,
            "softmax_type": self.problem.spec.softmax,
            "window_size": terms.window_size,
            "bottom_right_diagonal": terms.bottom_right_diagonal,
        }

    def generator(self) -> torch.Generator | None:
        """One that starts at dropout_seed, with offset 0."""
        seed = self.inputs.dropout_seed
        if seed is None or not self.problem.spec.dropout_p:
            return None
        generator = torch.Generator(self.inputs.q.device)
        return generator.manual_seed(int(seed))

    def sink(self) -> Tensor | None:
        """fp32 [1, H, 1, 1]: zeros for off-by-one."""
        sink = sink_logit(self.problem, self.inputs)
        return None if sink is None else sink.reshape(1, -1, 1, 1)

    def saved(self, forward: Forward) -> list[Tensor]:
        """aux_ctx_tensors: statistics, state of the generator, bias, sink."""
        thd, q = self.problem.layout == "thd", self.inputs.q
        stats = self.slots.stats_of(forward.lse, by_sequence=thd and not ragged_statistics())
        state = torch.zeros(2, dtype=torch.int64, device=q.device)
        seed = self.inputs.dropout_seed
        if seed is not None and self.problem.spec.dropout_p:
            state[0] = seed
        return [stats, state, *(x for x in (self.inputs.bias, self.sink()) if x is not None)]


def _shares_a_buffer(problem: Problem, inputs: Inputs) -> bool:
    """Whether q, k and v (or k and v) lie in memory as the Spec's packing says."""
    packing = problem.spec.packing
    if packing == "separate":
        return False
    parts = (inputs.q, inputs.k, inputs.v) if packing in ("3hd", "h3d") else (inputs.k, inputs.v)
    first = canonical(parts[0], problem.layout)
    if packing in ("2hd", "h2d") and not inputs.q.is_contiguous():
        return False
    heads, dim, count = first.shape[2], first.shape[3], len(parts)
    by_head = PACKED_DIM[packing] == -2
    step = dim if by_head else heads * dim
    row, head = heads * dim * count, dim * count if by_head else dim
    return all(
        part.shape == parts[0].shape
        and part.stride() == _strides(part, row, head)
        and part.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
        and part.storage_offset() == parts[0].storage_offset() + at * step
        for at, part in enumerate(parts)
    )


def _strides(part: Tensor, row: int, head: int) -> tuple[int, ...]:
    """Strides of a slice of a contiguous buffer whose places are ``row`` elements apart."""
    outer = [row]
    for size in reversed(part.shape[1:-2]):
        outer.insert(0, outer[0] * size)
    return (*outer, head, 1)
