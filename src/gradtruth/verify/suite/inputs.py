"""Inputs of a problem, made from a recipe: the same bits for the same recipe, on every device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradtruth.core.layout import stored
from gradtruth.core.problem import DTYPES, Problem
from gradtruth.core.tensors import Inputs, Wanted
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.suite.arrangement import arrange, arrange_dout
from gradtruth.verify.suite.families import FAMILIES, noise, values
from gradtruth.verify.suite.poison import poison, poison_lse, poison_rows
from gradtruth.verify.suite.recipe import POISONS, Place, Recipe

__all__ = ["FAMILIES", "Recipe", "Sample", "make", "noise", "poison"]

Device = torch.device | str

_MASKED = 0.7  # noise above this, three in ten, is masked
_WHOLE = 1.56  # noise above this, one row in twenty, is masked as a whole
_INFINITE = 1.39  # noise above this, one in ten, is -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The tensors of a recipe.

    Attributes:
        problem: the recipe's, with the stride classes of these tensors.
        inputs: what the forward reads.
        dout: gradient of out, like q with last dim Dv.
        dlse: gradient of lse, or None.
        wanted: gradients to ask for.
    """

    problem: Problem
    inputs: Inputs
    dout: Tensor
    dlse: Tensor | None
    wanted: Wanted

    @staticmethod
    def of(case: Case) -> Sample:
        """The tensors of a case, with every gradient that it has."""
        return Sample(
            problem=case.problem,
            inputs=case.inputs,
            dout=case.dout,
            dlse=case.dlse,
            wanted=Recipe(problem=case.problem).outputs,
        )


def make(recipe: Recipe, device: Device = "cpu") -> Sample:
    """Make the tensors of a recipe.

    Args:
        recipe: decides everything; the same recipe gives the same bits.
        device: where the tensors are made.

    Raises:
        InvalidProblem: the recipe's places or shapes do not fit its problem.
    """
    problem, places = recipe.problem, recipe.resolved_places
    _check_places(problem, places)
    inputs = Inputs(
        **_attended(recipe, places, device),
        **_lengths(recipe, places, device),
        **_score_terms(recipe, places, device),
    )
    dout = _dout(recipe, places, device)
    dlse = _dlse(recipe, places, device) if recipe.dlse else None
    value = POISONS[recipe.poison]
    if value is not None:
        poisoned = poison(problem, inputs, value)
        if recipe.dout != "expanded_all":
            dout = poison_rows(problem, inputs, dout, value)
        dlse = None if dlse is None else poison_lse(problem, inputs, dlse, value)
        inputs = poisoned
    inputs = arrange(inputs, recipe.arrangement)
    dout = arrange_dout(dout, recipe.dout)
    found = Problem.of(problem.spec, inputs, problem.max_seqlen_q, problem.max_seqlen_kv)
    if replace(found, strides=()) != replace(problem, strides=()):
        raise InvalidProblem(f"problem is {problem.encode()}, its tensors make {found.encode()}")
    return Sample(problem=found, inputs=inputs, dout=dout, dlse=dlse, wanted=recipe.outputs)


def _check_places(problem: Problem, places: tuple[Place, ...]) -> None:
    for place in places:
        inside = 0 <= place[0] <= place[0] + place[1] <= problem.seqlen_q
        if not (inside and 0 <= place[2] <= place[2] + place[3] <= problem.seqlen_kv):
            sizes = f"{problem.seqlen_q} x {problem.seqlen_kv}"
            raise InvalidProblem(
                f"places has {place}, expected (start, length) twice inside {sizes}"
            )


def _attended(recipe: Recipe, places: tuple[Place, ...], device: Device) -> dict[str, Tensor]:
    """q, k, v: logical values [B, L, heads, dims] put where the sequences lie; other finite values elsewhere."""
    problem = recipe.problem
    dims = {"q": problem.head_dim_qk, "k": problem.head_dim_qk, "v": problem.head_dim_v}
    same = recipe.arrangement == "expanded_heads"
    return {
        role: _stored_rows(recipe, places, role, dims[role], device, one_head=same and role != "q")
        for role in dims
    }


