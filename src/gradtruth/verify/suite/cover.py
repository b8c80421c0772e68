"""A pairwise cover: few rows in which every allowed pair of values of two axes occurs.

Faults of attention sit where two features meet (a window and a left-padded sequence, a broadcast bias and a
group of heads). All combinations are too many; all pairs are some hundred.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Cover", "Rule", "cover"]

Row = dict[str, str]
Rule = tuple[str, str, Callable[[str, str], bool]]

_ATTEMPTS = 40


@dataclass(frozen=True, slots=True)
class Cover:
    """Rows and what they cover.

    Attributes:
        rows: one value per axis.
        pairs: number of pairs of values that some row can hold.
        covered: how many of them some row holds.
        impossible: pairs that no row could be found for, although no rule forbids them directly.
    """

    rows: tuple[Row, ...]
    pairs: int
    covered: int
    impossible: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        share = 100.0 * self.covered / max(self.pairs, 1)
        return (
            f"{len(self.rows)} rows cover {self.covered} of {self.pairs} possible pairs ({share:.1f} %); "
            f"{len(self.impossible)} pairs excluded by combinations of rules"
        )


def cover(
    axes: Mapping[str, Mapping[str, float]], rules: Sequence[Rule], count: int, seed: int
) -> Cover:
    """Cover every allowed pair, then draw rows at random until there are ``count``.

    Args:
        axes: per axis its values, each with a weight for the random part.
        rules: (axis, other axis, allowed): pairs for which ``allowed`` is False never occur.
        count: number of rows, more if the cover needs more.
        seed: the same seed gives the same rows on every machine.
    """
    table = _Table(axes, rules)
    rng = random.Random(seed)
    rows, impossible = [], []
    for first, second in table.pairs:
        if table.open_partners[first] >> second & 1:
            found = _complete(table, rng, (first, second), greedy=True)
            if found is None:
                impossible.append((table.names[first], table.names[second]))
                table.drop(first, second)
            else:
                rows.append(found)
                table.mark(found)
    while len(rows) < count:
        found = _complete(table, rng, (), greedy=False)
        if found is not None:
            rows.append(found)
    pairs = len(table.pairs) - len(impossible)
    left = sum(partners.bit_count() for partners in table.open_partners) // 2
    rng.shuffle(rows)
    named = tuple(table.named(row) for row in rows)
    return Cover(named, pairs, pairs - left, tuple(impossible))


class _Table:
    """Values numbered through all axes; sets of values as bits of an int."""

    def __init__(self, axes: Mapping[str, Mapping[str, float]], rules: Sequence[Rule]) -> None:
        self.axes = tuple(axes)
        self.values = [(axis, value) for axis in axes for value in axes[axis]]
        self.names = [f"{axis}={value}" for axis, value in self.values]
        self.weights = [axes[axis][value] for axis, value in self.values]
        self.members = {
            axis: [at for at, (own, _) in enumerate(self.values) if own == axis] for axis in axes
        }
        self.forbidden = [0] * len(self.values)
        for axis, other, allowed in rules:
            for a in self.members[axis]:
                for b in self.members[other]:
                    if not allowed(self.values[a][1], self.values[b][1]):
                        self.forbidden[a] |= 1 << b
                        self.forbidden[b] |= 1 << a
        self.pairs = [
            (a, b)
            for a in range(len(self.values))
            for b in range(a + 1, len(self.values))
            if self.values[a][0] != self.values[b][0] and not self.forbidden[a] >> b & 1
        ]
        self.open_partners = [0] * len(self.values)
        for a, b in self.pairs:
            self.open_partners[a] |= 1 << b
            self.open_partners[b] |= 1 << a

    def drop(self, a: int, b: int) -> None:
        self.open_partners[a] &= ~(1 << b)
        self.open_partners[b] &= ~(1 << a)

    def mark(self, row: list[int]) -> None:
        held = sum(1 << at for at in row)
        for at in row:
            self.open_partners[at] &= ~held

    def named(self, row: list[int]) -> Row:
        found = dict(self.values[at] for at in row)
        return {axis: found[axis] for axis in self.axes}


def _complete(
    table: _Table, rng: random.Random, fixed: tuple[int, ...], *, greedy: bool
) -> list[int] | None:
    """A full row with the fixed values; greedy prefers values that cover more open pairs."""
    for _ in range(_ATTEMPTS):
        row = list(fixed)
        held = sum(1 << at for at in row)
        taken = {table.values[at][0] for at in row}
        order = [axis for axis in table.axes if axis not in taken]
        rng.shuffle(order)
        for axis in order:
            free = [at for at in table.members[axis] if not table.forbidden[at] & held]
            if not free:
                break
            if greedy:
                gains = [(table.open_partners[at] & held).bit_count() for at in free]
                best = max(gains)
                free = [at for at, gain in zip(free, gains, strict=True) if gain == best]
            choice = rng.choices(free, [table.weights[at] for at in free])[0]
            row.append(choice)
            held |= 1 << choice
        else:
            return row
    return None
