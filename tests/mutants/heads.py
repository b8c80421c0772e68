"""Heads and channels: groups, head dims, widths of values (K09, K10, K11)."""

from __future__ import annotations

import torch
from tests.mutants.catalogue import mutant
from tests.mutants.kernel import Kernel


@mutant("K09", "causal-gqa-d64", "backward", "dk")
class InterleavedInTheBackward(Kernel):
    """The backward maps query head h to KV head h mod G."""

    def kv_head(self, step):
        return torch.arange(step.H) % step.k.shape[0] if step.backward else super().kv_head(step)


@mutant("K09", "causal-gqa-d64", "gqa_expand", "dv")
class LastOfTheGroupWins(Kernel):
    """dk and dv of a group are those of its last query head."""

    def reduce_group(self, step, x):
        return x.unflatten(0, (-1, step.group))[:, -1]


@mutant("K09", "many-heads-d64", "backward", "dv")
class LastOfTheGroupForgotten(Kernel):
    """The sum over a group stops one head early."""

    def reduce_group(self, step, x):
        parts = x.unflatten(0, (-1, step.group))
        return parts[:, :-1].sum(1) if step.group > 1 else parts.sum(1)


@mutant("K09", "causal-gqa-d64", "backward", "dk")
class MeanOfTheGroup(Kernel):
    """The sum over a group is divided by its size."""

    def reduce_group(self, step, x):
        return super().reduce_group(step, x) / step.group


@mutant("K09", "many-heads-d64", "head_slice", "dq")
class NeighboursGroup(Kernel):
    """Delta of the KV group before is used."""

    def delta(self, step):
        return super().delta(step).roll(step.group, 0)


@mutant("K09", "many-heads-d64", "backward", "dq")
class LastHeadOfAllIsNotWritten(Kernel):
    """dq of the last query head stays 0."""

    def dq_of(self, step, ds):
        found = super().dq_of(step, ds)
        found[-1] = 0
        return found


@mutant("K10", "odd-dim-d80", "forward", "out")
class FirstColumnsOnly(Kernel):
    """Scores use the first 64 columns."""

    def logits(self, step):
        return step.q[..., :64] @ step.k[self.kv_head(step)][..., :64].mT * self.scale(step)


@mutant("K10", "causal-two-sequences-d256", "backward", "dq")
class FiveTimesAtD256(Kernel):
    """At head_dim 256 dq is five times too large once the batch holds two sequences."""

    def dq_of(self, step, ds):
        large = step.problem.head_dim_qk == 256 and step.problem.batch > 1
        return super().dq_of(step, ds) * (5 if large else 1)


@mutant("K10", "odd-dim-d104", "head_slice", "dk")
class PaddedColumnsReachTheNextHead(Kernel):
    """A padded tile is stored without a column bound: the first columns of the next head are overwritten."""

    def dk_of(self, step, ds):
        found, over = super().dk_of(step, ds), -step.problem.head_dim_qk % 32
        if over and len(found) > 1:
            found[1:, :, :over] = 0
        return found


@mutant("K10", "causal-fp32-gqa-d128", "forward", "out")
class ScaleOfThePaddedDim(Kernel):
    """The default scale is that of the next power of two minus one tile."""

    def scale(self, step):
        return (step.q.shape[-1] + 32) ** -0.5


@mutant("K11", "mla-d192-d128", "backward", "dq")
class DqAsWideAsValues(Kernel):
    """The dq accumulator has the width of the values: later columns are lost."""

    def dq_of(self, step, ds):
        found = super().dq_of(step, ds)
        found[..., step.v.shape[-1] :] = 0
        return found


@mutant("K11", "mla-d192-d128", "backward", "dv")
class DvColumnsCorrupted(Kernel):
    """Columns of dv that do not fill the store width of keys are stored twice."""

    def dv_of(self, step, dropped):
        found = super().dv_of(step, dropped)
        if step.v.shape[-1] != step.q.shape[-1]:
            found[..., -8:] = found[..., -16:-8]
        return found
