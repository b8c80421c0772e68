"""The oracle: attention and its gradients in fp64, written from the definition, with the size of rounding errors.

It loops over sequences and blocks of queries, so no S x T tensor exists. It shares nothing with a backend
beyond ``core``: its own scoring chain, its own comparisons for the band, its own placing of dropout words.
The magnitudes that come with every tensor are derived in ``verify/truth/README.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtruth.core.layout import canonical, canonical_lse, stored
from gradtruth.core.problem import Problem
from gradtruth.core.tensors import Grads, Inputs, Wanted
from gradtruth.verify.truth.gradient import Block, SequenceGradients, Sum
from gradtruth.verify.truth.rounding import Magnitude, RowErrors, group_matmul, rounding_of
from gradtruth.verify.truth.scoring import Sequence, places

__all__ = ["OracleForward", "OracleGrads", "backward", "evaluate", "forward"]

_BLOCK = 1 << 16  # elements of one [H, block, T] tensor
_ALL = Wanted()


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleForward:
    """What an exact forward returns, fp64, in the storage layout of the problem.

    Attributes:
        out: like q, last dim Dv.
        lse: [B, H, S], thd [tokens, H].
        max_logit: [H] when the Spec asks for it.
        magnitudes: of each of these, by name.
    """

    out: Tensor
    lse: Tensor
    max_logit: Tensor | None
    magnitudes: dict[str, Magnitude]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of every result."""
        yield "out", self.out
        yield "lse", self.lse
        if self.max_logit is not None:
            yield "max_logit", self.max_logit


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleGrads:
    """What an exact backward returns, fp64.

    Attributes:
        grads: in the shapes of the inputs; None where not wanted or where there is no such input.
        magnitudes: of each gradient, by name.
    """

    grads: Grads
    magnitudes: dict[str, Magnitude]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of every gradient."""
        return self.grads.items()


def forward(
    problem: Problem, inputs: Inputs, *, device: torch.device | str = "cpu"
) -> OracleForward:
    """out, lse and max_logit by the definition.

    Args:
        problem: any problem, a tile included.
        inputs: its tensors, on any device.
        device: where to compute, in fp64.
    """
    walk = _Walk(problem, inputs, torch.device(device))
    walk.run()
    return walk.forward_result()


def backward(
    problem: Problem,
    inputs: Inputs,
    dout: Tensor,
    dlse: Tensor | None = None,
    wanted: Wanted = _ALL,
    *,
    forward: OracleForward | tuple[Tensor, Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> OracleGrads:
    """The gradients by the definition.

    Args:
        problem: any problem, a tile included.
        inputs: its tensors, on any device.
        dout: like out, any strides.
        dlse: like lse; None is zero.
        wanted: which gradients.
        forward: None computes out and lse here. A pair of tensors is taken as exact whatever it holds: the
            gradients are those of P = exp(x - lse) and delta = dout . out - dlse, with P = 0 where lse is -inf.
        device: where to compute, in fp64.
    """
    walk = _Walk(problem, inputs, torch.device(device))
    walk.differentiate(dout, dlse, wanted, forward)
    walk.run()
    return walk.backward_result()


def evaluate(
    problem: Problem,
    inputs: Inputs,
    dout: Tensor,
    dlse: Tensor | None = None,
    wanted: Wanted = _ALL,
    *,
    device: torch.device | str = "cpu",
) -> tuple[OracleForward, OracleGrads]:
    """``forward`` and ``backward`` in one walk."""
    walk = _Walk(problem, inputs, torch.device(device))
    walk.differentiate(dout, dlse, wanted, None)
    walk.run()
    return walk.forward_result(), walk.backward_result()


@dataclass(slots=True)
class _Asked:
    """What a backward was asked: canonical dout, dlse and given (out, lse), and the sums of its gradients."""

    dout: Tensor
    dlse: Tensor | None
    given: tuple[Tensor, Tensor] | None
    given_errors: dict[str, Magnitude]
    sums: dict[str, Sum]


class _Walk:
    """One walk over the sequences of a problem and their blocks of queries."""

    def __init__(self, problem: Problem, inputs: Inputs, device: torch.device) -> None:
        self.problem, self.inputs, self.device = problem, inputs, device
        self.rounding = rounding_of(problem)
        heads, dim_v = problem.num_heads, problem.head_dim_v
        rows, length = canonical(inputs.q, problem.layout).shape[:2]
        self.out = Sum((rows, length, heads, dim_v), device)
        self.lse = Sum((rows, heads, length), device)
        self.lse.value.fill_(-torch.inf)
        self.max_logit = Sum((heads,), device)
        self.max_logit.value.fill_(-torch.inf)
        offset = inputs.softmax_offset if problem.spec.softmax == "learnable" else None
        self.sink = None
        if problem.spec.sink:
            zero = torch.zeros(heads, dtype=torch.float64, device=device)
            self.sink = zero if offset is None else offset.to(device, torch.float64)
        self.asked: _Asked | None = None

    def differentiate(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
        given: OracleForward | tuple[Tensor, Tensor] | None,
    ) -> None:
        """Ask for gradients too."""
        problem, inputs, layout = self.problem, self.inputs, self.problem.layout
        like = {name: canonical(getattr(inputs, name), layout).shape for name in "qkv"}
        shapes = {"dq": like["q"], "dk": like["k"], "dv": like["v"]}
        if inputs.bias is not None:
            shapes["dbias"] = inputs.bias.shape
        if problem.spec.softmax == "learnable":
            shapes["dsoftmax_offset"] = torch.Size((problem.num_heads,))
        errors = {}
        if isinstance(given, OracleForward):
            errors, given = given.magnitudes, (given.out, given.lse)
        self.asked = _Asked(
            dout=canonical(dout, layout),
            dlse=None if dlse is None else canonical_lse(dlse, layout),
            given=given and (canonical(given[0], layout), canonical_lse(given[1], layout)),
            given_errors=errors,
            sums={n: Sum(s, self.device) for n, s in shapes.items() if getattr(wanted, n)},
        )

    def run(self) -> None:
        """Walk."""
        for n, place in enumerate(places(self.problem, self.inputs)):
            sequence = Sequence(self.problem, self.inputs, n, place, self.device)
            rows = self._rows(sequence)
            step = max(1, _BLOCK // max(1, self.problem.num_heads * place.length_kv))
            sums = (
                None
                if self.asked is None
                else SequenceGradients(sequence, self.asked.sums, self.sink)
            )
            for first in range(0, place.length_q, step):
                count = min(step, place.length_q - first)
                part = {name: x[:, first : first + count] for name, x in rows.items()}
                block = self._attend(sequence, first, count, part)
                if sums is not None:
                    sums.add(block, part["dout"], part.get("dlse"))
            if sums is not None:
                sums.store()
        if self.asked is not None:
            for name, total in self.asked.sums.items():
                if name in ("dbias", "dsoftmax_offset"):
                    total.add_summing(self.rounding)
                total.add_rounding(self._result_share(name), self.rounding.least)

    def _rows(self, sequence: Sequence) -> dict[str, Tensor]:
        """What belongs to the queries of a sequence besides q, fp64 [H, S, ...]."""
        rows, asked = {}, self.asked
        if asked is None:
            return rows
        rows["dout"] = sequence.take_q(asked.dout)
        if asked.dlse is not None:
            rows["dlse"] = sequence.take_row(asked.dlse, 0.0)
        if asked.given is not None:
            rows["out"] = sequence.take_q(asked.given[0])
            rows["lse"] = sequence.take_row(asked.given[1], -torch.inf)
        layout = self.problem.layout
        for kind in ("bound", "spread") if asked.given_errors else ():
            of = {name: getattr(asked.given_errors[name], kind) for name in ("out", "lse")}
            rows[f"out_{kind}"] = sequence.take_q(canonical(of["out"], layout))
            rows[f"lse_{kind}"] = sequence.take_row(canonical_lse(of["lse"], layout), 0.0)
        return rows

    def _attend(self, sequence: Sequence, first: int, count: int, part: dict[str, Tensor]) -> Block:
        """Weights, out and lse of one block; out and lse are stored unless they were given."""
        scores = sequence.scores(first, count)
        if "out" in part:
            out, lse = part["out"], part["lse"]
            weights = scores.weights(lse)
            rows = RowErrors.exact(out, lse)
            if "out_bound" in part:
                rows = RowErrors(
                    part["lse_bound"],
                    part["lse_spread"].square(),
                    part["out_bound"],
                    part["out_spread"].square(),
                )
            return Block(first, scores, weights, out, lse, rows)
        lse, weights = scores.softmax(self.sink)
        if sequence.shown_q is not None:
            lse = lse.masked_fill(~sequence.shown_q[first : first + count], -torch.inf)
        out = group_matmul(weights.kept, sequence.v)
        rows = RowErrors.of(weights, sequence.v, out, lse, self.rounding)
        block = Block(first, scores, weights, out, lse, rows)
        self._store(sequence, block)
        return block

    def _store(self, sequence: Sequence, block: Block) -> None:
        place, row = sequence.place, sequence.row
        at = slice(place.start_q + block.first, place.start_q + block.first + block.out.shape[1])
        rows = block.rows
        columns = (x.transpose(0, 1) for x in (block.out, rows.out_bound, rows.out_square))
        self.out.add((row, at), *columns)
        self.lse.value[row, :, at] = block.lse
        # A bound of what follows from lse stops at HOPELESS, and lse rounds like any number.
        itself = torch.where(block.lse.isinf(), 0.0, block.lse.abs())
        self.lse.bound[row, :, at] = torch.maximum(rows.lse_bound, itself)
        self.lse.square[row, :, at] = rows.lse_square
        x = block.scores.x
        if self.problem.spec.max_logit and x.shape[-1]:
            highest = x.flatten(1).amax(1)
            size = torch.where(block.scores.visible, block.scores.errors.score, 0.0)
            largest = size.flatten(1).amax(1)
            best = self.max_logit
            best.value = torch.maximum(best.value, highest)
            best.bound = torch.maximum(best.bound, largest)
            best.square = best.bound.square()

    def _result_share(self, name: str) -> float:
        """eps of a result's dtype in units of eps."""
        dtype = self.problem.torch_dtype
        if name == "dbias":
            dtype = self.inputs.bias.dtype
        elif name in ("dsoftmax_offset", "max_logit"):
            dtype = torch.float32
        # TF32 rounds operands, not results.
        return torch.finfo(dtype).eps / self.rounding.unit

    def forward_result(self) -> OracleForward:
        """The results in storage layout."""
        wants_max = self.problem.spec.max_logit
        layout = self.problem.layout
        magnitudes = {
            "out": _mapped(self.out.magnitude(), lambda x: stored(x, layout)),
            "lse": _mapped(self.lse.magnitude(), lambda x: _stored_lse(x, layout)),
        }
        if wants_max:
            self.max_logit.add_rounding(self._result_share("max_logit") / self.rounding.ratio, 0.0)
            magnitudes["max_logit"] = self.max_logit.magnitude()
        return OracleForward(
            out=stored(self.out.value, layout),
            lse=_stored_lse(self.lse.value, layout),
            max_logit=self.max_logit.value if wants_max else None,
            magnitudes=magnitudes,
        )

    def backward_result(self) -> OracleGrads:
        """The gradients in storage layout."""
        values, magnitudes = {}, {}
        for name, total in self.asked.sums.items() if self.asked else ():
            values[name], magnitudes[name] = total.value, total.magnitude()
            if name in ("dq", "dk", "dv"):
                values[name] = stored(values[name], self.problem.layout)
                magnitudes[name] = _mapped(
                    magnitudes[name], lambda x: stored(x, self.problem.layout)
                )
        return OracleGrads(grads=Grads(**values), magnitudes=magnitudes)


def _mapped(magnitude: Magnitude, view: Callable[[Tensor], Tensor]) -> Magnitude:
    return Magnitude(view(magnitude.bound), view(magnitude.spread))


def _stored_lse(lse: Tensor, layout: str) -> Tensor:
    """[B', H, S] as [B, H, S], for thd as [tokens, H]."""
    return lse.squeeze(0).t() if layout == "thd" else lse
