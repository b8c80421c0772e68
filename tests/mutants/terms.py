"""Terms of the scores: dropout, bias, ALiBi, softcap, scale, sinks (K12 to K15)."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.mutants.catalogue import mutant
from tests.mutants.kernel import Kernel


@mutant("K12", "dropout-gqa-d64", "dropout_consistency", "dv")
class DropoutShiftedInTheBackward(Kernel):
    """The backward draws its mask one key further."""

    def keep(self, step):
        keep = super().keep(step)
        return keep.roll(1, -1) if keep is not None and step.backward else keep


@mutant("K12", "dropout-gqa-d64", "dropout_consistency", "dq")
class DroppedWeightsInDs(Kernel):
    """dS takes the dropped weights where the plain ones belong."""

    def dscores(self, step, p, dp, keep):
        if keep is None:
            return super().dscores(step, p, dp, keep)
        return p * keep * (dp - self.delta(step)[..., None])


@mutant("K12", "dropout-gqa-d64", "dropout_consistency", "out")
class OneMaskForAllHeads(Kernel):
    """Every head drops what head 0 drops."""

    def keep(self, step):
        keep = super().keep(step)
        return keep if keep is None else keep[:1].expand(step.H, -1, -1)


@mutant("K12", "dropout-gqa-d64", "dropout_consistency", "out")
class KeptWeightsNotScaled(Kernel):
    """What is kept is not divided by 1 - p."""

    def keep(self, step):
        keep = super().keep(step)
        return keep if keep is None else (keep > 0).to(keep.dtype)


@mutant("K12", "dropout-gqa-d64", "backward", "dk")
class DropoutOfBatchItem0InTheBackward(Kernel):
    """The backward counts sequences from 0 in every launch."""

    def keep(self, step):
        return super().keep(replace(step, n=0) if step.backward else step)


@mutant("K13", "bias-d64", "forward", "out")
class BiasIsScaled(Kernel):
    """The scale multiplies the bias too."""

    def bias(self, step):
        bias = super().bias(step)
        return None if bias is None else bias * self.scale(step)


@mutant("K13", "bias-d64", "backward", "dbias")
class DbiasOfTheLastSequence(Kernel):
    """dbias of a broadcast bias is that of the last sequence instead of the sum."""

    def dbias_of(self, step, ds, like):
        part = super().dbias_of(step, ds, like)
        last = step.n == step.problem.batch - 1
        return part if last or like.shape[0] > 1 else part * 0


@mutant("K13", "bias-d64", "backward", "dq")
class BiasForgottenInTheBackward(Kernel):
    """The backward recomputes the weights without the bias."""

    def bias(self, step):
        return None if step.backward else super().bias(step)


@mutant("K13", "alibi-d64", "forward", "out")
class AlibiWithTheWrongSign(Kernel):
    """Distant keys are favoured."""

    def alibi(self, step):
        alibi = super().alibi(step)
        return None if alibi is None else -alibi


@mutant("K13", "alibi-d64", "backward", "dk")
class AlibiOfHead0InTheBackward(Kernel):
    """The backward takes the slope of the first head for all."""

    def alibi(self, step):
        alibi = super().alibi(step)
        return alibi[:1].expand(step.H, -1, -1) if alibi is not None and step.backward else alibi


@mutant("K14", "softcap-window-d128", "backward", "dq")
class SoftcapWithoutDerivative(Kernel):
    """The factor 1 - tanh^2 is missing."""

    def slope(self, x, cap):
        return torch.ones_like(x)


@mutant("K14", "softcap-window-d128", "forward", "out")
class SoftcapMultipliesTheScore(Kernel):
    """x tanh(x / cap) instead of cap tanh(x / cap)."""

    def scores(self, step):
        x, slope = super().scores(step)
        cap = self.softcap(step)
        return (
            x if cap is None else torch.where(x == -torch.inf, x, x / cap * self.logits(step))
        ), slope


@mutant("K14", "softcap-window-d128", "backward", "dk", "nonfinite")
class SoftcapForgottenInTheBackward(Kernel):
    """The backward recomputes the weights without the cap."""

    def softcap(self, step):
        return None if step.backward else super().softcap(step)


@mutant("K14", "thd-queryless-gqa-d8", "backward", "dk")
class DefaultScaleInDk(Kernel):
    """dk is scaled by the default whatever the scale is."""

    def dk_of(self, step, ds):
        return super().dk_of(step, ds) / self.scale(step) * step.q.shape[-1] ** -0.5


@mutant("K15", "sink-window-gqa-d64", "backward", "dq")
class SinkForgottenInTheBackward(Kernel):
    """The backward normalises without the sink."""

    def saved_lse(self, step):
        sink = self.sink(step)
        if sink is None:
            return step.lse
        return (step.lse.exp() - sink.exp()[:, None]).log()


@mutant("K15", "sink-window-gqa-d64", "backward", "dsoftmax_offset")
class DsinkIsZero(Kernel):
    """The sink gets no gradient."""

    def dsink_of(self, step, reached):
        return super().dsink_of(step, reached) * 0


@mutant("K15", "sink-window-gqa-d64", "forward", "out")
class SinkIsOne(Kernel):
    """The learned sink is ignored, exp(0) used."""

    def sink(self, step):
        sink = super().sink(step)
        return None if sink is None else sink * 0
