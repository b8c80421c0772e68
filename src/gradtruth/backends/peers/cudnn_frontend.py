"""cudnn: cuDNN's attention through cudnn-frontend's graphs, dense and thd, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from gradtruth.backends.peers.bands import common_reasons, is_full
from gradtruth.backends.peers.cudnn_graph import Workspace, check_support, run
from gradtruth.backends.peers.cudnn_terms import (
    Half,
    Strides,
    graph_terms,
    is_deterministic,
    metadata_strides,
    strides_of,
)
from gradtruth.backends.peers.installed import cuda_reasons, importable, not_installed
from gradtruth.backends.peers.operands import aligned, halves_only, head_dims
from gradtruth.backends.peers.refusals import unable
from gradtruth.backends.peers.slots import Slots, slots_of
from gradtruth.backends.peers.views import empty_forward, empty_grads, has_no_elements
from gradtruth.backends.protocol import Backend
from gradtruth.core.problem import Problem
from gradtruth.core.scores import sink_logit
from gradtruth.core.support import Claims, Reason, ReasonCode, Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["CudnnFrontend", "Results", "create"]

Results = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
"""Makes the memory of one result, contiguous: shape, dtype and device."""

_PROJECT = "nvidia-cudnn-frontend"
_ABLE = (ReasonCode.SOFTMAX, ReasonCode.BIAS, ReasonCode.MAX_LOGIT, ReasonCode.DROPOUT)
_HALVES: tuple[Half, Half] = ("forward", "backward")


def create(name: str) -> Backend:
    """The one backend of this module, with memory as PyTorch hands it out."""
    del name
    return CudnnFrontend()


class CudnnFrontend:
    """The library's own kernels; those that the front end brings in Python are left out.

    Beside translating: outside every sequence the lse that is returned is -inf, and the out and lse that the
    backward gets are 0 there.

    Args:
        workspace: makes the scratch memory of every run; default ``torch.empty``. Fill it to see whether a kernel
            reads what it has not written.
        results: makes the memory of every result. By default it is empty for dense layouts, and 0 for thd, whose
            gaps no kernel writes: so TransformerEngine does it too.
    """

    name = "cudnn"

    def __init__(self, workspace: Workspace | None = None, results: Results | None = None) -> None:
        self._workspace = _empty if workspace is None else workspace
        self._results = results

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """Half precision without softcap, mask tensors, ALiBi and pre_scale bias, as far as cuDNN agrees."""
        absent = cuda_reasons(device.type, (8, 0))
        names = ("pygraph", "create_handle", "set_stream", "diagonal_alignment")
        found = [
            *(not_installed("cudnn", _PROJECT) if absent else importable("cudnn", _PROJECT, names)),
            *absent,
            *_reasons(problem),
        ]
        if found or 0 in (problem.batch, problem.seqlen_q, problem.seqlen_kv):
            return Support(tuple(found))
        index = torch.cuda.current_device() if device.index is None else device.index
        return Support(_refusals(problem, index))

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """That it repeats its bits where it was told to, and that out and lse may come from elsewhere."""
        del device
        return Claims(
            deterministic=is_deterministic(problem),
            global_dropout=not problem.spec.dropout_p,
            foreign_lse=True,
        )

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """out, lse and, when asked for, max_logit."""
        if has_no_elements(problem, inputs):
            return empty_forward(problem, inputs)
        call = _Call(problem, inputs)
        q = call.given["q"]
        out = self._make(problem, (*q.shape[:-1], problem.head_dim_v), q)
        stats = self._make(problem, call.rows(), q, torch.float32)
        tensors = {**call.given, "o": out, "stats": stats}
        if problem.spec.max_logit:
            tensors["max"] = self._make(problem, call.rows(), q, torch.float32)
        self._run("forward", call, tensors)
        max_logit = None
        if problem.spec.max_logit:
            top = call.slots.rows_of(tensors["max"])
            max_logit = top.masked_fill(call.slots.outside[:, None], -torch.inf).amax((0, 2))
        return Forward(out=out, lse=call.slots.lse_of(stats), max_logit=max_logit)

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
        given = call.given
        tensors = {
            **given,
            "o": call.slots.cleared(forward.out.contiguous()),
            "stats": call.slots.stats_of(forward.lse),
            "do": aligned(dout),
        }
        for name in ("q", "k", "v", "bias", "sink"):
            if name in given:
                like = given[name]
                tensors[f"d{name}"] = self._make(problem, tuple(like.shape), like, like.dtype)
        self._run("backward", call, tensors)
        dsink = tensors.get("dsink")
        if inputs.softmax_offset is None or dsink is None:
            dsink = None
        else:
            dsink = dsink.reshape(-1).to(inputs.softmax_offset.dtype)
        return Grads(
            dq=tensors["dq"] if wanted.dq else None,
            dk=tensors["dk"] if wanted.dk else None,
            dv=tensors["dv"] if wanted.dv else None,
            dbias=tensors.get("dbias") if wanted.dbias else None,
            dsoftmax_offset=dsink if wanted.dsoftmax_offset else None,
        )

    def _make(
        self,
        problem: Problem,
        shape: tuple[int, ...],
        like: Tensor,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        dtype = like.dtype if dtype is None else dtype
        if self._results is not None:
            return self._results(shape, dtype, like.device)
        make = torch.zeros if problem.layout == "thd" else torch.empty
        return make(shape, dtype=dtype, device=like.device)

    def _run(self, half: Half, call: _Call, tensors: dict[str, Tensor]) -> None:
        slots = call.slots
        longest = (slots.longest_q, slots.longest_kv)
        strides: dict[str, Strides] = {}
        for name, bound in (("q", 0), ("k", 1), ("v", 1), ("do", 0)):
            if name in tensors:
                strides[name] = strides_of(tensors[name], call.problem, longest[bound])
        terms = graph_terms(call.problem, half, strides, longest)
        if call.problem.layout == "thd":
            kind = torch.int64 if terms.wide_offsets else torch.int32
            for tensor in terms.tensors:
                if tensor.offset is not None:
                    places = slots.offset_kv if tensor.name in _OF_KEYS else slots.offset_q
                    tensors[tensor.offset] = (places.long() * tensor.stride[2]).to(kind)
        run(terms, tensors, self._workspace, call.device)


_OF_KEYS = ("k", "v", "dk", "dv")


def _empty(size: int, device: torch.device) -> Tensor:
    return torch.empty(max(1, size), dtype=torch.uint8, device=device)


class _Call:
    """What both halves are given."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self.problem, self.device = problem, inputs.q.device
        self.slots: Slots = slots_of(problem, inputs)
        self.given = {name: aligned(getattr(inputs, name)) for name in ("q", "k", "v")}
        if inputs.bias is not None:
            self.given["bias"] = inputs.bias.contiguous()
        sink = sink_logit(problem, inputs)
        if sink is not None:
            self.given["sink"] = sink.reshape(1, -1, 1, 1).contiguous()
        if not is_full(problem):
            self.given |= {"length_q": self.slots.length_q, "length_kv": self.slots.length_kv}
        if problem.spec.dropout_p:
            seed = torch.as_tensor(inputs.dropout_seed).reshape(1, 1, 1, 1)
            self.given |= {"seed": seed.contiguous(), "philox_offset": torch.zeros_like(seed)}

    def rows(self) -> tuple[int, ...]:
        """Shape of the statistics."""
        problem = self.problem
        if problem.layout == "thd":
            return problem.seqlen_q, problem.num_heads, 1
        return problem.batch, problem.num_heads, problem.seqlen_q, 1


