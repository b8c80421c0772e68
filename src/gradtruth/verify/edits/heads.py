"""KV heads of a case with their query heads as a case of their own, and groups taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradtruth.core.layout import canonical_lse
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case

__all__ = ["expand_groups", "fold_groups", "kv_heads", "place_heads"]

_HEADS = -2  # of q, k, v, out and their gradients, in every layout


def kv_heads(case: Case, groups: Sequence[int]) -> Case:
    """Some KV heads with all their query heads.

    Args:
        case: without dropout, whose keep mask goes by the number of a head.
        groups: which KV heads, each in [0, G).

    Raises:
        InvalidProblem: a number outside the KV heads, or a problem with dropout.
    """
    problem, inputs = case.problem, case.inputs
    if not all(0 <= g < problem.num_gqa_groups for g in groups):
        raise InvalidProblem(
            f"groups is {list(groups)}, expected numbers in [0, {problem.num_gqa_groups})"
        )
    if 0.0 < problem.spec.dropout_p < 1.0 and list(groups) != list(range(len(groups))):
        raise InvalidProblem(
            f"groups is {list(groups)}, expected 0, 1, ... of a problem with dropout"
        )
    kv = torch.tensor(list(groups), dtype=torch.long, device=case.device)
    q = _query_heads(case, groups)
    taken = {
        "q": inputs.q.index_select(_HEADS, q),
        "k": inputs.k.index_select(_HEADS, kv),
        "v": inputs.v.index_select(_HEADS, kv),
    }
    for name in ("bias", "attention_mask"):
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.shape[1] > 1:
            taken[name] = tensor.index_select(1, q)
    if inputs.alibi_slopes is not None:
        taken["alibi_slopes"] = inputs.alibi_slopes.index_select(-1, q)
    if inputs.softmax_offset is not None:
        taken["softmax_offset"] = inputs.softmax_offset[q]
    dlse = case.dlse
    if dlse is not None:
        dlse = dlse.index_select(1, q)
    return _case(case, taken, case.dout.index_select(_HEADS, q), dlse, f"KV heads {list(groups)}")


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
    return _case(case, taken, case.dout, case.dlse, "groups expanded")


def fold_groups(case: Case, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Results of ``expand_groups(case)`` in the form of the whole: dk and dv summed over their groups in fp64."""
    found = dict(results)
    for name in ("dk", "dv"):
        if name in found:
            split = found[name].double().unflatten(_HEADS, (-1, case.problem.group_size))
            found[name] = split.sum(_HEADS).to(found[name].dtype)
    return found


def _query_heads(case: Case, groups: Sequence[int]) -> Tensor:
    share = case.problem.group_size
    return torch.tensor(
        [g * share + r for g in groups for r in range(share)], dtype=torch.long, device=case.device
    )


def _case(
    case: Case, taken: Mapping[str, Tensor], dout: Tensor, dlse: Tensor | None, step: str
) -> Case:
    problem = case.problem
    made = Case.of(
        replace(problem.spec, packing="separate"),
        replace(case.inputs, **taken),
        dout,
        dlse,
        max_seqlen=(problem.max_seqlen_q, problem.max_seqlen_kv),
        provenance=case.provenance,
    )
    return replace(made, history=(*case.history, step))
