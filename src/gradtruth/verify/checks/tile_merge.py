"""tile_merge: forwards of tiles merge to the whole, and backwards of tiles from the whole's lse add up to it."""

from __future__ import annotations

from collections.abc import Iterator

from gradtruth.verify.checks.check import Check, Judged, NotClaimed, NotReached
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import differences, unanswered
from gradtruth.verify.suite.inputs import Sample
from gradtruth.verify.suite.tiling import run_tiled, tile_cover

__all__ = ["TILE_MERGE"]

_SEED = 1
_SLACK = 3.0  # every part is rounded once more, and so is every merge


def _run(subject: Subject) -> Iterator[Judged | NotReached | NotClaimed]:
    """A ring's merge went through exp(lse) and overflowed; another's backward used the keys of the first step.

    NVIDIA/TransformerEngine#716, huggingface/diffusers#14265. Whatever splits keys or sequences rests on this.
    """
    case = subject.case
    missing = unanswered(subject)
    if missing is not None:
        yield missing
        return
    if not subject.claims.foreign_lse:
        yield NotClaimed("foreign_lse: the backward of a tile needs the whole's lse")
        return
    for part in tile_cover(case.problem, case.inputs, _SEED):
        reasons = subject.backend.supports(part.problem, case.device).reasons
        if reasons:
            yield NotReached(f"it takes no tiles: {'; '.join(map(str, reasons))}")
            return
    # Tiles are views: a backend that writes what it is given writes a copy of the case.
    found = run_tiled(Sample.of(case.to(case.device)), subject.backend, _SEED)
    names = set(found)
    if case.problem.dtype == "float64" and case.problem.bias_dtype != "float64":
        names.discard(
            "dbias"
        )  # every part was rounded to the bias's dtype, which the budget does not know
    expected = subject.first.tensors
    yield from differences(subject, found, expected, "the whole", sorted(names), _SLACK)


TILE_MERGE = Check("tile_merge", _run)
