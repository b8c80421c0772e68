"""Reductions: what is tried on calls, in the order of ``size``; on all calls alike first, then on each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.edits.arrangement import contiguous, is_contiguous
from gradtruth.verify.edits.channels import channels
from gradtruth.verify.edits.crop import Keep, crop, lengths_of
from gradtruth.verify.edits.heads import kv_heads, query_heads
from gradtruth.verify.edits.layouts import less_outside
from gradtruth.verify.edits.options import OPTIONS, options_of, without
from gradtruth.verify.edits.sequences import sequences
from gradtruth.verify.edits.values import NUMBERS, integers, patterned, round_values, zeros
from gradtruth.verify.minimise.finding import Calls
from gradtruth.verify.minimise.search import Search

__all__ = ["REDUCTIONS", "reduce_once"]

Edit = Callable[[Case], Case]
_KEEPS: tuple[Keep, ...] = ("first", "last")


def reduce_once(search: Search) -> None:
    """Every reduction once.

    Raises:
        Exhausted: the budget is used up.
    """
    for reduction in REDUCTIONS:
        reduction(search)


def _fewer_calls(search: Search) -> None:
    if len(search.calls) > 1 and search.attempt("the last call alone", lambda calls: calls[-1:]):
        return
    search.subset(
        "earlier calls",
        len(search.calls) - 1,
        lambda calls, kept: (*(calls[n] for n in kept), calls[-1]),
    )


def _contiguous(search: Search) -> None:
    if all(map(is_contiguous, search.calls)):
        search.keep_strides = False
        return
    search.keep_strides = False
    search.keep_strides = not search.attempt("contiguous", lambda calls: _all(calls, contiguous))


def _sequences(search: Search, at: int | None) -> None:
    def build(calls: Calls, kept: list[int]) -> Calls:
        return _edit(calls, at, lambda case: sequences(case, kept, keep_gaps=True))

    count = min(case.problem.batch for case in _of(search.calls, at))
    search.subset(f"sequences{_name(search, at)}", count, build)


def _kv_heads(search: Search, at: int | None) -> None:
    def build(calls: Calls, kept: list[int]) -> Calls:
        return _edit(calls, at, lambda case: kv_heads(case, kept))

    count = min(case.problem.num_gqa_groups for case in _of(search.calls, at))
    search.subset(f"KV heads{_name(search, at)}", count, build)


def _query_heads(search: Search, at: int | None) -> None:
    def build(calls: Calls, kept: list[int]) -> Calls:
        return _edit(calls, at, lambda case: query_heads(case, kept))

    count = min(case.problem.group_size for case in _of(search.calls, at))
    search.subset(f"query heads of every group{_name(search, at)}", count, build)


def _shorter(search: Search) -> None:
    """All sequences of all calls: what makes every later look cheap."""
    _fewer_tokens(search, None, ("queries", "keys"))


def _tokens(search: Search, at: int | None) -> None:
    """Queries and keys together, then each."""
    for sides in (("queries", "keys"), ("queries",), ("keys",)):
        _fewer_tokens(search, at, sides)


def _fewer_tokens(search: Search, at: int | None, sides: tuple[str, ...]) -> None:
    for keep in _KEEPS:
        what = f"the {keep} {' and '.join(sides)}{_name(search, at)}"
        longest = max((_longest(case, sides) for case in _of(search.calls, at)), default=0)
        search.least(what, longest, partial(_cropped, at=at, sides=sides, keep=keep))


def _cropped(
    calls: Calls, count: int, *, at: int | None, sides: tuple[str, ...], keep: Keep
) -> Calls:
    return _edit(calls, at, lambda case: crop(case, **dict.fromkeys(sides, count), keep=keep))


def _tokens_of_sequences(search: Search) -> None:
    """Each sequence alone, down to none."""
    for at in range(len(search.calls)):
        if search.calls[at].problem.spec.lengths == "full":
            continue
        for n in range(search.calls[at].problem.batch):
            for side in ("queries", "keys"):
                for keep in _KEEPS:
                    what = f"the {keep} {side} of sequence {n}{_name(search, at)}"
                    build = partial(_cropped_alone, at=at, n=n, side=side, keep=keep)
                    search.least(what, _lengths(search.calls[at], side)[n], build, low=0)


def _cropped_alone(calls: Calls, count: int, *, at: int, n: int, side: str, keep: Keep) -> Calls:
    own = _lengths(calls[at], side)
    own[n] = min(count, own[n])
    return _edit(calls, at, lambda case: crop(case, **{side: own}, keep=keep))


def _lengths(case: Case, side: str) -> list[int]:
    return lengths_of(case)[0 if side == "queries" else 1]


def _outside(search: Search, at: int | None) -> None:
    """Places outside sequences: gaps, tails, padding."""

    def build(calls: Calls, most: int) -> Calls:
        return _edit(calls, at, lambda case: less_outside(case, most))

    high = max(max(case.problem.seqlen_q, case.problem.seqlen_kv) for case in _of(search.calls, at))
    search.least(f"places outside in a row, at most{_name(search, at)}", high, build, low=0)


def _channels(search: Search, at: int | None) -> None:
    """D and Dv together, then each."""
    cases = _of(search.calls, at)
    D = max(case.problem.head_dim_qk for case in cases)
    Dv = max(case.problem.head_dim_v for case in cases)
    name = _name(search, at)
    search.least(f"channels{name}", max(D, Dv), partial(_fewer, at=at, of=("qk", "v")))
    search.least(f"channels of q and k{name}", D, partial(_fewer, at=at, of=("qk",)))
    search.least(f"channels of v{name}", Dv, partial(_fewer, at=at, of=("v",)))


def _fewer(calls: Calls, count: int, *, at: int | None, of: tuple[str, ...]) -> Calls:
    def edit(case: Case) -> Case:
        problem = case.problem
        return channels(
            case,
            min(count, problem.head_dim_qk) if "qk" in of else None,
            min(count, problem.head_dim_v) if "v" in of else None,
        )

    return _edit(calls, at, edit)


def _options(search: Search, at: int | None) -> None:
    for option in OPTIONS:
        if any(option in options_of(case) for case in _of(search.calls, at)):
            what = f"without {option}{_name(search, at)}"
            search.attempt(what, partial(_without, at=at, option=option))


def _without(calls: Calls, *, at: int | None, option: str) -> Calls:
    return _edit(calls, at, lambda case: without(case, option))


_SIMPLER: tuple[tuple[str, Callable[[Case, list[str]], Case]], ...] = (
    ("zeros", zeros),
    ("closed form", patterned),
    ("integers", lambda case, names: integers(case, names, 2)),
    ("integers", integers),
    ("integers", lambda case, names: integers(case, names, 1000)),
    ("4 bits", lambda case, names: round_values(case, 4, names)),
)


def _closed_form(search: Search, at: int | None) -> None:
    """All values: what shows then does not hang on rounding, and is written in a line."""
    search.attempt(
        f"all values: closed form{_name(search, at)}",
        partial(_valued, at=at, names=_held(search, at), edit=patterned),
    )


def _values(search: Search, at: int | None) -> None:
    """The values of each tensor as simple as they may be."""
    names, name = _held(search, at), _name(search, at)
    for what, edit in _SIMPLER:
        for one in names:
            search.attempt(f"{one}: {what}{name}", partial(_valued, at=at, names=[one], edit=edit))


def _held(search: Search, at: int | None) -> list[str]:
    """The tensors with numbers."""
    held = {name for case in _of(search.calls, at) for name in case.tensors()}
    return [name for name in NUMBERS if name in held]


def _valued(
    calls: Calls,
    *,
    at: int | None,
    names: list[str],
    edit: Callable[[Case, list[str]], Case],
) -> Calls:
    return _edit(
        calls, at, lambda case: edit(case, [name for name in names if name in case.tensors()])
    )


def _longest(case: Case, sides: tuple[str, ...]) -> int:
    return max((length for side in sides for length in _lengths(case, side)), default=0)


def _targets(search: Search) -> Iterator[int | None]:
    """All calls (None), then each alone, the judged one first."""
    yield None
    if len(search.calls) > 1:
        yield from reversed(range(len(search.calls)))


def _of(calls: Calls, at: int | None) -> Calls:
    return calls if at is None else (calls[at],)


def _name(search: Search, at: int | None) -> str:
    return "" if at is None or len(search.calls) == 1 else f" (call {at + 1})"


def _edit(calls: Calls, at: int | None, edit: Edit) -> Calls:
    if at is None:
        return _all(calls, edit)
    return tuple(edit(case) if n == at else case for n, case in enumerate(calls))


def _all(calls: Calls, edit: Edit) -> Calls:
    """Every call edited; one that does not allow the edit stays, as long as another one does."""
    found, allowed, refusal = [], False, None
    for case in calls:
        try:
            found.append(edit(case))
            allowed = True
        except InvalidProblem as error:
            found.append(case)
            refusal = error
    if refusal is not None and not allowed:
        raise refusal
    return tuple(found)


def _on_each(reduction: Callable[[Search, int | None], None]) -> Callable[[Search], None]:
    """On all calls alike, then on each alone."""

    def reduce(search: Search) -> None:
        for at in _targets(search):
            reduction(search, at)

    return reduce


REDUCTIONS: tuple[Callable[[Search], None], ...] = (
    _fewer_calls,
    _contiguous,
    _on_each(_closed_form),
    _shorter,
    _on_each(_sequences),
    _on_each(_kv_heads),
    _on_each(_query_heads),
    _on_each(_tokens),
    _tokens_of_sequences,
    _on_each(_outside),
    _on_each(_channels),
    _on_each(_options),
    _on_each(_closed_form),
    _on_each(_values),
)
"""In the order of ``size``, but for what makes the others cheap or clear: short sequences and closed forms."""
