"""Numbers: lse, large logits, precision, limits (K16, K18, K19, K20, K27)."""

from __future__ import annotations

import math

import torch
from tests.mutants.catalogue import mutant
from tests.mutants.kernel import Kernel


@mutant("K16", "cross-d64", "lse_contract", "lse")
class LseInBaseTwo(Kernel):
    """lse is returned in base 2."""

    def lse_value(self, step, lse):
        return lse / math.log(2)

    def saved_lse(self, step):
        return step.lse * math.log(2)


@mutant("K16", "decode-gqa-d128", "forward", "lse")
class LseOfTheFirstHeadOfAGroup(Kernel):
    """lse is written for the first head of each KV group."""

    def lse_value(self, step, lse):
        return lse[:: step.group].repeat_interleave(step.group, 0)

    def saved_lse(self, step):
        x, _ = self.scores(step)
        return self.normalise(step, x)[1]


@mutant("K16", "cross-d64", "lse_contract", "dq")
class GradientOfLseIgnored(Kernel):
    """What arrives through lse is dropped."""

    def delta(self, step):
        return (step.dout * step.out).sum(-1)


@mutant("K16", "causal-gqa-d64", "backward", "dq")
class DeltaNotSubtracted(Kernel):
    """dS is P dP."""

    def delta(self, step):
        return super().delta(step) * 0


@mutant("K18", "cross-d64", "shift_invariance", "out")
class RunningMaxStartsAtZero(Kernel):
    """The running maximum starts at 0, so rows of very negative scores vanish."""

    def row_max(self, x):
        return super().row_max(x).clamp(min=0)


@mutant("K18", "cross-d64", "shift_invariance", "out", "nonfinite")
class NoRunningMax(Kernel):
    """exp is taken of the scores themselves."""

    def row_max(self, x):
        return super().row_max(x) * 0


@mutant("K18", "full-fp32-d64", "backward", "dq")
class LseInHalf(Kernel):
    """lse is kept in bf16."""

    def saved_lse(self, step):
        return step.lse.bfloat16().to(step.lse.dtype)


@mutant("K18", "full-fp32-d64", "forward", "out")
class Tf32ScoresInFp32(Kernel):
    """fp32 scores from operands with 10 bits."""

    def logits(self, step):
        def cut(x):
            return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32).to(x.dtype)

        return cut(step.q) @ cut(step.k)[self.kv_head(step)].mT * self.scale(step)


@mutant("K18", "causal-fp32-gqa-d128", "backward", "dv")
class HalfWeightsInFp32(Kernel):
    """P is rounded to bf16 though the inputs are fp32."""

    def rounded(self, step, x):
        return x.bfloat16().to(x.dtype)


@mutant("K18", "causal-gqa-d64", "backward", "dk")
class DkSummedInHalf(Kernel):
    """dk is added up in bf16, tile by tile."""

    def dk_of(self, step, ds):
        total = torch.zeros(step.k.shape[0], step.T, step.q.shape[-1], dtype=torch.bfloat16)
        for at in range(0, step.S, 4):
            part = torch.zeros_like(ds)
            part[:, at : at + 4] = ds[:, at : at + 4]
            total += super().dk_of(step, part).bfloat16()
        return total.to(ds.dtype)


@mutant("K16", "causal-gqa-d64", "conservation", None, "law")
class DqSlightlyScaled(Kernel):
    """dq is larger than it should be by a quarter."""

    def dq_of(self, step, ds):
        return super().dq_of(step, ds) * 1.25


@mutant("K20", "causal-gqa-d64", "launch_limits", "out")
class GridEndsAt65535(Kernel):
    """Heads above 65,535 are not launched."""

    def write(self, name, step, target, value):
        value[65535:] = 0
        super().write(name, step, target, value)


@mutant("K27", "bottom-right-longer-keys-d64", "tile_merge", "out")
class DiagonalFromClippedLengths(Kernel):
    """A tile recomputes the bottom-right diagonal from its own lengths."""

    def diagonal(self, step):
        return step.T - step.S if step.problem.spec.alignment == "bottom_right" else step.diagonal


@mutant("K14", "causal-gqa-d64", "backward", "dq")
class NegatedDq(Kernel):
    """dq has the wrong sign."""

    def dq_of(self, step, ds):
        return -super().dq_of(step, ds)


@mutant("K09", "many-heads-d64", "backward", "dk")
class OneHeadScaledByTwoPercent(Kernel):
    """dk of one (sequence, head) is 1.02 times what it should be."""

    def dk_of(self, step, ds):
        found = super().dk_of(step, ds)
        if step.n == step.problem.batch - 1:
            found[-1] *= 1.02
        return found
