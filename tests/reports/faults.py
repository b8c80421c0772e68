"""The reports' faults, to be planted into a right backend: functions around its forward or its backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradtruth.core.extents import Extents
from gradtruth.core.tensors import Forward, Grads

Half = Callable[..., Any]


def _spec(problem: Any, **changes: Any) -> Any:
    return replace(problem, spec=replace(problem.spec, **changes))


def _packed(tensor: Tensor) -> Tensor:
    """The tensor as a kernel sees it that believes it contiguous."""
    like = torch.empty(tensor.shape, device="meta")
    return tensor.as_strided(tensor.shape, like.stride())


def tail_rows(name: str, value: float = math.nan) -> Half:
    """A gradient of rows past the last sequence is what memory held."""

    def backward(right: Half, problem: Any, inputs: Any, *rest: Any) -> Grads:
        found = right(problem, inputs, *rest)
        getattr(found, name)[int(inputs.cu_seqlens_q[-1]) :] = value
        return found

    return backward


class Stale:
    """dk and dv that nothing contributes to are what the call before left."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []

    def __call__(self, right: Half, *given: Any) -> Grads:
        found = right(*given)
        now = [found.dk, found.dv]
        if self.before and self.before[0].shape == now[0].shape:
            now = [torch.where(x == 0, old, x) for x, old in zip(now, self.before, strict=True)]
        self.before = now
        return replace(found, dk=now[0], dv=now[1])


def last_rows_of_dq(right: Half, *given: Any) -> Grads:
    """The last rows lie past the end of the accumulator and come from its start."""
    found = right(*given)
    found.dq[-4:] = found.dq[:4]
    return found


def first_of_dq(right: Half, *given: Any) -> Grads:
    """dq of packed sequences points elsewhere."""
    found = right(*given)
    return replace(found, dq=found.dq.roll(1, 0)) if given[0].layout == "thd" else found


def one_token_batch_stride(right: Half, problem: Any, inputs: Any) -> Forward:
    q = inputs.q
    stride = (q.stride(1), *q.stride()[1:])
    return right(problem, replace(inputs, q=q.as_strided(q.shape, stride)))


def unwritten_dk(right: Half, problem: Any, inputs: Any, *rest: Any) -> Grads:
    """Sequences without a query are skipped, their dk and dv never written."""
    found = right(problem, inputs, *rest)
    cu_q, cu_kv = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_kv.tolist()
    for n in range(len(cu_q) - 1):
        if cu_q[n] == cu_q[n + 1]:
            found.dk[cu_kv[n] : cu_kv[n + 1]] = 0.25
    return found


def nan_dq(right: Half, *given: Any) -> Grads:
    found = right(*given)
    return replace(found, dq=found.dq * math.nan)


def empty_lanes_score_0(
    right: Half, problem: Any, inputs: Any, forward: Forward, *rest: Any
) -> Grads:
    """exp(0 - lse) of lanes past the last key is Inf, times 0 is NaN."""
    found = right(problem, inputs, forward, *rest)
    lanes = torch.exp(-forward.lse) * 0.0
    if problem.seqlen_kv % 128:
        found.dq.add_(lanes.transpose(1, 2).unsqueeze(-1).to(found.dq.dtype))
    return found


def nan_where_nothing_is_seen(right: Half, *given: Any) -> Forward:
    found = right(*given)
    empty = (found.lse == -torch.inf).transpose(1, 2).unsqueeze(-1)
    return replace(found, out=found.out.masked_fill(empty, math.nan))


def changed_spec(half: str, change: Callable[[Any], dict[str, Any]]) -> Half:
    """A half that computes another Spec."""

    def run(right: Half, problem: Any, *rest: Any) -> Any:
        return right(_spec(problem, **change(problem)), *rest)

    run.__name__ = half
    return run


def one_more_to_the_left(problem: Any) -> dict[str, Any]:
    return {} if problem.spec.left is None else {"left": problem.spec.left + 1}


def right_bound_of_all_keys(problem: Any) -> dict[str, Any]:
    if problem.spec.right == 0:
        return {}
    wide = problem.seqlen_kv if problem.spec.right is None else problem.spec.right
    return {"right": min(wide, problem.seqlen_kv), "alignment": "bottom_right"}


def empty_band(right: Half, problem: Any, inputs: Any) -> Forward:
    """-1 as a number: the band is empty."""
    found = right(problem, inputs)
    if problem.spec.right == 0 and problem.spec.left is None:
        return replace(
            found, out=torch.zeros_like(found.out), lse=torch.full_like(found.lse, -torch.inf)
        )
    return found


