"""The variants to check, compiled here: a CI-sized set, or all with ``--ptx-all``.

They are kept in ``build/ptx`` with their PTX, cubin and assembler log, and compiled again when their sources change.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path

import pytest

from culax.runtime import build, manifest
from culax.runtime.arch import ARCHS
from culax.runtime.variants import Variant, enumerate_variants
from tests.ptx.text import Kernel, kernels

BUILD = Path(__file__).resolve().parents[2] / "build" / "ptx"

# Every kernel and layout in the main types; test_shipped.py says what they must cover.
CI = (
    "wgrad_bf16_bf16_*",
    "wgrad_bf16_fp32_mn_mn_*add_*",
    "wgrad_bf16_fp32_ragged_*add_*",
    "wgrad_fp16_fp16_mn_mn_*",
    "wgrad_mx_e4m3_e4m3_bf16_2d_*",
    "wgrad_mx_e5m2_e5m2_fp32_ragged_list_add_*",
    "wgrad_nvfp4_bf16_2d_sm90",
    "wgrad_e4m3_e4m3_bf16_mn_mn_pair_sm10*",
    "wgrad_e4m3_e5m2_fp32_mn_mn_one_list_add_sm100",
    "wgrad_e5m2_e4m3_fp16_k_k_one_sm10*",
    "wgrad_e4m3_e4m3_fp32_ragged_pair_list_add_sm10*",
    "wgrad_nvfp4_bf16_k_k_pair_list_sm10*",
    "wgrad_nvfp4_fp32_ragged_one_add_sm100",
    "kda_backward_k64_v64_shares_sm90a",
    "kda_backward_k128_v64_beta16_sm90a",
    "kda_backward_k128_v128_sm90a",
    "kda_backward_k128_v128_shares_beta16_sm90a",
)


@dataclass(frozen=True)
class Built:
    """One compiled variant."""

    variant: Variant
    ptx: str
    cubin: Path
    log: str
    launch_smem: tuple[int | None, ...]

    @property
    def kernels(self) -> list[Kernel]:
        return list(kernels(self.ptx))


def select(variants: tuple[Variant, ...], patterns: tuple[str, ...]) -> tuple[Variant, ...]:
    """Variants whose name matches one of the patterns."""
    return tuple(v for v in variants if any(fnmatch.fnmatchcase(v.name, pattern) for pattern in patterns))


def shipped(config: pytest.Config) -> list[Variant]:
    """What this run checks of what plans choose from."""
    chosen = []
    for arch in ARCHS:
        variants = enumerate_variants(arch)
        chosen += variants if config.getoption("--ptx-all", default=False) else select(variants, CI)
    return chosen


def faulty() -> list[Variant]:
    """The fault-injection builds that the checker must report."""
    found = []
    for arch in ARCHS:
        found += set(enumerate_variants(arch, faults=True)) - set(enumerate_variants(arch))
    return [v for v in sorted(found, key=lambda v: v.name) if getattr(v.config, "fault", "")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ptx-all", action="store_true", help="tests/ptx: check every variant, not the CI-sized set")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, variants in (("shipped_variant", shipped), ("faulty_variant", lambda config: faulty())):
        if fixture in metafunc.fixturenames:
            found = variants(metafunc.config)
            metafunc.parametrize(fixture, found, ids=[v.name for v in found], scope="session")


class Builds:
    """Compiles the variants of this run together on first use, and hands them out."""

    def __init__(self, variants: list[Variant]) -> None:
        self._waiting = variants
        self._done: set[Variant] = set()
        self._failed: dict[str, str] = {}

    def get(self, variant: Variant) -> Built:
        todo = [v for v in dict.fromkeys([*self._waiting, variant]) if v not in self._done]
        self._done.update(todo)
        for arch in {v.arch for v in todo}:
            of_arch = [v for v in todo if v.arch == arch]
            self._failed |= build.build(of_arch, BUILD / arch, jobs=2, keep=BUILD / arch).failed
        assert variant.name not in self._failed, self._failed[variant.name]
        stem = BUILD / variant.arch / variant.name
        return Built(
            variant,
            stem.with_suffix(".ptx").read_text(),
            stem.with_suffix(".cubin"),
            stem.with_suffix(".log").read_text(),
            manifest.read(BUILD / variant.arch)[variant.name].launch_smem,
        )


@pytest.fixture(scope="session")
def builds(request: pytest.FixtureRequest) -> Builds:
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = [p[name] for p in parameters for name in ("shipped_variant", "faulty_variant") if name in p]
    return Builds(list(dict.fromkeys(chosen)))


@pytest.fixture(scope="session")
def shipped_build(builds: Builds, shipped_variant: Variant) -> Built:
    return builds.get(shipped_variant)


@pytest.fixture(scope="session")
def faulty_build(builds: Builds, faulty_variant: Variant) -> Built:
    return builds.get(faulty_variant)
