"""The three errors that gradtruth raises about its input."""

from __future__ import annotations

__all__ = ["CaseFormatError", "InvalidProblem", "UnsupportedProblem"]


class InvalidProblem(ValueError):
    """The arguments contradict each other; the message names the argument, its value and what was expected."""


class UnsupportedProblem(NotImplementedError):
    """A valid problem that the named backend, or every backend, refuses; the message lists every reason."""


class CaseFormatError(ValueError):
    """A case file is damaged, hostile or of a format version that this release does not read."""