def interleaved_heads(right: Half, problem: Any, inputs: Any, forward: Forward, dout: Tensor, dlse: Any,
                      wanted: Any) -> Grads:  # fmt: skip
    """The backward takes head h to belong to KV head h mod G."""
    heads, groups = problem.num_heads, problem.num_gqa_groups
    order = torch.arange(heads).view(-1, groups).t().flatten()
    given = replace(inputs, q=inputs.q[:, :, order])
    mixed = Forward(out=forward.out[:, :, order], lse=forward.lse[:, order])
    return right(problem, given, mixed, dout[:, :, order], dlse, wanted)


def last_head_wins(right: Half, problem: Any, inputs: Any, forward: Forward, dout: Tensor, dlse: Any,
                   wanted: Any) -> Grads:  # fmt: skip
    """dk and dv of a group are those of its last head."""
    found = right(problem, inputs, forward, dout, dlse, wanted)
    last = torch.arange(problem.num_heads) % problem.group_size == problem.group_size - 1
    kept = dout * last[:, None]
    own = right(
        problem, inputs, replace(forward, out=forward.out * last[:, None]), kept, dlse, wanted
    )
    return replace(found, dk=own.dk, dv=own.dv)


def delta_of_the_first(right: Half, problem: Any, inputs: Any, forward: Forward, dout: Tensor, dlse: Any,
                       wanted: Any) -> Grads:  # fmt: skip
    """delta of batch item 0 serves all."""
    first = forward.out[:, :1].expand_as(forward.out).contiguous()
    return right(problem, inputs, replace(forward, out=first), dout, dlse, wanted)


def over_the_next_head(right: Half, *given: Any) -> Grads:
    """A tile padded to 128 columns is stored whole: over the first columns of the next head."""
    found = right(*given)
    over = 128 - found.dk.shape[-1]
    found.dk[..., 1:, :over] = 0.0
    return found


def first_columns(right: Half, problem: Any, inputs: Any) -> Forward:
    keep = torch.arange(problem.head_dim_qk) < 64
    return right(problem, replace(inputs, q=inputs.q * keep, k=inputs.k * keep))


def last_column_of_dv(right: Half, *given: Any) -> Grads:
    found = right(*given)
    if given[0].head_dim_v != given[0].head_dim_qk:
        found.dv[:, ::16, :, -1] *= 1.5
    return found


def columns_of_dq(right: Half, *given: Any) -> Grads:
    found = right(*given)
    found.dq[..., given[0].head_dim_v :] = 0.0
    return found


def other_seed(right: Half, problem: Any, inputs: Any, *rest: Any) -> Grads:
    return right(problem, replace(inputs, dropout_seed=inputs.dropout_seed + 1), *rest)


def plain_ds(right: Half, problem: Any, *rest: Any) -> Grads:
    """dP is not dropped."""
    found, plain = right(problem, *rest), right(_spec(problem, dropout_p=0.0), *rest)
    return replace(found, dq=plain.dq, dk=plain.dk)


def scaled_bias(right: Half, problem: Any, inputs: Any, *rest: Any) -> Any:
    return right(problem, replace(inputs, bias=inputs.bias * problem.scale), *rest)


def dbias_of_one_item(right: Half, *given: Any) -> Grads:
    """dbias is not summed over the batch."""
    found = right(*given)
    return replace(
        found, dbias=found.dbias / given[0].batch if found.dbias.shape[0] == 1 else found.dbias
    )


def turned_slopes(right: Half, problem: Any, inputs: Any, *rest: Any) -> Any:
    return right(problem, replace(inputs, alibi_slopes=-inputs.alibi_slopes), *rest)


class FirstOption:
    """What was compiled for the first value of an option serves all."""

    def __init__(self, name: str) -> None:
        self.name, self.first = name, None

    def __call__(self, right: Half, problem: Any, *rest: Any) -> Any:
        self.first = getattr(problem.spec, self.name) if self.first is None else self.first
        return right(_spec(problem, **{self.name: self.first}), *rest)


def no_sink_gradient(right: Half, *given: Any) -> Grads:
    found = right(*given)
    return replace(found, dsoftmax_offset=found.dsoftmax_offset * 0)


