"""Masks: what is visible, forward and backward (K06, K07, K08)."""

from __future__ import annotations

import torch
from tests.mutants.catalogue import mutant
from tests.mutants.kernel import Kernel


@mutant("K06", "mask-d64", "forward", "out", "nonzero")
class MaskedRowsAreUniform(Kernel):
    """A row that sees no key takes the mean of all values."""

    def normalise(self, step, x):
        p, lse = super().normalise(step, x)
        blank = (x == -torch.inf).all(-1, keepdim=True)
        return p.masked_fill(blank, 1 / max(step.T, 1)), lse


@mutant("K06", "mask-d64", "exact_zeros", "lse", "nonzero")
class MaskedRowsHaveLseZero(Kernel):
    """lse of a row that sees no key is 0."""

    def lse_value(self, step, lse):
        return lse.masked_fill(lse == -torch.inf, 0)


@mutant("K06", "bottom-right-longer-queries-d64", "backward", "dq", "nonzero")
class EmptyRowsAreNaN(Kernel):
    """-inf minus -inf in rows that see no key."""

    def weights(self, step, x):
        return (x - self.saved_lse(step)[..., None]).exp()


@mutant("K06", "mask-d64", "shift_invariance", "out")
class MaskedScoresAreFinite(Kernel):
    """Masked keys are scored -100 instead of minus infinity."""

    def scores(self, step):
        x, slope = super().scores(step)
        return x.masked_fill(x == -torch.inf, -100.0), slope


@mutant("K07", "bottom-right-longer-keys-d64", "forward", "out")
class AlwaysTopLeft(Kernel):
    """The bottom-right diagonal is ignored."""

    def diagonal(self, step):
        return 0


@mutant("K07", "bottom-right-longer-keys-d64", "backward", "dk")
class TopLeftInTheBackward(Kernel):
    """The forward is aligned bottom-right, the backward top-left."""

    def diagonal(self, step):
        return 0 if step.backward else step.diagonal


@mutant("K07", "top-left-longer-keys-d64", "backward", "dq")
class BottomRightInTheBackward(Kernel):
    """The forward is aligned top-left, the backward bottom-right, wrong only where lengths differ."""

    def diagonal(self, step):
        return step.T - step.S if step.backward else step.diagonal


@mutant("K07", "cross-d64", "forward", "out")
class CausalCrossAttention(Kernel):
    """The decoder's causal window reaches cross attention."""

    def window(self, step):
        return (None, 0) if step.S != step.T else super().window(step)


@mutant("K08", "window-d64", "forward", "out")
class WindowOneTooWide(Kernel):
    """A window of w keeps w + 1 keys before the diagonal."""

    def window(self, step):
        left, right = super().window(step)
        return (None if left is None else left + 1), right


@mutant("K08", "window-d64", "backward", "dk")
class WindowOffByOneInTheBackward(Kernel):
    """The window is one too wide in the backward only."""

    def window(self, step):
        left, right = super().window(step)
        return (left + 1 if left is not None and step.backward else left), right


@mutant("K08", "window-both-d128", "backward", "dv")
class RightBoundForgotten(Kernel):
    """The backward knows the left bound only."""

    def window(self, step):
        left, right = super().window(step)
        return left, (None if step.backward else right)


@mutant("K08", "causal-gqa-d64", "forward", "out")
class UnlimitedIsANumber(Kernel):
    """-1 for an open window is taken for a bound: row i sees nothing but itself."""

    def window(self, step):
        left, right = super().window(step)
        return (0 if left is None and right == 0 else left), right


@mutant("K08", "bottom-right-longer-queries-d64", "forward", "out")
class RightBoundClampedToKeys(Kernel):
    """The right bound is cut to the number of keys before the diagonal is added."""

    def visible(self, step):
        seen = super().visible(step)
        if step.S > step.T:
            i, j = torch.arange(step.S)[:, None], torch.arange(step.T)[None]
            seen = seen & (j <= i + step.diagonal - 1)
        return seen


@mutant("K14", "full-mha-d128-fp16", "backward", "dq")
class BackwardIsAlwaysCausal(Kernel):
    """The backward ignores that there is no causal mask."""

    def window(self, step):
        return (None, 0) if step.backward else super().window(step)


@mutant("K08", "causal-gqa-d64", "mask_equivalents", "out")
class WideWindowsAreCut(Kernel):
    """A window wider than 200 is cut to 100, though it covers everything."""

    def window(self, step):
        left, right = super().window(step)
        return (100 if left is not None and left > 200 else left), right
