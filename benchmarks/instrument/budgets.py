"""The budgets of today, as numbers: results that were made with others are no longer true.

Two kinds: every numeric constant of the rooms that judge, and what a budget allows on fixed problems. The second
changes with any change of a formula and not with how it is written.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType

from gradtruth.verify import checks, truth
from gradtruth.verify.doctor.programme import PROGRAMME, case_of
from gradtruth.verify.trial import wanted_of
from gradtruth.verify.truth import budget, oracle

__all__ = ["budgets", "constants", "same"]

_ITEMS = ("causal-gqa-d64", "thd-queryless-gqa-d8", "sink-window-gqa-d64", "softcap-window-d128")
_DTYPES = ("bfloat16", "float16", "float32")
_TESTS = ("element", "line", "rms", "projection")


def budgets() -> dict[str, float]:
    """All of them by name."""
    return constants() | dict(_allowed())


def constants() -> dict[str, float]:
    """Every number that a verdict is made with, by module and name."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": value
        for module in _modules()
        for name, value in _numbers(module)
    }


def same(found: Mapping[str, float], expected: Mapping[str, float]) -> bool:
    """Whether two sets of budgets are one, but for the rounding of sums on another machine."""
    return set(found) == set(expected) and all(
        math.isclose(value, expected[name], rel_tol=1e-6) for name, value in found.items()
    )


def _allowed() -> Iterator[tuple[str, float]]:
    """What the tests allow, added up over (sequence, head), of a result and a yardstick without other errors."""
    items = {item.name: item for item in PROGRAMME}
    for item, dtype in ((item, dtype) for item in _ITEMS for dtype in _DTYPES):
        recipe = items[item].recipe
        problem = replace(recipe.problem, dtype=dtype)
        if problem.bias_dtype is not None:
            problem = replace(problem, bias_dtype=dtype)
        case = case_of(replace(recipe, problem=problem))
        found = oracle.evaluate(
            case.problem, case.inputs, case.dout, case.dlse, wanted_of(case), device=case.device
        )
        for half in found:
            for name, exact in half.items():
                rounded = exact.to(case.problem.torch_dtype).double()
                size = half.magnitudes[name]
                rows = budget.compare(
                    case.problem, case.inputs, name, rounded, exact, size, rounded
                )
                total: dict[str, float] = defaultdict(float)
                for row in rows:
                    for test in _TESTS:
                        allowed = getattr(row, test).allowed
                        total[test] += allowed if math.isfinite(allowed) else 0.0
                for test, value in total.items():
                    yield f"{item} {dtype} {name} {test}", float(f"{value:.8g}")


def _modules() -> Iterator[ModuleType]:
    for room in (truth, checks):
        for found in pkgutil.iter_modules(room.__path__):
            yield importlib.import_module(f"{room.__name__}.{found.name}")


def _numbers(module: ModuleType) -> list[tuple[str, float]]:
    return [
        (name, float(value))
        for name, value in sorted(vars(module).items())
        if re.fullmatch(r"_?[A-Z][A-Z_0-9]*", name) and type(value) in (int, float)
    ]
