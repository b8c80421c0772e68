from __future__ import annotations

from itertools import combinations

from gradtruth.verify.suite.cover import cover

AXES = {
    "colour": {"red": 1.0, "green": 1.0, "blue": 1.0},
    "size": {"s": 1.0, "m": 1.0, "l": 9.0},
    "form": {"cube": 1.0, "ball": 1.0, "cone": 1.0, "disc": 1.0},
    "hole": {"no": 1.0, "yes": 1.0},
}
RULES = (
    ("colour", "form", lambda a, b: not (a == "red" and b == "ball")),
    ("size", "hole", lambda a, b: a != "s" or b == "no"),
)


def pairs(row):
    return set(combinations(row.items(), 2))


def allowed(row):
    return all(rule(row[a], row[b]) for a, b, rule in RULES)


def test_every_allowed_pair_occurs_and_no_forbidden_one():
    found = cover(AXES, RULES, 0, 1)
    held = set().union(*(pairs(row) for row in found.rows))
    wanted = {
        ((a, x), (b, y))
        for a, b in combinations(AXES, 2)
        for x in AXES[a]
        for y in AXES[b]
        if all(rule(x, y) for first, second, rule in RULES if (first, second) == (a, b))
    }
    assert held == wanted
    assert all(map(allowed, found.rows))
    assert (found.pairs, found.covered) == (len(wanted), len(wanted))
    assert len(found.rows) < 24  # all combinations are 72


def test_the_rest_is_drawn_by_weight_and_keeps_the_rules():
    found = cover(AXES, RULES, 400, 1)
    assert len(found.rows) == 400
    assert all(map(allowed, found.rows))
    assert sum(row["size"] == "l" for row in found.rows) > 250


def test_a_pair_that_rules_exclude_together_is_reported_and_not_counted():
    rules = (
        ("a", "c", lambda a, c: a != "1" or c == "1"),
        ("b", "c", lambda b, c: b != "1" or c == "2"),
    )
    axes = {name: {"1": 1.0, "2": 1.0} for name in "abc"}
    found = cover(axes, rules, 0, 0)
    assert found.impossible == (("a=1", "b=1"),)
    assert found.pairs == found.covered == 9
    assert "9 of 9" in str(found)


def test_the_seed_decides():
    assert cover(AXES, RULES, 50, 3) == cover(AXES, RULES, 50, 3)
    assert cover(AXES, RULES, 50, 3) != cover(AXES, RULES, 50, 4)
