"""Parameters of the regression cases: the own backends, under the public id of the report in the test's id."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.reports.harness import BF16, FP32, places

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "report(id, kind, right): the regression case of a public report"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU, filling fresh memory goes with warnings about operations that are not deterministic there."""
    for item in items:
        if item.path.parent == HERE and "poisoned_memory" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("report")
    if "own" in metafunc.fixturenames:
        public_id = "" if mark is None else f"{mark.args[0]}-"
        named = [
            pytest.param(*found.values, id=f"{public_id}{found.id}", marks=found.marks)
            for found in places()
        ]
        metafunc.parametrize("own", named)
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
