"""flex: torch's FlexAttention, with the problem written as a score_mod and a mask_mod."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from gradtruth.backends.peers.places import Places, places_of, visible_mask
from gradtruth.backends.peers.refusals import unable
from gradtruth.backends.peers.rerun import differentiate, widened
from gradtruth.backends.peers.views import (
    empty_forward,
    empty_grads,
    from_heads_first,
    from_lse,
    has_no_elements,
    heads_first,
)
from gradtruth.backends.protocol import Backend
from gradtruth.core.precision import full_precision
from gradtruth.core.problem import Problem
from gradtruth.core.support import Claims, Reason, ReasonCode, Support
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["block_mask_of", "create"]

_ABLE = (
    ReasonCode.SOFTCAP,
    ReasonCode.SOFTMAX,
    ReasonCode.BIAS,
    ReasonCode.ALIBI,
    ReasonCode.MAX_LOGIT,
    ReasonCode.LSE_GRAD,
)
_HALVES = ("bfloat16", "float16")
_LN2 = math.log(2.0)
_BLOCK = 128  # queries and keys of a block of the block mask, as torch takes them by default
_WIDEST_FP32 = 128  # 192 asks for 338 KiB on an H200, which has 227
_ScoreMod = Callable[..., Tensor]
_MaskMod = Callable[..., Tensor]


def create(name: str) -> Backend:
    """The one backend of this module."""
    return Flex(name)


class Flex:
    """FlexAttention: compiled on CUDA, its dense fallback on the CPU.

    The public function has no backward on the CPU; the operator below it has one, and is called directly there,
    on inputs widened to fp32, because the fallback rounds scores to the input dtype. A sink is applied to (out,
    lse), as the function's users do.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def supports(self, problem: Problem, device: torch.device) -> Support:
        """Everything but dropout and fp64 on the CPU; less on CUDA."""
        found = [*_missing(), *unable(problem, _ABLE)]
        if problem.dtype == "float64":
            text = (
                "dtype is float64, up to float32 is taken: lse passes through base 2, rounded twice"
            )
            found.append(Reason(ReasonCode.DTYPE, text))
        if device.type == "cuda":
            found += _cuda_reasons(problem)
        elif device.type != "cpu":
            text = f"device is {device.type}, CPU or CUDA is needed"
            found.append(Reason(ReasonCode.DEVICE, text))
        return Support(tuple(found))

    def claims(self, problem: Problem, device: torch.device) -> Claims:
        """Not foreign_lse: the backward runs the forward again. Hidden NaN reaches valid places through 0 * NaN."""
        cpu = device.type == "cpu"
        return Claims(
            pure=cpu,
            shielded=cpu and not problem.spec.ragged,
            exact_zeros=cpu,
            deterministic=cpu,
            global_dropout=True,
            no_sync=cpu,
            graph_capturable=cpu,
        )

    def forward(self, problem: Problem, inputs: Inputs) -> Forward:
        """out, lse and, when asked for, max_logit."""
        if has_no_elements(problem, inputs):
            return _without_keys(problem, inputs)
        out, lse, top = _attend(problem, inputs)
        max_logit = top.amax(dim=(0, 2)).float() if problem.spec.max_logit else None
        return Forward(
            out=out.to(inputs.q.dtype), lse=from_lse(lse, problem.spec.layout), max_logit=max_logit
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
        """The wanted gradients, by autograd; ``forward`` is not read."""
        del forward
        if has_no_elements(problem, inputs):
            return empty_grads(inputs, wanted)
        return differentiate(
            lambda p, given: _attend(p, given)[:2], problem, inputs, dout, dlse, wanted
        )


def _missing() -> list[Reason]:
    """Reasons of a torch without the parts of FlexAttention that are called."""
    try:
        from torch._higher_order_ops.flex_attention import flex_attention  # noqa: F401
        from torch.nn.attention.flex_attention import AuxRequest  # noqa: F401
    except ImportError as error:
        return [Reason(ReasonCode.VERSION, f"torch {torch.__version__}: {error}")]
    return []


def _cuda_reasons(problem: Problem) -> list[Reason]:
    found = []
    for name in ("head_dim_qk", "head_dim_v"):
        value = getattr(problem, name)
        if not 16 <= value <= 256:
            found.append(Reason(ReasonCode.HEAD_DIM, f"{name} is {value}, 16 to 256 are compiled"))
    widest = max(problem.head_dim_qk, problem.head_dim_v)
    if problem.dtype == "float32" and widest > _WIDEST_FP32:
        text = f"head dim is {widest} in float32, up to {_WIDEST_FP32} its tiles fit into shared memory"
        found.append(Reason(ReasonCode.HEAD_DIM, text))
    if problem.spec.sink and problem.dtype in _HALVES:
        text = f"softmax_type is {problem.spec.softmax}, and out is rounded to {problem.dtype} before the sink"
        found.append(Reason(ReasonCode.SOFTMAX, text))
    return found


@dataclass(frozen=True, slots=True)
class _Mods:
    """score_mod and mask_mod take their tensors after the indices, so that autograd sees them."""

    score: _ScoreMod
    score_tensors: tuple[Tensor, ...]
    mask: _MaskMod
    mask_tensors: tuple[Tensor, ...]


def _attend(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """out in the storage layout, lse [B', H, S], and the largest score per row [B', H, S], sink included in lse."""
    layout = problem.spec.layout
    on_cpu = inputs.q.device.type == "cpu"
    wide = widened(problem, inputs)
    if not on_cpu:
        wide = replace(wide, q=inputs.q, k=inputs.k, v=inputs.v)
    q, k, v = (heads_first(x, layout) for x in (wide.q, wide.k, wide.v))
    places = places_of(problem, inputs)
    visible = visible_mask(problem, inputs, places)
    mods = _mods(problem, wide, places, visible if on_cpu else None)
    with full_precision(problem, q.device):
        if on_cpu:
            out, lse, top = _fallback(problem, (q, k, v), mods)
        else:
            out, lse, top = _compiled(problem, (q, k, v), mods, visible)
    lse = torch.where(top > -torch.inf, lse, -torch.inf)
    if problem.spec.sink:
        out, lse = _with_sink(problem, inputs, (out, lse), places)
    return from_heads_first(out, layout), lse, top.detach()


def _mods(problem: Problem, inputs: Inputs, places: Places, visible: Tensor | None) -> _Mods:
    """The mods; with ``visible`` the mask is looked up in it, which the dense fallback does far faster."""
    score, score_tensors = _score_mod(problem, inputs, places)
    if visible is None:
        mask, mask_tensors = _mask_mod(problem, inputs, places)
    else:
        mask, mask_tensors = _table_mod(visible)
    return _Mods(score, score_tensors, mask, mask_tensors)


def _table_mod(visible: Tensor) -> tuple[_MaskMod, tuple[Tensor, ...]]:
    """A mask_mod that reads bool [B', 1|H, S, T]; an index of four would take vmap several times as long."""
    _, heads, rows, columns = visible.shape

    def mask_mod(b: Tensor, h: Tensor, m: Tensor, n: Tensor, table: Tensor) -> Tensor:
        at = ((b * heads + h if heads > 1 else b) * rows + m) * columns + n
        return table.index_select(0, at.view(1)).view(())

    return mask_mod, (visible.flatten(),)


def _mask_mod(
    problem: Problem, inputs: Inputs, places: Places
) -> tuple[_MaskMod, tuple[Tensor, ...]]:
    band = problem.spec.band
    tensors = [places.sequence_q, places.sequence_kv, places.i, places.j, places.diagonal]
    picks = None
    if inputs.attention_mask is not None:
        pick, indices = _lookup(inputs.attention_mask, places)
        picks = pick
        tensors += indices

    def mask_mod(b: Tensor, h: Tensor, m: Tensor, n: Tensor, *given: Tensor) -> Tensor:
        sequence_q, sequence_kv, i, j, diagonal, *rest = given
        visible = sequence_q[b, m] == sequence_kv[b, n]
        inside = band.visible(i[b, m], j[b, n], diagonal[b, m])
        if inside is not None:
            visible = visible & inside
        if picks is not None:
            visible = visible & ~picks(rest, b, h, m, n)
        return visible

    return mask_mod, tuple(tensors)


def _score_mod(
    problem: Problem, inputs: Inputs, places: Places
) -> tuple[_ScoreMod, tuple[Tensor, ...]]:
    """x = softcap(scale * (q . k + pre)) + post - slope * distance, given scale * q . k."""
    spec, scale = problem.spec, problem.scale
    tensors: list[Tensor] = []
    pick = None
    if inputs.bias is not None:
        # On the CPU in fp64, so that its gradient, a sum over whatever was broadcast, is rounded once.
        on_cpu = inputs.bias.device.type == "cpu"
        bias = inputs.bias.double() if on_cpu else _of_every_head(inputs.bias, problem.num_heads)
        pick, tensors = _lookup(bias, places)
    biased = len(tensors)
    slopes = inputs.alibi_slopes
    if slopes is not None:
        slopes = slopes.to(problem.accumulate_dtype)
        owner = places.sequence_q.clamp(min=0)
        per_query = slopes[owner] if slopes.dim() == 2 else slopes.expand(*owner.shape, -1)
        tensors = [*tensors, per_query, places.i + places.diagonal, places.j]

    def score_mod(
        score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor, *given: Tensor
    ) -> Tensor:
        bias = None if pick is None else pick(given[:biased], b, h, m, n).to(score.dtype)
        if bias is not None and spec.bias == "pre_scale":
            score = score + bias * scale
        if spec.softcap is not None:
            score = spec.softcap * torch.tanh(score / spec.softcap)
        if bias is not None and spec.bias == "post_scale":
            score = score + bias
        if slopes is not None:
            per_query, centre, j = given[biased:]
            score = score - per_query[b, m, h] * (centre[b, m] - j[b, n]).abs()
        return score

    return score_mod, tuple(tensors)


def _of_every_head(bias: Tensor, heads: int) -> Tensor:
    """A bias with a head dim longer than 1: torch 2.11 can't compile its gradient where each index was looked up.

    The head is the one index that is not; in a dim of one it would be dropped.
    """
    if bias.shape[1] > 1 or bias.numel() == 0:
        return bias
    return bias.expand(-1, max(heads, 2), -1, -1).contiguous()


def _lookup(tensor: Tensor, places: Places) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """How to read a bias or attention_mask [1|B, 1|H, 1|S, 1|T] at storage places, and the tensors for it."""
    if tensor.numel() == 0:
        # No sequence has both queries and keys, so nothing is looked up.
        tensor = tensor.new_zeros(1, 1, 1, 1)
    batches, heads, rows, columns = tensor.shape
    sequence = places.sequence_q.clamp(min=0) if batches > 1 else torch.zeros_like(places.row)
    row = places.row.clamp(0, rows - 1)
    column = places.column.clamp(0, columns - 1)

    def pick(given: tuple[Tensor, ...], b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        values, sequence, row, column = given
        head = h if heads > 1 else h * 0
        return values[sequence[b, m], head, row[b, m], column[b, n]]

    return pick, [tensor, sequence, row, column]


def _fallback(
    problem: Problem, operands: tuple[Tensor, Tensor, Tensor], mods: _Mods
) -> tuple[Tensor, Tensor, Tensor]:
    """The dense fallback: out, lse and row maximum. Its statistics are base 2."""
    from torch._higher_order_ops.flex_attention import flex_attention as operator

    q, k, v = operands
    one_block = _one_block(q.shape[2], k.shape[2], mods.mask)
    options = {"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": True, "BACKEND": "AUTO"}
    out, lse, top = operator(
        q,
        k,
        v,
        mods.score,
        one_block,
        problem.scale,
        options,
        mods.score_tensors,
        mods.mask_tensors,
    )
    return out, (lse.double() * _LN2).to(lse.dtype), (top.double() * _LN2).to(top.dtype)


def _one_block(queries: int, keys: int, mask_mod: _MaskMod) -> tuple[Any, ...]:
    """A block mask of one block that is partly visible: the fallback reads nothing but its mask_mod."""
    from torch.nn.attention.flex_attention import BlockMask

    count = torch.ones(1, 1, 1, dtype=torch.int32)
    index = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    block = BlockMask.from_kv_blocks(
        count, index, BLOCK_SIZE=(queries, keys), mask_mod=mask_mod, seq_lengths=(queries, keys)
    )
    return block.as_tuple()


def _compiled(
    problem: Problem, operands: tuple[Tensor, Tensor, Tensor], mods: _Mods, visible: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The compiled kernel: out, lse and row maximum."""
    from torch.nn.attention import flex_attention as flex

    q, k, v = operands

    def score_mod(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return mods.score(score, b, h, m, n, *mods.score_tensors)

    def mask_mod(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return mods.mask(b, h, m, n, *mods.mask_tensors)

    block_mask = block_mask_of(visible, mask_mod)
    # Every kind of problem is one compilation of the same function; beyond a few torch would give up compiling.
    # A scale that changes would become an input of the graph, which the kernel's template can't take.
    limits = torch._dynamo.config.patch(
        recompile_limit=1024, accumulated_recompile_limit=4096, specialize_float=True
    )
    with limits, warnings.catch_warnings():
        # The tracer looks at .grad of the views that it is given.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        out, stats = _compiled_function()(
            q,
            k,
            v,
            score_mod,
            block_mask,
            scale=problem.scale,
            enable_gqa=problem.group_size > 1,
            return_aux=flex.AuxRequest(lse=True, max_scores=True),
        )
    return out, stats.lse, stats.max_scores


def block_mask_of(visible: Tensor, mask_mod: _MaskMod) -> BlockMask:
    """``create_block_mask`` for a mask that is there already: it would call ``mask_mod`` for every element.

    Args:
        visible: bool [B', 1|H, S, T], what ``mask_mod`` says.
        mask_mod: for the blocks that are partly visible.
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys = visible.shape[2:]
    rows, columns = (-(-length // _BLOCK) for length in (queries, keys))
    padding = (0, columns * _BLOCK - keys, 0, rows * _BLOCK - queries)
    blocks = pad(visible, padding).unflatten(3, (columns, _BLOCK)).unflatten(2, (rows, _BLOCK))
    counts = blocks.sum((3, 5))
    full = counts == _BLOCK * _BLOCK
    sides = []
    for some in ((counts > 0) & ~full, full):
        order = some.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        sides += [some.sum(-1, dtype=torch.int32), order.to(torch.int32)]
    return BlockMask.from_kv_blocks(
        *sides, BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=(queries, keys)
    )


@cache
def _compiled_function() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)


def _with_sink(
    problem: Problem, inputs: Inputs, result: tuple[Tensor, Tensor], places: Places
) -> tuple[Tensor, Tensor]:
    """out and lse with the sink in the denominator; rows without a visible key give it no gradient.

    lse is -inf too where a bias of finfo.min hides every key, as it passes through base 2: the sink takes all.
    """
    out, lse = result
    logit = _sink_logit(problem, inputs, lse.dtype)
    seen = lse > -torch.inf
    finite = lse.masked_fill(~seen, 0.0)
    # e^-softplus(x) is 1 / (1 + e^x), and the gradient of a faint sink, e^x, stays exact in it.
    share = torch.where(seen, torch.exp(-softplus(logit - finite)), 0.0)
    valid = (places.sequence_q >= 0)[:, None]
    bare = torch.where(valid, logit.detach(), -torch.inf)
    return out * share[..., None], torch.where(seen, torch.logaddexp(finite, logit), bare)


def _sink_logit(problem: Problem, inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """[1, H, 1]: 0 for off-by-one."""
    if inputs.softmax_offset is None:
        return torch.zeros(1, problem.num_heads, 1, dtype=dtype, device=inputs.q.device)
    return inputs.softmax_offset.to(dtype)[None, :, None]


def _without_keys(problem: Problem, inputs: Inputs) -> Forward:
    """The forward where no query or no key exists; of the former, lse may still be a sink's."""
    found = empty_forward(problem, inputs)
    if not problem.spec.sink or found.lse.numel() == 0 or problem.batch == 0:
        return found
    valid = (places_of(problem, inputs).sequence_q >= 0)[:, None]
    logit = _sink_logit(problem, inputs, found.lse.dtype)
    lse = torch.where(valid, logit, -torch.inf)
    return replace(found, lse=from_lse(lse, problem.spec.layout))
