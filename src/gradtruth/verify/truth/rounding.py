"""How large the rounding errors of a healthy low-precision attention can be: bound and spread of every sum.

The derivation is in ``verify/truth/README.md``. Bounds and spreads are in units of one eps (``Rounding.unit``) and
computed in fp64 from the same terms as the values. H query heads, G KV heads, b queries of a block, T keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradtruth.core.problem import Problem

__all__ = [
    "HOPELESS",
    "Magnitude",
    "Rounding",
    "RowErrors",
    "ScoreErrors",
    "WeightGradient",
    "Weights",
    "group_matmul",
    "group_sum",
    "rounding_of",
    "score_errors",
    "summing",
]

HOPELESS = 2.0**160
"""In eps: a score that errs by more says nothing about its weight, and the eighth power of this is a number.

Over what scores in fp32 can hold. A bias of an fp64 problem that stands for "hidden" (finfo.min) is far over it."""

_TF32_EPS = 2.0**-10
# A partial sum is half of the sum on average, in the mean square a third; a softmax sums in lanes.
_SUM_SHARE = 1 / 3
_SOFTMAX_SHARE = 1 / 16
# fp32 products made of three TF32 products: their sums are 4 to 6 eps too small, all of them.
_CUT = 1 / 6


@dataclass(frozen=True, slots=True)
class Magnitude:
    """The size of rounding errors of one tensor, element by element, in units of eps.

    Attributes:
        bound: the same sums with absolute values: a first-order worst case, at least |value|.
        spread: the same terms added in quadrature: what independent rounding errors amount to.
    """

    bound: Tensor
    spread: Tensor


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a problem's dtype rounds to.

    Attributes:
        unit: eps of the operands and results: the input dtype's, 2^-10 where plain TF32 is allowed.
        ratio: eps of scores, softmax and sums divided by ``unit``.
        least: the largest absolute error of an operand or result that underflows, in units of ``unit``.
        least_ds: the same for dS, which may be multiplied by the scale before it is rounded.
        cut: by how much of their bound all values may err to one side: tensor cores cut sums off.
    """

    unit: float
    ratio: float
    least: float
    least_ds: float
    cut: float


def rounding_of(problem: Problem) -> Rounding:
    """The rounding of a problem, by SEMANTICS section 5."""
    info = torch.finfo(problem.torch_dtype)
    # Only fp16 keeps its subnormals on every device.
    kept = problem.dtype == "float16"
    least = info.smallest_normal * info.eps if kept else info.smallest_normal
    accumulate = torch.finfo(problem.accumulate_dtype)
    unit, ratio = info.eps, accumulate.eps / info.eps
    if problem.dtype == "float32" and problem.spec.allow_tf32:
        unit, ratio = _TF32_EPS, 1.0
    shrunk = min(1.0, abs(problem.scale) or 1.0)
    # Elsewhere operands round by far more, or (fp64) sums round to nearest.
    cut = _CUT if problem.dtype == "float32" and not problem.spec.allow_tf32 else 0.0
    return Rounding(unit, ratio, least / unit, least / unit / shrunk, cut)


