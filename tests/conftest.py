"""Options and fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gradtruth.backends import ORDER


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        action="append",
        choices=ORDER,
        help="run the conformance suite on this backend only; may be repeated",
    )
    parser.addoption(
        "--update-golden", action="store_true", help="write generated golden files anew"
    )


def pytest_configure() -> None:
    torch.set_num_threads(1)  # the tests are small and xdist fills the cores


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many pairs of features the conformance suite covered."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "cover" and report.when == "call":
                terminalreporter.write_line(f"conformance suite: {value}")


@pytest.fixture(scope="session")
def backend_names(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The backends under test: all, or those named by --backend."""
    return tuple(request.config.getoption("--backend") or ORDER)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN (the largest number for integers), as if an earlier call had left it there."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    if not torch.empty(3).isnan().all():
        raise RuntimeError(
            "torch.empty does not fill memory: torch.utils.deterministic has changed"
        )
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
