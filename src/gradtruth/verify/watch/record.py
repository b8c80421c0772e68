"""Record: what a watch looked at, what it found, and what it did not reach and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gradtruth.verify.capture.selection import Place
from gradtruth.verify.capture.tally import Tally
from gradtruth.verify.interception import Call
from gradtruth.verify.watch.examination import Answer
from gradtruth.verify.watch.finding import Finding

__all__ = ["Record"]

_MOST = 1000
_MOST_REASONS = 50
_OTHERS = "other reasons"
_LISTED = 8
LAWS_ONLY = "dropout_p is {:g}, and which weights were dropped is not known: the laws are looked at, no probe is"


class Record:
    """Counts and lists.

    Attributes:
        findings: the first 1,000.
        found: how many there were.
        calls: looked at, by (layer, entry point).
        waiting: calls of watched steps whose turn it was not.
        not_reached: reasons to numbers of calls.
        unconfirmed: laws that did not hold where every tensor is within its budget.
        compiled: modules that torch.compile made.
        unsaved: why wrong calls were not written.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.found = 0
        self.calls: Counter[tuple[str, str]] = Counter()
        self.waiting = 0
        self.not_reached: Counter[str] = Counter()
        self.unconfirmed: Counter[str] = Counter()
        self.compiled: tuple[str, ...] = ()
        self.unsaved = Tally()

    def see(self, place: Place, call: Call, answer: Answer) -> None:
        """A call was looked at."""
        self.calls[place.layer, place.entry] += 1
        if not call.known_dropout:
            self.pass_over(LAWS_ONLY.format(call.spec.dropout_p))
        for reason in answer.not_reached:
            self.pass_over(reason)
        for text in answer.unconfirmed:
            self.unconfirmed[text.partition(" is off")[0]] += 1

    def find(self, found: Finding) -> None:
        """Something is wrong."""
        self.found += 1
        if len(self.findings) < _MOST:
            self.findings.append(found)

    def pass_over(self, reason: str) -> None:
        """A call, or a part of it, was not looked at."""
        known = reason in self.not_reached or len(self.not_reached) < _MOST_REASONS
        self.not_reached[reason if known else _OTHERS] += 1

    def alarming(self, watched: int) -> bool:
        """Something was found or not reached."""
        return bool(self.found or self.not_reached or self.compiled or (watched and not self.calls))

    def summary(self, steps: int, watched: int) -> str:
        """In words.

        Args:
            steps: how many began.
            watched: how many of them were watched.
        """
        return "\n".join(self._lines(steps, watched))

    def _lines(self, steps: int, watched: int) -> Iterator[str]:
        calls, layers = self.calls.total(), len(self.calls)
        seen = f"{calls} attention calls of {layers} layers looked at in {watched} of {steps} steps"
        waiting = f", {self.waiting} more had not their turn" if self.waiting else ""
        yield f"{seen}{waiting}, {self.found} findings"
        for finding in self.findings[:_LISTED]:
            yield f"WRONG: {finding}"
        if self.found > _LISTED:
            yield f"and {self.found - _LISTED} more findings"
        for reason, count in (self.unsaved.dropped + self.unsaved.skipped).items():
            yield f"not written, {count} times: {reason}"
        for law, count in self.unconfirmed.items():
            yield f"{law} did not hold {count} times where every tensor is within its budget"
        for reason, count in self.not_reached.most_common():
            yield f"not reached, {count} times: {reason}"
        for name in self.compiled[:_LISTED]:
            yield f"not reached: {name} is compiled by torch.compile, where no call is seen"
        if watched and not calls:
            yield (
                "not reached: no attention call with a backward was seen. It runs inside torch.compile, in a "
                "function that is no known entry point (docs/watch.md), or outside the model that is watched"
            )
        elif not watched:
            yield "not reached: no step began. A step is a forward of the model in training mode"
