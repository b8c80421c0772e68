"""Heads of a case as a case of their own, and groups taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradtruth.core.layout import canonical_lse
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.edits.edited import edited, forbid_dropout

__all__ = ["expand_groups", "fold_groups", "kv_heads", "place_heads", "query_heads"]

_HEADS = -2  # of q, k, v, out and their gradients, in every layout


def kv_heads(case: Case, groups: Sequence[int]) -> Case:
    """Some KV heads with all their query heads.

    Args:
        case: with dropout, whose keep mask goes by the number of a head, only the first ones can be taken.
        groups: which KV heads, each in [0, G).

    Raises:
        InvalidProblem: a number outside the KV heads, none at all, or other ones than the first of a problem with
            dropout.
    """
    _check("groups", groups, case.problem.num_gqa_groups)
    kv = torch.tensor(list(groups), dtype=torch.long, device=case.device)
    taken: dict[str, Tensor | None] = {
        name: getattr(case.inputs, name).index_select(_HEADS, kv) for name in ("k", "v")
    }
    return _heads(case, _query_heads(case, groups), taken, f"KV heads {list(groups)}")


def query_heads(case: Case, members: Sequence[int]) -> Case:
    """Some query heads of every group. dk and dv lack the terms of the others.

    Args:
        case: with dropout, only what leaves the numbers of heads as they are.
        members: which of a group, each in [0, H / G).

    Raises:
        InvalidProblem: a number outside the group, none at all, or other numbers for a problem with dropout.
    """
    problem = case.problem
    _check("members", members, problem.group_size)
    q = [g * problem.group_size + r for g in range(problem.num_gqa_groups) for r in members]
    index = torch.tensor(q, dtype=torch.long, device=case.device)
    return _heads(case, index, {}, f"query heads {list(members)} of every group")


def place_heads(
    case: Case, groups: Sequence[int], results: Mapping[str, Tensor], into: dict[str, Tensor]
) -> None:
    """Write results of ``kv_heads(case, groups)`` to where the whole has them.

    Args:
        case: the whole.
        groups: as given to ``kv_heads``.
        results: by name: out, lse, dq, dk, dv, max_logit, dsoftmax_offset; others are passed over.
        into: tensors of the whole's form; written.
    """
    q = _query_heads(case, groups)
    kv = torch.tensor(list(groups), dtype=torch.long, device=case.device)
    for name, tensor in results.items():
        if name not in into:
            continue
        if name in ("dk", "dv"):
            into[name].index_copy_(_HEADS, kv, tensor)
        elif name in ("out", "dq"):
            into[name].index_copy_(_HEADS, q, tensor)
        elif name == "lse":
            canonical_lse(into[name], case.problem.layout)[:, q] = canonical_lse(
                tensor, case.problem.layout
            )
        elif name in ("max_logit", "dsoftmax_offset"):
            into[name][q] = tensor


def expand_groups(case: Case) -> Case:
    """Every query head with a KV head of its own: k and v repeated over their groups."""
    share = case.problem.group_size
    taken = {
        name: getattr(case.inputs, name).repeat_interleave(share, _HEADS) for name in ("k", "v")
    }
    return edited(case, taken, "groups expanded")


def fold_groups(case: Case, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Results of ``expand_groups(case)`` in the form of the whole: dk and dv summed over their groups in fp64."""
    found = dict(results)
    for name in ("dk", "dv"):
        if name in found:
            split = found[name].double().unflatten(_HEADS, (-1, case.problem.group_size))
            found[name] = split.sum(_HEADS).to(found[name].dtype)
    return found


def _check(name: str, given: Sequence[int], count: int) -> None:
    if not given or not all(0 <= n < count for n in given):
        raise InvalidProblem(f"{name} is {list(given)}, expected numbers in [0, {count})")


def _query_heads(case: Case, groups: Sequence[int]) -> Tensor:
    share = case.problem.group_size
    return torch.tensor(
        [g * share + r for g in groups for r in range(share)], dtype=torch.long, device=case.device
    )


def _heads(case: Case, q: Tensor, taken: dict[str, Tensor | None], step: str) -> Case:
    """The query heads ``q``, with everything that goes by a query head."""
    if q.tolist() != list(range(len(q))):
        forbid_dropout(case, "the number of a head")
    inputs = case.inputs
    taken["q"] = inputs.q.index_select(_HEADS, q)
    taken["dout"] = case.dout.index_select(_HEADS, q)
    for name in ("bias", "attention_mask"):
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.shape[1] > 1:
            taken[name] = tensor.index_select(1, q)
    if inputs.alibi_slopes is not None:
        taken["alibi_slopes"] = inputs.alibi_slopes.index_select(-1, q)
    if inputs.softmax_offset is not None:
        taken["softmax_offset"] = inputs.softmax_offset[q]
    if case.dlse is not None:
        taken["dlse"] = case.dlse.index_select(1, q)
    return edited(case, taken, step)
