"""Everything in this folder needs a CUDA device: collected everywhere, run where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

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


@pytest.fixture
def compiled_graphs() -> Iterator[None]:
    """Graphs or an error: an op that can't be captured must not fall back unseen."""
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch({"triton.cudagraph_or_error": True}):
        yield
    assert counters["inductor"]["cudagraph_skips"] == 0
    torch._dynamo.reset()
