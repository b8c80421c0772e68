"""The exact probes as a check: a few rows and columns of every (sequence, KV head), as ``gradtruth.watch`` asks."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from gradtruth.verify.checks import Check, Judged, NotReached, Subject
from gradtruth.verify.checks.verdicts import unanswered
from gradtruth.verify.findings import Kind

__all__ = ["COLUMNS", "PROBES", "ROWS", "there"]

ROWS, COLUMNS = 8, 8  # of every (sequence, KV head), or as many as there are


def there() -> bool:
    """Whether this version has probes."""
    return find_spec("gradtruth.verify.probes") is not None


def _run(subject: Subject) -> Iterator[Judged | NotReached]:
    """Laws are blind to dq and dk that are negated or scaled together; a probed row is not."""
    from gradtruth.verify.probes import probe

    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    for row in probe(subject.case, subject.first.tensors, rows=ROWS, columns=COLUMNS):
        if not row.passed:
            kind = Kind.NONFINITE if "NaN" in row.finding else Kind.VALUE
            yield Judged(tensor=row.tensor, kind=kind, detail=(row.finding,))


PROBES = Check("probes", _run)
