"""Simpler values in the same places."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.edits.edited import edited
from gradtruth.verify.suite.poison import poison, poison_lse, poison_rows

__all__ = [
    "NUMBERS",
    "integers",
    "pattern",
    "patterned",
    "quiet",
    "round_values",
    "simplicity",
    "zeros",
]

NUMBERS = ("q", "k", "v", "dout", "dlse", "bias", "softmax_offset", "alibi_slopes")
"""The tensors that hold numbers."""

_FACTORS = {"q": 3, "k": 5, "v": 7, "dout": 11, "dlse": 13, "bias": 4, "softmax_offset": 6}
_PERIOD = 17


def zeros(case: Case, names: Iterable[str]) -> Case:
    """All values of these tensors 0."""
    return _each(case, names, torch.zeros_like, "zeros")


def pattern(shape: Iterable[int], factor: int) -> Tensor:
    """((factor * i) % 17 - 8) / 4 at the flat index i, fp32: quarters in [-2, 2], exact in every dtype."""
    shape = tuple(shape)
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * factor % _PERIOD - _PERIOD // 2) / 4).view(shape)


def patterned(case: Case, names: Iterable[str]) -> Case:
    """The values of these tensors in closed form; see ``pattern``."""

    def made(name: str, tensor: Tensor) -> Tensor:
        return pattern(tensor.shape, _FACTORS.get(name, 9)).to(tensor.device, tensor.dtype)

    tensors = case.tensors()
    return edited(
        case,
        {name: made(name, tensors[name]) for name in _known(case, names)},
        f"{', '.join(names)} in closed form",
    )


def integers(case: Case, names: Iterable[str], limit: int = 9) -> Case:
    """The values of these tensors rounded to integers of at most this size; NaN and Inf stay."""

    def rounded(tensor: Tensor) -> Tensor:
        near = tensor.double().round().clamp(-limit, limit)
        return torch.where(tensor.isfinite(), near, tensor.double()).to(tensor.dtype)

    return _each(case, names, rounded, f"integers up to {limit}")


def round_values(case: Case, bits: int, names: Iterable[str] = NUMBERS) -> Case:
    """The values of these tensors rounded to so many significant bits; NaN and Inf stay.

    Raises:
        InvalidProblem: not at least one bit.
    """
    if bits < 1:
        raise InvalidProblem(f"bits is {bits}, expected at least 1")

    def rounded(tensor: Tensor) -> Tensor:
        wide = tensor.double()
        share, exponent = torch.frexp(torch.where(wide.isfinite(), wide, 0.0))
        near = torch.ldexp((share * 2.0**bits).round() / 2.0**bits, exponent)
        return torch.where(wide.isfinite(), near, wide).to(tensor.dtype)

    return _each(case, [n for n in names if n in case.tensors()], rounded, f"{bits} bits")


def quiet(case: Case) -> Case:
    """0 wherever nothing may be read: padding, gaps, tails; False there in a mask.

    Raises:
        InvalidProblem: it is so already.
    """
    problem = case.problem
    inputs = poison(problem, case.inputs, 0.0)
    tensors: dict[str, Tensor | None] = dict(inputs.items())
    mask = case.inputs.attention_mask
    if mask is not None:  # poison turns it over where nothing reads it
        tensors["attention_mask"] = mask & (mask == inputs.attention_mask)
    tensors["dout"] = poison_rows(problem, case.inputs, case.dout, 0.0)
    if case.dlse is not None:
        tensors["dlse"] = poison_lse(problem, case.inputs, case.dlse, 0.0)
    old = case.tensors()
    if all(_equal(old[name], new) for name, new in tensors.items() if new is not None):
        raise InvalidProblem("the case has 0 outside its sequences already")
    return edited(case, tensors, "0 outside the sequences")


def simplicity(tensor: Tensor) -> int:
    """How simple values are: 0 all 0, 1 all equal, 2 quarters of at most 9, 3 integers, 4 few bits, 5 others."""
    if not tensor.numel() or not bool(tensor.count_nonzero()):
        return 0
    first = tensor.reshape(-1)[:1]
    if bool((tensor == first).all()):
        return 1
    wide = tensor.double()
    if not bool(wide.isfinite().all()):
        return 5
    if bool((wide * 4 == (wide * 4).round()).all()) and float(wide.abs().max()) <= 9:
        return 2
    if bool((wide == wide.round()).all()):
        return 3
    share = torch.frexp(wide)[0] * 16
    return 4 if bool((share == share.round()).all()) else 5


def _known(case: Case, names: Iterable[str]) -> list[str]:
    found, known = list(names), [name for name in NUMBERS if name in case.tensors()]
    if not found or set(found) - set(known):
        raise InvalidProblem(f"names is {found}, expected some of {', '.join(known)}")
    return found


def _each(case: Case, names: Iterable[str], change: Callable[[Tensor], Tensor], what: str) -> Case:
    found = _known(case, names)
    tensors = case.tensors()
    return edited(
        case, {name: change(tensors[name]) for name in found}, f"{', '.join(found)}: {what}"
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())
