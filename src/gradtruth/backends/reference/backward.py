"""The backward of the reference, from any (out, lse)."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtruth.backends.reference.schedule import schedule
from gradtruth.core.gradients import BackwardRows, GradientStore
from gradtruth.core.layout import canonical
from gradtruth.core.precision import full_precision
from gradtruth.core.problem import Problem
from gradtruth.core.scores import dropout_keep, dropout_scale, heads_first, scores, weights
from gradtruth.core.sequences import Block, sequences
from gradtruth.core.tensors import Forward, Grads, Inputs, Wanted

__all__ = ["differentiate"]


def differentiate(
    problem: Problem,
    inputs: Inputs,
    forward: Forward,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Grads:
    """The wanted gradients.

    Args:
        problem, inputs: as in the forward.
        forward: out and lse, made anywhere.
        dout: like out, any strides.
        dlse: like lse; None is zero.
        wanted: which gradients; dbias and dsoftmax_offset only where there is such an input.

    Numerics: fp32 (fp64) throughout; dk, dv, dbias and dsink are summed over the blocks in order; each is
        rounded once, when stored.
    """
    spec, dtype, groups = problem.spec, problem.accumulate_dtype, problem.num_gqa_groups
    stored_k, stored_v = canonical(inputs.k, spec.layout), canonical(inputs.v, spec.layout)
    reader = BackwardRows(problem, inputs, forward, dout, dlse)
    store = GradientStore.of(problem, inputs, wanted)
    plan = schedule(problem, inputs.q.device)
    with full_precision(problem, inputs.q.device):
        for sequence in sequences(problem, inputs):
            k = heads_first(sequence.kv.take(stored_k), groups, dtype)
            v = heads_first(sequence.kv.take(stored_v), groups, dtype)
            run = _Sequence(problem, inputs, reader, store, k, v)
            for block in sequence.blocks(
                spec.band, plan.rows_for(problem.num_heads, len(sequence.kv))
            ):
                run.add(block)
            store.put_keys(
                sequence, run.dk.mul_(problem.scale), run.dv.mul_(dropout_scale(spec.dropout_p))
            )
    return store.grads()


class _Sequence:
    """The blocks of one sequence. k is [G, T, D], v [G, T, Dv]; dk lacks the scale, dv that of dropout."""

    def __init__(
        self,
        problem: Problem,
        inputs: Inputs,
        reader: BackwardRows,
        store: GradientStore,
        k: Tensor,
        v: Tensor,
    ) -> None:
        self.problem, self.inputs, self.reader, self.store = problem, inputs, reader, store
        self.k, self.v = k, v
        self.dk, self.dv = torch.zeros_like(k), torch.zeros_like(v)

    def add(self, block: Block) -> None:
        """One block of queries with the keys that it sees."""
        problem, store, part = self.problem, self.store, block.key_slice
        k, v = self.k[:, part], self.v[:, part]
        rows = self.reader.take(block.queries)
        raw = torch.bmm(rows.q, k.mT)
        shape = (*rows.lse.shape, raw.shape[-1])
        scored = scores(problem, self.inputs, block, raw.view(shape), derivative=store.needs_ds)
        blank = scored.blank()
        store.add_sink(rows, blank)
        p = weights(scored.x, rows.lse)
        keep = dropout_keep(problem, self.inputs, block)
        if store.dv is not None:
            kept = p if keep is None else p * keep
            self.dv[:, part].baddbmm_(kept.view(raw.shape).mT, rows.dout)
        if not store.needs_ds:
            return
        ds = torch.bmm(rows.dout, v.mT).view(shape)
        if keep is not None:
            ds.mul_(keep).mul_(dropout_scale(problem.spec.dropout_p))
        ds.sub_(rows.delta[..., None]).mul_(p)
        ds = store.through_cap(block, ds, scored).view(raw.shape)
        if store.dk is not None:
            self.dk[:, part].baddbmm_(ds.mT, rows.q)
        if store.dq is not None:
            store.put_queries(block.queries, torch.bmm(ds, k).mul_(problem.scale), blank)
