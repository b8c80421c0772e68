"""Exact probes: a few query rows and key columns of one (sequence, KV head), computed in fp64 and compared.

A query row (out, lse, dq) costs O(T D), a key column (dk, dv) O(S D) from out and lse of the whole, so both can be had
during training where the whole oracle cannot. Rows and columns are problems themselves, by ``core.tile`` of one query
or one key, and the oracle computes them like any other, with the size of their rounding errors.

The verdict is that of ``truth.budget`` on these rows, without a yardstick: its four tests with the allowances of
``_TOLERANCE`` times the oracle's own bound and spread. So an element passes within 4 eps M, M the sums of absolute
values (``truth/README.md``), and a common factor is found down to 4 times what independent roundings of the probed
elements amount to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradtruth.core.extents import Extents
from gradtruth.core.layout import canonical, canonical_lse, stored
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs, Wanted
from gradtruth.core.tile import tile
from gradtruth.verify.truth.budget import Row, compare
from gradtruth.verify.truth.oracle import OracleForward, OracleGrads, backward, evaluate
from gradtruth.verify.truth.oracle import forward as oracle_forward
from gradtruth.verify.truth.rounding import Magnitude
from gradtruth.verify.truth.scoring import Place
from gradtruth.verify.truth.scoring import Sequence as Whole

__all__ = ["Probe", "probe"]

_TOLERANCE = 4.0
_BLOCK = 1 << 20  # elements of one [R, block, T] tensor of scores


@dataclass(frozen=True, slots=True)
class Probe:
    """Where to look.

    Attributes:
        sequence, group: the sequence and the KV head.
        rows: indices i of queries within the sequence, at least one of them for out, lse and dq.
        columns: indices j of keys within the sequence.
    """

    sequence: int
    group: int
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Given:
    """What a call computed, in the problem's layout; None where it is not known.

    Attributes:
        out, lse: of the forward.
        dout, dlse: what its backward got; without dout only the forward is probed.
        grads: dq, dk, dv.
    """

    out: Tensor
    lse: Tensor | None = None
    dout: Tensor | None = None
    dlse: Tensor | None = None
    grads: Mapping[str, Tensor] | None = None


def probe(
    problem: Problem, inputs: Inputs, given: Given, place: Place, where: Probe
) -> list[Row]:
    """Compare the rows and columns of one probe.

    Args:
        problem, inputs: the call's; with dropout its mask must be the library's own.
        given: what it computed.
        place: of the probe's sequence, from ``truth.scoring.places``.
        where: the probe; its indices are within the sequence.

    Returns:
        One row per (tensor, query head of the KV head) or (tensor, KV head), heads numbered as in the problem.
    """
    part = _Part(problem, inputs, given, place, where)
    return [*part.rows(), *part.columns()]


class _Part:
    """One (sequence, KV head) of a call."""

    def __init__(
        self, problem: Problem, inputs: Inputs, given: Given, place: Place, where: Probe
    ) -> None:
        self.problem, self.given, self.place, self.where = problem, given, place, where
        n, g = where.sequence, where.group
        self.row = 0 if problem.layout == "thd" else n
        self.heads = slice(g * problem.group_size, (g + 1) * problem.group_size)
        self.keys = slice(g, g + 1)
        cut, held = tile(problem, inputs, sequences=(n, n + 1), groups=(g, g + 1))
        offset = inputs.softmax_offset
        # A tile has no sink, as its keys are some of all. These have all keys, or lse from outside.
        self.spec: Spec = replace(
            cut.spec, layout="bshd", softmax=problem.spec.softmax, max_logit=False
        )
        self.held = replace(held, softmax_offset=None if offset is None else offset[self.heads])
        self.extents = Extents.unpack(held.extents)

    # ------------------------------------------------------------ rows

    def rows(self) -> Iterator[Row]:
        """out, lse and dq of the probed queries."""
        at = torch.tensor(self.where.rows, device=self.given.out.device)
        if not len(at):
            return
        given, problem = self.given, self.problem
        places = at + self.place.start_q
        q = self._queries(self.problem_q(), places)
        many = len(at)
        part, held = self._problem(
            q=q[:, None], k=self._expanded("k", many), v=self._expanded("v", many),
            shift={"start_q": -self.extents.start_q, "length_q": 1 - self.extents.length_q,
                   "index_q": at, "origin_q": at, "diagonal": at}, count=many,
        )  # fmt: skip
        held = self._hidden(held, "q", places)
        measured = {"out": self._queries(given.out, places)}
        if given.lse is not None:
            measured["lse"] = self._lines(given.lse, places)[..., None]
        dq = (given.grads or {}).get("dq")
        if given.dout is None or dq is None:
            found = oracle_forward(part, held, device=q.device)
            yield from self._compare(found, measured, queries=True)
            return
        dout = self._queries(given.dout, places)[:, None]
        dlse = None if given.dlse is None else self._lines(given.dlse, places)[..., None]
        wanted = Wanted(dk=False, dv=False, dbias=False, dsoftmax_offset=False)
        forward, _ = evaluate(part, held, dout, dlse, wanted, device=q.device)
        yield from self._compare(forward, measured, queries=True)
        # The backward reads the out that was rounded, and its own lse.
        lse = forward.lse if given.lse is None else self._lines(given.lse, places)[..., None]
        pair = measured["out"][:, None].double(), lse.double()
        grads = backward(part, held, dout, dlse, wanted, forward=pair, device=q.device)
        yield from self._compare(grads, {"dq": self._queries(dq, places)}, queries=True)

    # ------------------------------------------------------------ columns

    def columns(self) -> Iterator[Row]:
        """dk and dv of the probed keys."""
        given, many = self.given, len(self.where.columns)
        grads = {n: x for n, x in (given.grads or {}).items() if n in ("dk", "dv")}
        if not many or given.dout is None or not grads:
            return
        at = torch.tensor(self.where.columns, device=given.out.device)
        places = at + self.place.start_kv
        held = {
            name: canonical(getattr(self.held, name), self.problem.layout)[
                0, places[:, None]
            ]
            for name in ("k", "v")
        }
        part, inputs = self._problem(
            q=self._expanded("q", many), **held,
            shift={"start_kv": -self.extents.start_kv, "length_kv": 1 - self.extents.length_kv,
                   "index_kv": at, "origin_kv": at, "diagonal": -at}, count=many,
        )  # fmt: skip
        inputs = self._hidden(inputs, "kv", places)
        queries = torch.arange(self.problem.seqlen_q, device=given.out.device)
        lse = self._lse() if given.lse is None else self._lines(given.lse, queries).t()
        whole = {
            "dout": self._queries(given.dout, queries),
            "out": self._queries(given.out, queries),
            "lse": lse,
            "dlse": None if given.dlse is None else self._lines(given.dlse, queries).t(),
        }
        each = {n: None if x is None else x.expand(many, *x.shape) for n, x in whole.items()}
        wanted = Wanted(dq=False, dbias=False, dsoftmax_offset=False, dk="dk" in grads, dv="dv" in grads)  # fmt: skip
        found = backward(
            part, inputs, each["dout"], each["dlse"], wanted,
            forward=(each["out"].double(), each["lse"].double()), device=given.out.device,
        )  # fmt: skip
        measured = {
            name: canonical(x, self.problem.layout)[self.row, places][:, self.keys]
            for name, x in grads.items()
        }
        yield from self._compare(found, measured, queries=False)

    def _lse(self) -> Tensor:
        """The exact lse, fp64 [R, S], where the call returned none; -inf outside the sequence."""
        spec = replace(self.spec, layout=self.problem.layout)
        problem = Problem.of(spec, self.held)
        place = Place(*self.extents.pack()[:, 0].tolist())
        device = self.held.q.device
        whole = Whole(problem, self.held, 0, place, device)
        heads = self.problem.group_size
        found = torch.full((heads, self.problem.seqlen_q), -torch.inf, dtype=torch.float64, device=device)  # fmt: skip
        sink = None
        if spec.sink:
            offset = self.held.softmax_offset
            sink = torch.zeros(heads, device=device) if offset is None else offset
            sink = sink.double().view(-1, 1)
        step = max(1, _BLOCK // max(1, heads * place.length_kv))
        for first in range(0, place.length_q, step):
            count = min(step, place.length_q - first)
            lse = whole.scores(first, count).x.logsumexp(-1)
            if sink is not None:
                lse = torch.logaddexp(lse, sink)
            if whole.shown_q is not None:
                lse = lse.masked_fill(~whole.shown_q[first : first + count], -torch.inf)
            found[:, place.start_q + first : place.start_q + first + count] = lse
        return found

    # ------------------------------------------------------------ parts of tensors

    def problem_q(self) -> Tensor:
        """All queries of the call's layout, with all heads of the probed group."""
        return self.held.q

    def _queries(self, tensor: Tensor, places: Tensor) -> Tensor:
        """[places, R, D] of a tensor of the call, or of the part."""
        whole = canonical(tensor, self.problem.layout)
        row = self.row if whole.shape[0] > self.row and tensor is not self.held.q else 0
        found = whole[row, places]
        return found if found.shape[1] == self.problem.group_size and tensor is self.held.q else found[:, self.heads]  # fmt: skip

    def _lines(self, tensor: Tensor, places: Tensor) -> Tensor:
        """[places, R] of an lse of the call."""
        return canonical_lse(tensor, self.problem.layout)[self.row, self.heads][:, places].t()

    def _expanded(self, name: str, many: int) -> Tensor:
        """A tensor of the part, the same for every probed row or column: [many, S, heads, D]."""
        whole = canonical(getattr(self.held, name), self.problem.layout)
        return whole.expand(many, *whole.shape[1:])

    def _hidden(self, held: Inputs, side: str, places: Tensor) -> Inputs:
        """With the padding mask of the probed places, and the other side's for each of them."""
        if self.problem.layout == "thd":
            return replace(held, padding_mask_q=None, padding_mask_kv=None)
        found = {}
        for each in ("q", "kv"):
            mask = getattr(self.held, f"padding_mask_{each}")
            if mask is not None:
                mask = mask[0, places][:, None] if each == side else mask.expand(len(places), -1)
            found[f"padding_mask_{each}"] = mask
        return replace(held, **found)

    def _problem(
        self, *, q: Tensor, k: Tensor, v: Tensor, shift: Mapping[str, Tensor], count: int
    ) -> tuple[Problem, Inputs]:
        """The part as ``count`` sequences, each with its extents moved; dropout is that of the one sequence."""
        extents = {
            name: getattr(self.extents, name).expand(count) for name in Extents.__dataclass_fields__
        }
        for name, by in shift.items():
            extents[name] = (extents[name] + by).int()
        held = self.held
        shared = {}
        for name in ("bias", "attention_mask"):
            tensor = getattr(held, name)
            if tensor is not None:
                shared[name] = tensor.detach().expand(count, *tensor.shape[1:]) if tensor.shape[0] > 1 else tensor  # fmt: skip
        slopes = held.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            shared["alibi_slopes"] = slopes.expand(count, -1)
        inputs = replace(held, q=q, k=k, v=v, extents=Extents(**extents).pack(), **shared)
        return Problem.of(self.spec, inputs), inputs

    # ------------------------------------------------------------ verdicts

    def _compare(
        self, found: OracleForward | OracleGrads, measured: Mapping[str, Tensor], *, queries: bool
    ) -> Iterator[Row]:
        """Judge [places, heads, D], all places as the rows of one sequence."""
        for name, oracle in found.items():
            if name not in measured:
                continue
            size = found.magnitudes[name]
            # [many, 1, R, D]; lse [many, R, 1] as [many, R, 1].
            exact, bound, spread = (
                x if name == "lse" else x.squeeze(1) for x in (oracle, size.bound, size.spread)
            )
            problem, inputs = _stand_in(self.problem, measured[name], queries=queries, name=name)
            forms = [_as_lse(x) if name == "lse" else x[None] for x in
                     (measured[name].double(), exact, _TOLERANCE * bound, _TOLERANCE * spread)]  # fmt: skip
            rows = compare(
                problem, inputs, name, forms[0], forms[1], Magnitude(forms[2], forms[3]), forms[1]
            )
            base = self.heads.start if queries else self.where.group
            for row in rows:
                yield replace(row, sequence=self.where.sequence, head=base + (row.head or 0))


def _as_lse(tensor: Tensor) -> Tensor:
    """[many, R, 1] as [1, R, many]."""
    return tensor.squeeze(-1).t()[None]


def _stand_in(
    problem: Problem, measured: Tensor, *, queries: bool, name: str
) -> tuple[Problem, Inputs]:
    """A dense problem of one sequence with these rows, which says to ``compare`` where they are."""
    many, heads = measured.shape[:2]
    one = measured.new_zeros(1).to(problem.torch_dtype)
    S, T = (many, 1) if queries else (problem.seqlen_q * problem.group_size, many)
    q = one.expand(1, S, heads, 1)
    k = one.expand(1, T, heads, 1)
    spec = Spec(allow_tf32=problem.spec.allow_tf32)
    inputs = Inputs(q, k, k)
    del name
    return Problem.of(spec, inputs), inputs