def _dout(recipe: Recipe, places: tuple[Place, ...], device: Device) -> Tensor:
    if recipe.dout == "expanded_all":
        like = _stored_rows(recipe, places, "dout", recipe.problem.head_dim_v, device)
        return torch.full_like(like, 0.375)
    one_head = recipe.dout == "expanded_heads"
    return _stored_rows(
        recipe, places, "dout", recipe.problem.head_dim_v, device, one_head=one_head
    )


def _stored_rows(
    recipe: Recipe,
    places: tuple[Place, ...],
    role: str,
    dims: int,
    device: Device,
    *,
    one_head: bool = False,
) -> Tensor:
    problem = recipe.problem
    side = 2 if role in ("k", "v") else 0
    heads = problem.num_gqa_groups if side else problem.num_heads
    storage = problem.seqlen_kv if side else problem.seqlen_q
    thd = problem.layout == "thd"
    longest = max((place[side + 1] for place in places), default=0)
    shape = (problem.batch, longest, 1 if one_head else heads, dims)
    logical = values(recipe.family, role, shape, recipe.seed, device)
    logical = logical.expand(problem.batch, longest, heads, dims)
    rows = 1 if thd else problem.batch
    full = torch.zeros((rows, storage, heads, dims), dtype=torch.float64, device=device)
    if recipe.poison == "none":
        shape = (rows, storage, 1 if one_head else heads, dims)
        full += 4.0 * values("closed_form", role, shape, recipe.seed + 1, device)
    for n, place in enumerate(places):
        start, length = place[side], place[side + 1]
        full[0 if thd else n, start : start + length] = logical[n, :length]
    return stored(_rounded(full, problem.torch_dtype), problem.spec.layout).contiguous()


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 to the dtype by way of fp32, so that every device rounds alike."""
    return tensor if dtype == torch.float64 else tensor.float().to(dtype)


def _dlse(recipe: Recipe, places: tuple[Place, ...], device: Device) -> Tensor:
    problem = recipe.problem
    thd = problem.layout == "thd"
    longest = max((place[1] for place in places), default=0)
    logical = values(
        "gaussian", "dlse", (problem.batch, problem.num_heads, longest, 1), recipe.seed, device
    )
    full = torch.ones(
        (1 if thd else problem.batch, problem.num_heads, problem.seqlen_q),
        dtype=torch.float64,
        device=device,
    )
    for n, (start, length, _, _) in enumerate(places):
        full[0 if thd else n, :, start : start + length] = logical[n, :, :length, 0]
    full = full.to(problem.accumulate_dtype)
    return full[0].t().contiguous() if thd else full


def _lengths(recipe: Recipe, places: tuple[Place, ...], device: Device) -> dict[str, Tensor]:
    """cu_seqlens or padding masks that say where the sequences lie."""
    problem, found = recipe.problem, {}
    lengths = problem.spec.lengths
    for side, at, storage in (("q", 0, problem.seqlen_q), ("kv", 2, problem.seqlen_kv)):
        spans = [(place[at], place[at + 1]) for place in places]
        if lengths == "cu_seqlens":
            found |= _cumulated(problem, side, spans, device)
        elif lengths == "padding_mask":
            found[f"padding_mask_{side}"] = _padding_mask(recipe, spans, storage, device)
    return found


def _cumulated(
    problem: Problem, side: str, spans: list[tuple[int, int]], device: Device
) -> dict[str, Tensor]:
    cu = [0]
    for _, length in spans:
        cu.append(cu[-1] + length)
    name = f"cu_seqlens_{side}"
    found = {name: torch.tensor(cu, dtype=torch.int32, device=device)}
    starts = [start for start, _ in spans]
    if problem.layout == "thd" and starts != cu[:-1]:
        end = starts[-1] + spans[-1][1]
        found[f"{name}_padded"] = torch.tensor([*starts, end], dtype=torch.int32, device=device)
    return found


def _padding_mask(
    recipe: Recipe, spans: list[tuple[int, int]], storage: int, device: Device
) -> Tensor:
    outside = torch.ones((len(spans), storage), dtype=torch.bool, device=device)
    hidden = noise(16 * recipe.seed + 9, len(spans), storage, device=device) > _MASKED
    for n, (start, length) in enumerate(spans):
        outside[n, start : start + length] = False
        if recipe.holes and length > 2:
            outside[n, start + 1 : start + length - 1] = hidden[n, start + 1 : start + length - 1]
    return outside


def _score_terms(recipe: Recipe, places: tuple[Place, ...], device: Device) -> dict[str, Tensor]:
    """bias, attention_mask, alibi_slopes, softmax_offset and dropout_seed, as far as the problem has them."""
    problem, spec, seed = recipe.problem, recipe.problem.spec, recipe.seed
    H, found = problem.num_heads, {}
    if problem.bias_shape is not None:
        found["bias"] = _bias(recipe, places, device)
    if problem.mask_shape is not None:
        found["attention_mask"] = _attention_mask(recipe, places, device)
    if spec.alibi:
        slopes = torch.tensor([2.0 ** (-8.0 * (h + 1) / H) for h in range(H)], device=device)
        if problem.slopes_batched:
            slopes = slopes * (1.0 + 0.5 * torch.arange(problem.batch, device=device).unsqueeze(1))
        found["alibi_slopes"] = slopes
    if spec.softmax == "learnable":
        offset = values("gaussian", "softmax_offset", (H, 1, 1, 1), seed, device)
        found["softmax_offset"] = offset.view(H).to(problem.accumulate_dtype)
    if spec.dropout_p > 0:
        found["dropout_seed"] = torch.tensor((seed + 1) * 0x1E3779B97F4A7C15 % 2**63, device=device)
    return found


def _bias(recipe: Recipe, places: tuple[Place, ...], device: Device) -> Tensor:
    shape = recipe.problem.bias_shape or (1, 1, 1, 1)
    bias = _scattered(recipe, places, shape, "bias", device)
    if recipe.bias_inf:
        drawn = _scattered(recipe, places, shape, "bias", device, family="closed_form")
        bias = bias.masked_fill(drawn > _INFINITE, -torch.inf)
    return _rounded(bias, DTYPES[recipe.problem.bias_dtype or recipe.problem.dtype])


def _attention_mask(recipe: Recipe, places: tuple[Place, ...], device: Device) -> Tensor:
    """Three in ten masked; where queries have rows of their own, about one row in twenty wholly."""
    shape = recipe.problem.mask_shape or (1, 1, 1, 1)
    drawn = _scattered(recipe, places, shape, "attention_mask", device, family="closed_form")
    masked = drawn > _MASKED
    if shape[2] > 1 and shape[3] > 1:
        column = (shape[0], shape[1], shape[2], 1)
        rows = _scattered(recipe, places, column, "masked_rows", device, family="closed_form")
        masked |= rows > _WHOLE
    return masked & (shape != (1, 1, 1, 1))


def _scattered(
    recipe: Recipe,
    places: tuple[Place, ...],
    shape: tuple[int, int, int, int],
    role: str,
    device: Device,
    family: str = "gaussian",
) -> Tensor:
    """Logical values [1|B, 1|H, 1|L, 1|L'] put at the storage places of each sequence.

    So the same batch has the same bias in every layout and padding, as far as the shape lets it.
    """
    dense = recipe.problem.layout != "thd"
    rows = max((place[1] for place in places), default=0) if shape[2] > 1 else 1
    columns = max((place[3] for place in places), default=0) if shape[3] > 1 else 1
    logical = values(family, role, (*shape[:2], rows, columns), recipe.seed, device)
    full = values(family, role, shape, recipe.seed + 1, device)
    for n in range(shape[0]):
        own = dense and shape[0] == recipe.problem.batch
        row = places[n][0] if own and shape[2] > 1 else 0
        column = places[n][2] if own and shape[3] > 1 else 0
        part = full[n, :, row : row + rows, column : column + columns]
        part.copy_(logical[n, :, : part.shape[1], : part.shape[2]])
    return full
