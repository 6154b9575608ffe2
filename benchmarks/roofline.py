"""Machine ceilings, and the share of them that a measured time reaches."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.case import Cost


@dataclass(frozen=True)
class Ceilings:
    """What one machine can do: copy bandwidth in bytes/s (read plus write), matrix product rate in FLOP/s."""

    model: str
    bytes_per_s: float
    flops_per_s: float
    source: str


# Measured on that card: a large device-to-device copy, and bf16 matrix products on random data.
KNOWN_GPUS = {"H200": (4.23e12, 789e12)}
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def floor_ms(cost: Cost, ceilings: Ceilings) -> float:
    """The least time in ms: the larger of FLOPs at the matrix rate and bytes at the copy rate."""
    return 1e3 * max(cost.flops / ceilings.flops_per_s, cost.bytes / ceilings.bytes_per_s)


def share(ms: float, cost: Cost, ceilings: Ceilings) -> float:
    """Share of the roofline reached: 1.0 means as fast as the ceilings allow."""
    return floor_ms(cost, ceilings) / ms


@lru_cache
def ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    """Ceilings of `device` ("cpu" or "cuda") for products in `dtype`: known for some GPUs, else measured here."""
    model = cpu_model() if device == "cpu" else torch.cuda.get_device_name()
    if device == "cuda" and dtype in SIXTEEN_BIT:
        for key, (bandwidth, flops) in KNOWN_GPUS.items():
            if key in model:
                return Ceilings(model, bandwidth, flops, "known figures of this card")
    side, copied = (8192, 1 << 30) if device == "cuda" else (1024, 1 << 26)
    a = torch.randn(side, side, device=device).to(dtype)
    source = torch.empty(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product_s = _best_seconds(lambda: a @ a, device)
    copy_s = _best_seconds(lambda: target.copy_(source), device)
    return Ceilings(model, 2 * copied / copy_s, 2 * side**3 / product_s, "measured in this process")


def _best_seconds(call: object, device: str, repeats: int = 7) -> float:
    assert callable(call)
    best = float("inf")
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def cpu_model() -> str:
    """The CPU's model name and the number of cores this process may use."""
    name = "CPU"
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads"


def machine(device: str) -> dict[str, str]:
    """Model and versions of what is measured, peers among it. No host name and no paths: results are published."""
    import culax

    facts = {"cpu": cpu_model(), "torch": torch.__version__, "culax": culax.__version__}
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        gpu, cuda = torch.cuda.get_device_name(), str(torch.version.cuda)
        facts |= {"gpu": gpu, "capability": f"{major}.{minor}", "cuda": cuda}
        for package in ("triton", "fla-core", "tilelang", "quack-kernels"):
            with suppress(PackageNotFoundError):
                facts[package] = version(package)
    return facts


def commit() -> str:
    """The commit being measured, with "+" where the tree has changes, or "unknown" outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        dirty = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if dirty else "")


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
