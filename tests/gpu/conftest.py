"""Everything in this folder needs a CUDA device: collected everywhere, run where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from culax.runtime import load
from tests.gpu.verified import CALLED

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests `gpu`; without a CUDA device they are skipped, for that reason only."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def settled_device(record_property):
    """A fault of one test's kernels shows in that test, not in the next; the report lists kernels called so far."""
    yield
    torch.cuda.synchronize()
    record_property(CALLED, [f"{kernel.variant.arch}/{kernel.variant.name}" for kernel in load.loaded() if kernel.warm])
