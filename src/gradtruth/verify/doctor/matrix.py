"""The matrix: what rows mean per check and backend, and the findings behind it, each with an advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradtruth.verify.doctor.advice import advice
from gradtruth.verify.findings import PROCESS, SUPPORT, Kind, Row, Verdict

__all__ = ["Finding", "Matrix", "matrix"]

_BAD = (Verdict.WRONG, Verdict.ERROR)
# What a cell says, the gravest first; "right" says more than that something was not claimed.
_SAID = (Verdict.ERROR, Verdict.WRONG, Verdict.RIGHT, Verdict.NOT_CLAIMED, Verdict.NOT_REACHED)


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of one backend: what a check found in a tensor, over all cases.

    Attributes:
        backend, check, tensor, kind: what is wrong.
        cases: names of the cases that show it, the worst first.
        place: (sequence, head) in the worst case.
        detail: of the worst case.
        advice: one line.
    """

    backend: str
    check: str
    tensor: str | None
    kind: Kind | None
    cases: tuple[str, ...]
    place: str
    detail: str
    advice: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """Verdicts by check and backend.

    Attributes:
        checks, backends: the names, in order.
        cells: per check, per backend: "right 20", "WRONG 2 of 22", "not claimed", "not reached", "refuses all".
        refusals: per backend that refuses everything: why, the commonest reason.
        unfinished: per backend that was stopped before it had been asked everything: where.
        refused: per backend, how many cases it refuses of how many.
        unreached: checks that said nothing of a backend, backends, and why.
        unclaimed: per backend the guarantees that it does not make and that were asked for; what rests on them is no
            fault of it.
        findings: the faults.
    """

    checks: tuple[str, ...]
    backends: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    refusals: dict[str, str]
    unfinished: dict[str, str]
    refused: dict[str, tuple[int, int]]
    unreached: tuple[tuple[str, tuple[str, ...], str], ...]
    unclaimed: dict[str, tuple[str, ...]]
    findings: tuple[Finding, ...]


def matrix(rows: Sequence[Row]) -> Matrix:
    """What the rows of an examination mean together."""
    rows = [row for row in rows if row.backend != "oracle"]
    backends = tuple(dict.fromkeys(row.backend for row in rows))
    checks = tuple(dict.fromkeys(row.check for row in rows if row.check != SUPPORT))
    verdicts = _verdicts(rows)
    cases = {name: {row.case for row in rows if row.backend == name} for name in backends}
    refused = {
        name: {row.case for row in rows if row.backend == name and row.verdict is Verdict.REFUSES}
        for name in backends
    }
    cells = tuple(
        tuple(_cell(verdicts.get((check, name), {})) for name in backends) for check in checks
    )
    return Matrix(
        checks=checks,
        backends=backends,
        cells=cells,
        refusals={
            name: _commonest(
                row.detail for row in rows if row.backend == name and row.case in refused[name]
            )
            for name in backends
            if refused[name] == cases[name]
        },
        unfinished={
            row.backend: "; ".join(row.detail)
            for row in rows
            if row.check == PROCESS and row.verdict is Verdict.NOT_REACHED
        },
        refused={name: (len(refused[name]), len(cases[name])) for name in backends},
        unreached=_unreached(rows, checks, [b for b in backends if refused[b] != cases[b]]),
        unclaimed=_unclaimed(rows),
        findings=_findings(rows),
    )


def _verdicts(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, Verdict]]:
    """Per (check, backend), the gravest verdict of each case."""
    found: dict[tuple[str, str], dict[str, Verdict]] = {}
    for row in rows:
        if row.check != SUPPORT:
            cases = found.setdefault((row.check, row.backend), {})
            before = cases.get(row.case, row.verdict)
            cases[row.case] = min(before, row.verdict, key=_SAID.index)
    return found


def _cell(cases: dict[str, Verdict]) -> str:
    counts = Counter(cases.values())
    reached = sum(counts[verdict] for verdict in (*_BAD, Verdict.RIGHT))
    bad = sum(counts[verdict] for verdict in _BAD)
    if bad:
        return f"WRONG {bad} of {reached}"
    for verdict in (Verdict.RIGHT, Verdict.NOT_CLAIMED, Verdict.NOT_REACHED):
        if counts[verdict]:
            return f"right {reached}" if verdict is Verdict.RIGHT else verdict.value
    return "-"


def _unreached(
    rows: Sequence[Row], checks: Sequence[str], backends: Sequence[str]
) -> tuple[tuple[str, tuple[str, ...], str], ...]:
    """What no case reached, backends with the same reason together."""
    found: dict[tuple[str, str], list[str]] = {}
    for check in checks:
        for name in backends if check != PROCESS else ():
            said = [row for row in rows if (row.check, row.backend) == (check, name)]
            if all(row.verdict is Verdict.NOT_REACHED for row in said):
                ended = [row for row in rows if (row.check, row.backend) == (PROCESS, name)]
                why = _commonest(row.detail for row in said or ended)
                found.setdefault((check, why or "it was not asked"), []).append(name)
    return tuple((check, tuple(names), why) for (check, why), names in found.items())


def _unclaimed(rows: Iterable[Row]) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    for row in rows:
        if row.verdict is Verdict.NOT_CLAIMED and row.detail:
            found.setdefault(row.backend, set()).add(row.detail[0].partition(":")[0])
    return {name: tuple(sorted(claims)) for name, claims in found.items()}


def _findings(rows: Iterable[Row]) -> tuple[Finding, ...]:
    groups: dict[tuple[str, str, str | None, Kind | None], list[Row]] = {}
    for row in rows:
        if row.verdict in _BAD:
            groups.setdefault((row.backend, row.check, row.tensor, row.kind), []).append(row)
    return tuple(_finding(group) for group in groups.values())


def _finding(rows: list[Row]) -> Finding:
    worst = max(rows, key=_used)
    part = worst.worst
    place = "" if part is None or part.sequence is None else f"sequence {part.sequence}"
    place += "" if part is None or part.head is None else f"{', ' if place else ''}head {part.head}"
    cases = sorted(dict.fromkeys(row.case for row in rows), key=lambda name: name != worst.case)
    return Finding(
        backend=worst.backend,
        check=worst.check,
        tensor=worst.tensor,
        kind=worst.kind,
        cases=tuple(cases),
        place=place,
        detail="; ".join(worst.detail),
        advice=advice(worst),
    )


def _used(row: Row) -> float:
    used = row.worst.used if row.worst else 0.0
    return used if used == used else float("inf")


def _commonest(details: Iterable[tuple[str, ...]]) -> str:
    counts = Counter(text for detail in details for text in detail)
    return counts.most_common(1)[0][0] if counts else ""
