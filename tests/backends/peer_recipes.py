"""Recipes of the suite's axes without the features that most peers lack, so that many are supported."""

from __future__ import annotations

import random

from gradtruth.verify.suite.recipe import Recipe
from gradtruth.verify.suite.suite import AXES, allowed, build

PLAIN = {
    "bias": ("none",),
    "alibi": ("none",),
    "softmax": ("vanilla",),
    "softcap": ("none",),
    "scale": ("default", "0.3"),
    "dropout": ("0",),
    "max_logit": ("no",),
    "dlse": ("no",),
    "mask": ("full", "causal"),
    "dims": ("8", "32", "64", "72", "128"),
    "dtype": ("bfloat16", "float16"),
    "size": ("small", "blocks"),
}
"""What every kernel for variable lengths can."""


def peer_recipes(count: int, seed: int = 0, **axes: tuple[str, ...]) -> list[Recipe]:
    """Random recipes whose axes take some values only.

    Args:
        count: how many.
        seed: of everything random.
        axes: the values of axes beside ``PLAIN``'s.
    """
    rng = random.Random(seed)
    choices = {axis: tuple(AXES[axis]) for axis in AXES} | PLAIN | axes
    found: list[Recipe] = []
    while len(found) < count:
        row: dict[str, str] = {}
        for axis in sorted(AXES, key=lambda a: (len(choices[a]), rng.random())):
            free = [value for value in allowed(row, axis) if value in choices[axis]]
            if not free:
                break
            row[axis] = rng.choices(free, [AXES[axis][value] for value in free])[0]
        else:
            found.append(build(row, rng.randrange(2**20)))
    return found
