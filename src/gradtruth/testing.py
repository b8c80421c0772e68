"""For test suites of others: is this backend right for this problem?

``assert_verified`` takes a problem, a recipe or tensors, runs forward and backward and compares them with the
fp64 oracle within the measured budget. ``recipes`` is a hypothesis strategy; hypothesis is imported when it is
called.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gradtruth.backends import Backend, get
from gradtruth.backends.select import select
from gradtruth.core.problem import Problem
from gradtruth.errors import InvalidProblem, UnsupportedProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.suite.conformance import examine, truth_of
from gradtruth.verify.suite.inputs import Sample, make
from gradtruth.verify.suite.recipe import Recipe
from gradtruth.verify.suite.suite import AXES, allowed, build

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["assert_verified", "problems", "recipes", "repeat", "unpoisoned"]


def assert_verified(
    what: Problem | Recipe | Case | Sample,
    backend: str | Backend = "auto",
    *,
    device: torch.device | str = "cpu",
) -> None:
    """Assert that a backend is right for a problem, forward and backward.

    Args:
        what: tensors (a case, a sample), how to make them (a recipe), or only a problem.
        backend: a name, "auto", or any object that is one.
        device: where a problem's or a recipe's tensors are made.

    Raises:
        AssertionError: something is wrong; the message says what, where and by how much, and how to repeat it.
        UnsupportedProblem: the backend, or every backend, refuses the problem.
    """
    recipe = Recipe(problem=what) if isinstance(what, Problem) else what
    sample = _sample(recipe, device)
    chosen = _backend(sample, backend)
    claims = chosen.claims(sample.problem, sample.inputs.q.device)
    if isinstance(recipe, Recipe) and recipe.poison != "none" and not claims.shielded:
        sample = unpoisoned(recipe, device)
    found = examine(sample, chosen, truth_of(sample))
    if found:
        lines = [
            f"{chosen.name} is wrong for {sample.problem.label()}:",
            *(f"  {line}" for line in found),
        ]
        if isinstance(recipe, Recipe):
            lines.append(repeat(recipe, chosen.name))
        raise AssertionError("\n".join(lines))


def repeat(recipe: Recipe, backend: str) -> str:
    """One line that runs the same again."""
    return f"assert_verified(Recipe.decode({recipe.encode()!r}), {backend!r})"


def unpoisoned(recipe: Recipe, device: torch.device | str = "cpu") -> Sample:
    """The sample of a recipe with finite numbers where poison would be."""
    return make(replace(recipe, poison="none"), device)


def _sample(what: Recipe | Case | Sample, device: torch.device | str) -> Sample:
    if isinstance(what, Recipe):
        return make(what, device)
    if isinstance(what, Sample):
        return what
    return Sample.of(what)


def _backend(sample: Sample, backend: str | Backend) -> Backend:
    device = sample.inputs.q.device
    if not isinstance(backend, str):
        reasons = backend.supports(sample.problem, device).reasons
        if reasons:
            raise UnsupportedProblem(
                f"{backend.name} refuses {sample.problem.label()}: {'; '.join(map(str, reasons))}"
            )
        return backend
    chosen = select(sample.problem, device, backend).forward
    return get(backend) if chosen is None else chosen


def recipes(**fixed: str) -> SearchStrategy[Recipe]:
    """A hypothesis strategy: recipes from the axes of the conformance suite.

    Args:
        fixed: axes that have one value, e.g. ``layout="thd", dtype="bfloat16"`` (see ``verify.suite.suite.AXES``).

    Raises:
        ModuleNotFoundError: hypothesis is not installed.
    """
    from hypothesis import assume
    from hypothesis import strategies as st

    unknown = {axis: value for axis, value in fixed.items() if value not in AXES.get(axis, ())}
    if unknown:
        raise InvalidProblem(
            f"fixed is {unknown}, expected axes of verify.suite.suite.AXES and their values"
        )

    @st.composite
    def recipe(draw: st.DrawFn) -> Recipe:
        row: dict[str, str] = {}
        for axis in (*fixed, *(axis for axis in AXES if axis not in fixed)):
            choices = [fixed[axis]] if axis in fixed else allowed(row, axis)
            assume(choices)
            row[axis] = draw(st.sampled_from(choices))
        assume(all(value in allowed(row, axis) for axis, value in row.items()))
        return build(row, draw(st.integers(0, 2**20)))

    return recipe()


def problems(**fixed: str) -> SearchStrategy[Problem]:
    """A hypothesis strategy: the problems of ``recipes``."""

    def problem(recipe: Recipe) -> Problem:
        return recipe.problem

    return recipes(**fixed).map(problem)
