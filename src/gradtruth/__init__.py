"""gradtruth: attention for training whose gradients can be trusted.

The public names are imported on first use, so that ``import gradtruth`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradtruth.api import (
        attention,
        attention_backward,
        attention_forward,
        attention_with_lse,
        explain,
        use,
    )
    from gradtruth.core.problem import Problem
    from gradtruth.core.spec import Spec
    from gradtruth.errors import CaseFormatError, InvalidProblem, UnsupportedProblem
    from gradtruth.module import DotProductAttention
    from gradtruth.verify.capture import capture
    from gradtruth.verify.watch import watch

__version__ = "0.1.0"

_HOMES = {
    "DotProductAttention": "gradtruth.module",
    "attention": "gradtruth.api",
    "attention_backward": "gradtruth.api",
    "attention_forward": "gradtruth.api",
    "attention_with_lse": "gradtruth.api",
    "capture": "gradtruth.verify.capture",
    "explain": "gradtruth.api",
    "use": "gradtruth.api",
    "watch": "gradtruth.verify.watch",
    "Problem": "gradtruth.core.problem",
    "Spec": "gradtruth.core.spec",
    "CaseFormatError": "gradtruth.errors",
    "InvalidProblem": "gradtruth.errors",
    "UnsupportedProblem": "gradtruth.errors",
}
__all__ = [
    "CaseFormatError",
    "DotProductAttention",
    "InvalidProblem",
    "Problem",
    "Spec",
    "UnsupportedProblem",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_with_lse",
    "capture",
    "explain",
    "use",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gradtruth' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