def group_matmul(a: Tensor, b: Tensor) -> Tensor:
    """[H, b, X] times [G, X, Y], each query head with its KV head: [H, b, Y]."""
    heads, rows, inner = a.shape
    groups = b.shape[0]
    folded = a.reshape(groups, heads // groups * rows, inner)
    return (folded @ b).view(heads, rows, b.shape[-1])


def group_sum(a: Tensor, b: Tensor, groups: int) -> Tensor:
    """Sum over the queries and heads of a group: [H, b, T] and [H, b, D] give [G, T, D]."""
    folded = a.shape[0] // groups * a.shape[1]
    return a.reshape(groups, folded, a.shape[-1]).mT @ b.reshape(groups, folded, b.shape[-1])


def summing(value: Tensor, count: Tensor, rounding: Rounding) -> Tensor:
    """The square of what rounding ``count`` partial sums of a sum costs."""
    return _SUM_SHARE * rounding.ratio**2 * count * value.square()


@dataclass(slots=True)
class ScoreErrors:
    """Errors of the scores of one block, in units of the accumulate eps.

    Attributes:
        score: [H, b, T], error of the final score, which is the relative error of exp of it.
        slope: [H, b, T], error of the softcap's derivative; None without softcap.
    """

    score: Tensor
    slope: Tensor | None


def score_errors(
    products: Tensor, chain: Tensor, cap: float | None, tanh: Tensor | None
) -> ScoreErrors:
    """Errors of final scores.

    Args:
        products: [H, b, T], |scale| times the sum of |q||k| and |pre-scale bias|: errors before the cap.
        chain: broadcastable to it, the sum of the absolute values of what is added after the cap.
        cap: the softcap.
        tanh: [H, b, T], of score / cap.
    """
    products, chain = products.clamp(max=HOPELESS), chain.clamp(max=HOPELESS)
    if cap is None or tanh is None:
        return ScoreErrors((products + chain).clamp(max=HOPELESS), None)
    slope, size = 1 - tanh * tanh, tanh.abs()
    score = products * slope + cap * size + chain
    steep = 2 * slope * size * products / cap + 2
    return ScoreErrors(score.clamp(max=HOPELESS), steep.clamp(max=HOPELESS))


@dataclass(slots=True)
class Weights:
    """The softmax weights of one block.

    Attributes:
        p: [H, b, T], P before dropout.
        kept: [H, b, T], P after dropout.
        keep: [H, b, T], keep / (1 - p); None without dropout.
        errors: of the scores behind them.
        count: [1|H, b], how many keys a row sees.
    """

    p: Tensor
    kept: Tensor
    keep: Tensor | None
    errors: ScoreErrors
    count: Tensor

    def rounded(self, least: float) -> Tensor:
        """|P after dropout|, with what an underflow may cost."""
        return self.kept + least * (self.kept > 0)


@dataclass(slots=True)
class RowErrors:
    """Errors of out and lse of one block, which all weights of a row share. Squares are squared spreads.

    Attributes:
        lse_bound, lse_square: [H, b], in units of the accumulate eps; 0 for a given lse. Of what follows from lse:
            not over ``HOPELESS`` and its square by much, also where lse itself is.
        out_bound, out_square: [H, b, Dv], in units of eps; 0 for a given out.
        given: out and lse were given and have no error.
    """

    lse_bound: Tensor
    lse_square: Tensor
    out_bound: Tensor
    out_square: Tensor
    given: bool = False

    @staticmethod
    def exact(out: Tensor, lse: Tensor) -> RowErrors:
        """No error: out and lse were given."""
        row, place = torch.zeros_like(lse), torch.zeros_like(out)
        return RowErrors(row, row, place, place, given=True)

    @staticmethod
    def of(weights: Weights, v: Tensor, out: Tensor, lse: Tensor, rounding: Rounding) -> RowErrors:
        """Errors of out [H, b, Dv] and lse [H, b] that were computed from weights and v [G, T, Dv]."""
        rho, score, count = rounding.ratio, weights.errors.score, weights.count
        size = torch.where(lse == -torch.inf, 0.0, lse.abs() + 1).clamp(max=HOPELESS)
        shift = weights.p * score
        # Errors of scores in a row may be common: rounding scale * q moves all of them alike.
        common = shift.sum(-1)
        lse_bound = common + size
        lse_square = common.square() + size.square() + _SOFTMAX_SHARE * count
        single = weights.rounded(rounding.least)
        out_bound = group_matmul(single * (1 + rho * score), v.abs())
        out_bound += out.abs() * (1 + rho * lse_bound.unsqueeze(-1))
        out_bound += rounding.least * (out_bound > 0)
        # An error dx of a score moves out by P dx (keep v - out): a row on one key does not feel it.
        shift = (rho * shift).square()
        pulled = shift if weights.keep is None else shift * weights.keep
        pulling = pulled if weights.keep is None else pulled * weights.keep
        terms = group_matmul(single.square() + pulling, v.square())
        moved = shift.sum(-1, keepdim=True) * out.square() - 2 * out * group_matmul(pulled, v)
        own = 1 + rho**2 * (1 + _SOFTMAX_SHARE * count.unsqueeze(-1))
        out_square = (terms + moved).clamp(min=0.0) + own * out.square()
        out_square += summing(out, count.unsqueeze(-1), rounding)
        out_square += rounding.least**2 * (out_bound > 0)
        return RowErrors(lse_bound, lse_square, out_bound, out_square)


@dataclass(slots=True)
class WeightGradient:
    """What dS of one block is made of.

    Attributes:
        weights: P.
        rows: errors of out and lse.
        dp: [H, b, T], keep / (1 - p) times dout . v.
        dp_bound: [H, b, T], the same with absolute values.
        delta: [H, b], dout . out - dlse.
        delta_bound, delta_square: [H, b], its error in units of eps.
    """

    weights: Weights
    rows: RowErrors
    dp: Tensor
    dp_bound: Tensor
    delta: Tensor
    delta_bound: Tensor
    delta_square: Tensor

    @staticmethod
    def of(
        weights: Weights,
        rows: RowErrors,
        products: tuple[Tensor, Tensor],
        dout: Tensor,
        out: Tensor,
        dlse: Tensor,
        rounding: Rounding,
    ) -> WeightGradient:
        """From dout and out [H, b, Dv], dlse [H, b], and dP with its bound."""
        rho, (dp, dp_bound) = rounding.ratio, products
        terms = dout * out
        dot, size = terms.sum(-1), rho * (terms.abs().sum(-1) + dlse.abs())
        bound = (dout.abs() * rows.out_bound).sum(-1) + size
        square = size.square()
        if not rows.given:
            # out errs along v_j where P_ij does, so delta by dP_ij: not by each d apart.
            turned = rho * weights.errors.score * weights.p * (dp - dot.unsqueeze(-1))
            square += (weights.p * dp).square().sum(-1) + turned.square().sum(-1)
            # What underflows in P and in the stored out errs by more than its share of eps.
            flushed = dp.square() * (weights.p > 0)
            stored = dout.square() * (rows.out_bound > 0)
            square += rounding.least**2 * (flushed.sum(-1) + stored.sum(-1))
            square += terms.square().sum(-1) + summing(
                terms, weights.count.unsqueeze(-1), rounding
            ).sum(-1)
            square += rho**2 * (1 + _SOFTMAX_SHARE * weights.count) * dot.square()
        return WeightGradient(weights, rows, dp, dp_bound, dot - dlse, bound, square)

    def errors(self, ds: Tensor, slope: Tensor | None, rounding: Rounding) -> tuple[Tensor, Tensor]:
        """Bound and square [H, b, T] of the error of dS.

        The bound holds every error. The square holds those that differ from weight to weight; those that a
        row shares (delta and lse) are the caller's, who knows over what dS is summed.

        Args:
            ds: [H, b, T].
            slope: [H, b, T], the softcap's derivative in ds; None when it is not in it.
            rounding: of the problem.
        """
        rho, weights = rounding.ratio, self.weights
        p = weights.p if slope is None else weights.p * slope
        delta = self.delta.abs().unsqueeze(-1)
        size, relative = ds.abs(), weights.errors.score + 1
        inner = self.dp_bound + self.dp.abs() + delta
        bound = size * (1 + rho * (relative + self.rows.lse_bound.unsqueeze(-1)))
        bound += p * (rho * inner + self.delta_bound.unsqueeze(-1))
        # What underflows in P is lost in dS too: exp2 of a GPU flushes, and the rounded P of dV may be used again.
        faint = torch.clamp(p, max=rounding.least * rounding.unit) / rounding.unit
        lost = faint * (self.dp - self.delta.unsqueeze(-1)).abs()
        bound += rounding.least_ds * (p > 0) + lost
        square = size.square() * (1 + (rho * relative).square())
        square += (rho * p * inner).square() + lost.square()
        if slope is not None and weights.errors.slope is not None:
            steep = (
                rho * weights.errors.slope * weights.p * (self.dp - self.delta.unsqueeze(-1)).abs()
            )
            bound += steep
            square += steep.square()
        square += rounding.least_ds**2 * (p > 0)
        return bound, square
