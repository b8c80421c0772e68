"""Saved: wrong calls become case files, at once and within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from gradtruth.verify.capture.budget import Budget
from gradtruth.verify.capture.folder import Folder
from gradtruth.verify.capture.saver import Saver
from gradtruth.verify.capture.selection import Place
from gradtruth.verify.capture.tally import Tally
from gradtruth.verify.interception import Call
from gradtruth.verify.watch.finding import Finding

__all__ = ["Saved"]


class Saved:
    """Writes one case for each layer and set of wrong tensors.

    Args:
        folder: where to.
        budget: how much.

    Attributes:
        tally: what could not be written, and why.
    """

    def __init__(self, folder: Folder, budget: Budget) -> None:
        self._folder, self._budget = folder, budget
        self._known: set[tuple[str, ...]] = set()
        self.tally = Tally()

    def save(
        self,
        place: Place,
        call: Call,
        upstream: tuple[Tensor | None, Tensor | None],
        found: Sequence[Finding],
    ) -> Path | None:
        """The file, or None where there is one like it, or where it could not be written.

        Args:
            place: where the call was made.
            call: the call; its inputs hold what they held.
            upstream: dout and dlse.
            found: what is wrong with it.
        """
        key = (place.layer, *(each.tensor for each in found))
        if key in self._known:
            return None
        facts = {f"wrong_{each.tensor.replace(', ', '_')}": str(each) for each in found}
        saver = Saver(self._folder, self._budget, facts)
        saver.save(place, call.meaning, upstream, self.tally)
        if not saver.files:
            return None
        self._known.add(key)
        return saver.files[-1]
