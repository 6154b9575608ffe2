"""All benchmark cases, and how to pick some of them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch

from benchmarks.case import Case
from benchmarks.kda import KdaCase
from benchmarks.wgrad import WgradCase
from benchmarks.wgrad_scaled import ScaledWgradCase

WGRAD_SHAPES = (
    (4, 7168, 4096, 4096),
    (4, 2048, 7168, 8192),
    (8, 7168, 4096, 4096),
    (8, 4096, 4096, 1024),
    (32, 2048, 2048, 1024),
    (64, 1536, 4096, 512),
    (128, 768, 2048, 256),
)


def _wgrad_cuda() -> list[Case]:
    cases: list[Case] = [WgradCase(f"wgrad_bf16_e{e}_m{m}_n{n}_k{k}", e, m, n, k) for e, m, n, k in WGRAD_SHAPES]
    for name, multiple in (("aligned", 16), ("unaligned", 1)):
        name = f"wgrad_kmajor_{name}_e8_m4096_n4096_k1024"
        cases.append(WgradCase(name, 8, 4096, 4096, 1024, k_major=True, multiple=multiple))
    for form in ("mxfp8", "nvfp4"):
        cases += [ScaledWgradCase(f"wgrad_{form}_e{e}_m{m}_n{n}_k{k}", form, e, m, n, k) for e, m, n, k in WGRAD_SHAPES]
    return cases


def _kda_cuda() -> list[Case]:
    return [
        KdaCase("kda_bwd_b1_t8192_h32", 1, 8192, 32),
        KdaCase("kda_bwd_b2_t4096_h64", 2, 4096, 64),
        KdaCase("kda_bwd_t8192_h32_10seq", 1, 8192, 32, sequences=10),
        KdaCase("kda_bwd_t8192_h32_100seq", 1, 8192, 32, sequences=100),
        KdaCase("kda_bwd_b4_t1024_h16", 4, 1024, 16),
        KdaCase("kda_bwd_b1_t65536_h8", 1, 65536, 8),
        KdaCase("kda_bwd_b1_t8192_h96", 1, 8192, 96),
    ]


def _cpu() -> list[Case]:
    fp32 = torch.float32
    return [
        KdaCase("kda_cpu_b1_t2048_h4", 1, 2048, 4, dtype=fp32, device="cpu", forward_too=True),
        WgradCase("wgrad_cpu_fp32_e8_m512_n512_k256", 8, 512, 512, 256, dtype=fp32, device="cpu"),
        KdaCase("overhead_cpu_kda_bwd", 1, 1, 1, 16, 16, dtype=fp32, device="cpu"),
        WgradCase("overhead_cpu_grouped_wgrad", 1, 16, 16, 16, dtype=fp32, device="cpu"),
    ]


def cases() -> list[Case]:
    """Every case of every device, in the order of the result tables."""
    return [*_cpu(), *_wgrad_cuda(), *_kda_cuda()]


def select(patterns: Iterable[str], device: str) -> list[Case]:
    """Cases of `device` whose name matches any of the shell patterns (all of them when there is no pattern).

    Raises ValueError for a pattern that matches no case of any device.
    """
    patterns = list(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(case.name, pattern) for case in cases()):
            known = ", ".join(case.name for case in cases())
            raise ValueError(f"--case: no case matches {pattern!r}; expected one of: {known}")
    chosen = [case for case in cases() if case.device == device]
    return [c for c in chosen if not patterns or any(fnmatchcase(c.name, p) for p in patterns)]
