"""Variants of a case: the same tensors but for a few, or under another Spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradtruth.verify.cases.case import Case
from gradtruth.verify.edits.edited import edited

__all__ = ["variant"]


def variant(case: Case, tensors: Mapping[str, Tensor | None] | None = None, **changed: Any) -> Case:
    """The case with something replaced, for the length of a check: ``edits.edited`` without a step to write down."""
    return edited(case, tensors or {}, "variant", **changed)