def nan_dq_of_empty_rows(
    right: Half, problem: Any, inputs: Any, forward: Forward, *rest: Any
) -> Grads:
    found = right(problem, inputs, forward, *rest)
    return replace(found, dq=torch.where(found.dq == 0, math.nan, found.dq))


def lse_of_base_2(right: Half, *given: Any) -> Forward:
    found = right(*given)
    return replace(found, lse=found.lse * math.log(2))


def lse_of_first_heads(right: Half, problem: Any, inputs: Any) -> Forward:
    found = right(problem, inputs)
    first = torch.arange(problem.num_heads) % problem.group_size == 0
    return replace(found, lse=torch.where(first, found.lse, math.nan))


def dout_as_contiguous(
    right: Half, problem: Any, inputs: Any, forward: Forward, dout: Tensor, *rest: Any
) -> Grads:
    fits = dout.untyped_storage().nbytes() >= dout.numel() * dout.element_size()
    return right(problem, inputs, forward, _packed(dout) if fits else dout, *rest)


def keys_as_contiguous(right: Half, problem: Any, inputs: Any, *rest: Any) -> Any:
    flat = torch.empty(0, dtype=inputs.k.dtype).set_(inputs.k.untyped_storage())
    k = flat[inputs.k.storage_offset() :][: inputs.k.numel()]
    return right(problem, replace(inputs, k=k.view(inputs.k.shape)), *rest)


def later_items_are_0(right: Half, *given: Any) -> Forward:
    found = right(*given)
    found.out[1:] = 0
    return found


def maximum_stays_0(right: Half, *given: Any) -> Forward:
    found = right(*given)
    low = (found.lse < -88).transpose(1, 2).unsqueeze(-1)
    return replace(found, out=found.out.masked_fill(low, 0.0))


class Drift:
    """Bits that differ from run to run."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, right: Half, *given: Any) -> Grads:
        found, self.runs = right(*given), self.runs + 1
        found.dq[0, -1, 0, 0] *= 1 + 2e-3 * (self.runs % 2)
        return found


class FirstMask:
    """Lengths are computed once."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None

    def __call__(self, right: Half, problem: Any, inputs: Any) -> Forward:
        if inputs.padding_mask_kv is not None:
            self.mask = inputs.padding_mask_kv if self.mask is None else self.mask
            inputs = replace(inputs, padding_mask_kv=self.mask)
        return right(problem, inputs)


def keys_of_step_0(right: Half, problem: Any, inputs: Any, *rest: Any) -> Grads:
    """The backward of a tile reads, and writes, where the first tile's keys are."""
    if inputs.extents is not None:
        extents = Extents.unpack(inputs.extents)
        extents = replace(extents, start_kv=extents.start_kv * 0)
        inputs = replace(inputs, extents=extents.pack())
    return right(problem, inputs, *rest)


def scale_of_all_values(right: Half, problem: Any, inputs: Any) -> Forward:
    """v is rounded to 240 steps of its largest element, wherever that is."""
    step = inputs.v.abs().max().float() / 240
    return right(problem, replace(inputs, v=((inputs.v / step).round() * step).to(inputs.v.dtype)))


def lengths_ignored(right: Half, problem: Any, inputs: Any, *rest: Any) -> Any:
    full = inputs.cu_seqlens_q
    return right(problem, replace(inputs, cu_seqlens_kv=full), *rest)


def one_segment(right: Half, problem: Any, inputs: Any, *rest: Any) -> Any:
    if inputs.cu_seqlens_q is None:
        return right(problem, inputs, *rest)
    cu = inputs.cu_seqlens_q.clone()
    cu[1:] = cu[-1]
    return right(problem, replace(inputs, cu_seqlens_q=cu, cu_seqlens_kv=cu), *rest)


def garbage_in_padding(right: Half, problem: Any, inputs: Any, *rest: Any) -> Grads:
    """A tile that is all padding returns its workspace."""
    found = right(problem, inputs, *rest)
    if inputs.extents is not None and not found.dk.any():
        found.dk.fill_(1e4)
    return found


def one_query_is_garbage(right: Half, problem: Any, inputs: Any) -> Forward:
    found = right(problem, inputs)
    if problem.seqlen_q == 1 and problem.batch > 1:
        found.out[1:] = found.out[:1]
    return found


def merged_through_exp(right: Half, *given: Any) -> Forward:
    """lse of a tile has been through exp."""
    found = right(*given)
    lse = torch.exp(found.lse).log() if given[1].extents is not None else found.lse
    return replace(found, lse=lse)
