"""The loader on a device: a cold kernel in a capture, and how long loading takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from culax.runtime import build, load
from culax.runtime.arch import arch_of
from culax.runtime.variants import Variant, enumerate_variants


@pytest.fixture
def built() -> list[Variant]:
    """Variants built ahead of time for this device."""
    arch = arch_of(torch.device("cuda", torch.cuda.current_device()))
    found = [v for v in enumerate_variants(arch) if load.availability(v).how == "built"] if arch else []
    if not found:
        pytest.skip("no kernels built ahead of time for this device")
    return found


def test_a_cold_kernel_in_a_capture_is_refused_and_the_capture_goes_on(built: list[Variant], tmp_path: Path) -> None:
    kernel = load.Loader(build.AOT, tmp_path).get(built[0])
    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(RuntimeError, match=r"call culax\.warmup"):
            kernel(x)
        z = y * 2
    graph.replay()
    torch.cuda.synchronize()
    assert not kernel.warm
    assert z.tolist() == [4.0] * 8


def test_all_built_kernels_load_within_a_second(built: list[Variant], tmp_path: Path) -> None:
    loader = load.Loader(build.AOT, tmp_path)
    start = time.perf_counter()
    kernels = [loader.get(variant) for variant in built]
    seconds = time.perf_counter() - start
    assert [kernel.how for kernel in kernels] == ["built"] * len(built)
    assert seconds <= 1.0
