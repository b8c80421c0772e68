"""The exact probes as a check: a few rows and columns of every (sequence, KV head), as ``gradtruth.watch`` asks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec

from gradtruth.core.tensors import Forward
from gradtruth.verify.checks import Check, Judged, NotReached, Subject
from gradtruth.verify.checks.verdicts import unanswered
from gradtruth.verify.findings import Kind
from gradtruth.verify.truth.scoring import Place, places

__all__ = ["COLUMNS", "PROBES", "ROWS"]

ROWS, COLUMNS = 8, 8  # of every (sequence, KV head), or as many as there are


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """Laws are blind to dq and dk that are negated or scaled together; a probed row is not."""
    if find_spec("gradtruth.verify.probes") is None:
        yield NotReached("there are no probes yet")
        return
    missing = unanswered(subject)
    forward = subject.first.forward.returned
    if missing is not None or not isinstance(forward, Forward):
        yield missing or NotReached("its forward gave nothing to probe")
        return
    yield from _probed(subject, forward)


def _probed(subject: Subject, forward: Forward) -> Iterator[Judged]:
    from gradtruth.verify.probes import Given, Probe, probe

    case = subject.case
    grads = {n: x for n, x in subject.first.tensors.items() if n in ("dq", "dk", "dv")}
    given = Given(forward.out, forward.lse, case.dout, case.dlse, grads)
    for n, place in enumerate(places(case.problem, case.inputs)):
        for group in range(case.problem.num_gqa_groups):
            rows, columns = _drawn(n, group, place)
            where = Probe(n, group, rows, columns)
            for row in probe(case.problem, case.inputs, given, place, where):
                if not row.passed:
                    kind = Kind.NONFINITE if "NaN" in row.finding else Kind.VALUE
                    yield Judged(tensor=row.tensor, kind=kind, detail=(row.finding,))


def _drawn(sequence: int, group: int, place: Place) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rng = random.Random(f"{sequence} {group}")
    rows = rng.sample(range(place.length_q), min(ROWS, place.length_q))
    columns = rng.sample(range(place.length_kv), min(COLUMNS, place.length_kv))
    return tuple(sorted(rows)), tuple(sorted(columns))


PROBES = Check("probes", _run)