def _reasons(problem: Problem) -> list[Reason]:
    """What metadata alone says against."""
    spec, shape = problem.spec, problem.bias_shape
    found = [
        *common_reasons(problem, "cuDNN"),
        *unable(problem, _ABLE),
        *halves_only(problem),
        *head_dims(problem, 8, 256, equal=False),
    ]
    if spec.lengths == "padding_mask":
        text = "lengths are given as a padding mask, cuDNN takes numbers: give cu_seqlens"
        found.append(Reason(ReasonCode.LENGTHS, text))
    texts = []
    if spec.bias == "pre_scale":
        texts.append("bias is pre_scale, cuDNN adds it after the scale only")
    if spec.bias != "none" and problem.bias_dtype != problem.dtype:
        texts.append(f"bias is {problem.bias_dtype}, it must have q's dtype, {problem.dtype}")
    if shape is not None:
        all_places = shape[2:] == (problem.seqlen_q, problem.seqlen_kv)
        if not all_places or problem.layout == "thd":
            texts.append(
                f"bias has shape {list(shape)}, the last two dims must be all {problem.seqlen_q} x "
                f"{problem.seqlen_kv} places of a dense layout for its gradient"
            )
    found += [Reason(ReasonCode.BIAS, text) for text in texts]
    if spec.dropout_p == 1.0:
        found.append(
            Reason(ReasonCode.DROPOUT, "dropout_p is 1, and weights are scaled by 1 / (1 - p)")
        )
    if spec.sink and spec.max_logit:
        text = f"max_logit is asked for with softmax_type {spec.softmax}, and cuDNN's maximum includes the sink"
        found.append(Reason(ReasonCode.MAX_LOGIT, text))
    if spec.sink and 0 in (problem.batch, problem.seqlen_q, problem.seqlen_kv):
        text = f"there is nothing to attend and softmax_type is {spec.softmax}, cuDNN is not called then"
        found.append(Reason(ReasonCode.SIZE, text))
    return found


@lru_cache(maxsize=1024)
def _refusals(problem: Problem, index: int) -> tuple[Reason, ...]:
    """Ask cuDNN for both halves, with the strides of contiguous tensors and the longest sequences there may be."""
    longest = []
    for places, bound in (
        (problem.seqlen_q, problem.max_seqlen_q),
        (problem.seqlen_kv, problem.max_seqlen_kv),
    ):
        known = bound if problem.layout == "thd" else None
        longest.append(max(1, places if known is None else min(places, known)))
    strides = metadata_strides(problem)
    found = []
    for half in _HALVES:
        terms = graph_terms(problem, half, strides, (longest[0], longest[1]))
        said = check_support(terms, index)
        if said is not None:
            found.append(Reason(ReasonCode.VERSION, f"cuDNN refuses the {half}: {said}"))
    return tuple(found)
