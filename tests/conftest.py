"""Fixtures and settings shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from culax import dispatch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """One thread per test process: workers share few cores, and results do not depend on how many there are."""
    torch.set_num_threads(1)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill every uninitialised allocation with NaN (the largest value, for integers), so that a read of it shows."""
    was_on, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops whose calls took the general path."""
    seen: list[str] = []
    original = dispatch.prepare
    monkeypatch.setattr(dispatch, "prepare", lambda op, *rest: seen.append(op) or original(op, *rest))
    return seen
