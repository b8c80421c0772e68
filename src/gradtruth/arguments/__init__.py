"""Arguments: from what the caller wrote to a Spec and tensors in their one internal form, or a clear error."""

from __future__ import annotations

from gradtruth.arguments.contents import check_contents
from gradtruth.arguments.given import BIAS_TYPES, SOFTMAX_TYPES, Options, TensorArguments
from gradtruth.arguments.inputs import inputs_of, max_seqlens
from gradtruth.arguments.spec import spec_of
from gradtruth.arguments.tensors import check_tensor

__all__ = [
    "BIAS_TYPES",
    "SOFTMAX_TYPES",
    "Options",
    "TensorArguments",
    "check_contents",
    "check_tensor",
    "inputs_of",
    "max_seqlens",
    "spec_of",
]
