"""How large calls are: the order in which the minimiser calls one smaller than another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from gradtruth.verify.cases.case import Case
from gradtruth.verify.edits.arrangement import is_contiguous
from gradtruth.verify.edits.crop import lengths_of
from gradtruth.verify.edits.options import options_of
from gradtruth.verify.edits.values import NUMBERS, simplicity
from gradtruth.verify.minimise.finding import Calls

__all__ = ["digest", "size"]

_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def size(calls: Calls) -> tuple[int, ...]:
    """Shortlex: what is smaller in the first of these is smaller, whatever the rest says.

    Over all calls the sums of: calls, sequences, query heads, KV heads, tokens (queries and keys), storage places
    that are no tokens, channels (D and Dv), options (see ``edits.options``; memory that is not contiguous is one),
    elements of bias and mask, how complicated values are (see ``edits.values.simplicity``).
    """
    return len(calls), *(sum(column) for column in zip(*map(_size, calls), strict=True))


def digest(calls: Calls) -> str:
    """The same for the same problems with the same values, wherever they come from."""
    found = hashlib.blake2b(digest_size=16)
    for case in calls:
        found.update(case.problem.encode().encode())
        for name, tensor in case.tensors().items():
            found.update(f"{name}{tensor.shape}{tensor.stride()}{tensor.dtype}".encode())
            if tensor.numel():
                raw = tensor.detach().cpu().contiguous()
                raw = raw if raw.dtype == torch.bool else raw.view(_BYTES[raw.element_size()])
                found.update(raw.numpy().tobytes())
    return found.hexdigest()


def _size(case: Case) -> Iterable[int]:
    problem = case.problem
    queries, keys = lengths_of(case)
    tokens = sum(queries) + sum(keys)
    rows = 1 if problem.layout == "thd" else problem.batch
    pairs = (problem.bias_shape, problem.mask_shape)
    tensors = case.tensors()
    return (
        problem.batch,
        problem.num_heads,
        problem.num_gqa_groups,
        tokens,
        rows * (problem.seqlen_q + problem.seqlen_kv) - tokens,
        problem.head_dim_qk + problem.head_dim_v,
        len(options_of(case)) + (not is_contiguous(case)),
        sum(torch.Size(shape).numel() for shape in pairs if shape is not None),
        sum(simplicity(tensors[name]) for name in NUMBERS if name in tensors),
    )
