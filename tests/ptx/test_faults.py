"""Faults planted into the PTX of shipped kernels: every single one is reported."""

from __future__ import annotations

import pytest

from culax.runtime.variants import enumerate_variants
from tests.ptx import faults
from tests.ptx.check import check_text
from tests.ptx.conftest import Builds

pytestmark = pytest.mark.timeout(3600)

# Kernels that between them have every kind of instruction whose loss must show.
NAMES = (
    "wgrad_bf16_bf16_mn_mn_list_sm90",
    "wgrad_bf16_bf16_ragged_list_sm90",
    "wgrad_mx_e4m3_e4m3_bf16_2d_list_sm90",
)
SCANS = ("kda_scans_k128_v128_sm90a", "kda_scans_k64_v64_summary_sm90a")
# Tiles loaded once, without a ring: what may be lost is a wait for products before the barrier behind which their
# operands are overwritten.
LOCAL = "kda_local_k128_v128_sm90a"
LOCAL_KINDS = ("drop-wait", "weaken-wait")
RING_KINDS = (
    "drop-stage-release",
    "drop-barrier-wait",
    "drop-wait",
    "weaken-wait",
    "swap-release-and-wait",
)
SEND_KINDS = ("drop-proxy-fence",)
KINDS = ("drop-acquire", "drop-descriptor-release", *RING_KINDS)
PAIRS = [(name, kind) for name in NAMES for kind in KINDS] + [(NAMES[2], kind) for kind in SEND_KINDS]
PAIRS += [(name, kind) for name in SCANS for kind in RING_KINDS]
PAIRS += [(LOCAL, kind) for kind in LOCAL_KINDS]


@pytest.fixture(scope="module")
def planted(builds: Builds) -> dict[tuple[str, str], list[faults.Fault]]:
    variants = {variant.name: variant for variant in enumerate_variants("sm_90a", faults=True)}
    found: dict[tuple[str, str], list[faults.Fault]] = {}
    for name in (*NAMES, *SCANS, LOCAL):
        for fault in faults.planted(builds.get(variants[name]).ptx):
            found.setdefault((name, fault.kind), []).append(fault)
    return found


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_every_planted_fault_is_reported(planted, name: str, kind: str) -> None:
    assert planted[name, kind]
    assert [fault.name for fault in planted[name, kind] if not check_text(fault.source)] == []


@pytest.mark.parametrize("name", NAMES[:2] + SCANS)
def test_a_dropped_stage_release_is_called_by_its_name(planted, name: str) -> None:
    for fault in planted[name, "drop-stage-release"]:
        assert "release" in {found.rule for found in check_text(fault.source)}, fault.name


def test_every_kind_of_fault_is_planted(planted) -> None:
    assert {kind for _, kind in planted} == {*KINDS, *SEND_KINDS}


TENSOR_NAMES = ("wgrad_e4m3_e5m2_fp32_mn_mn_one_list_add_sm100", "wgrad_nvfp4_bf16_k_k_pair_list_sm100")
TENSOR_KINDS = {
    "arrive-for-commit": {"drain"},
    "drop-acquire": {"acquire"},
    "drop-barrier-wait": {"fill", "accumulator"},
    "drop-commit": {"release", "accumulator"},
    "drop-descriptor-release": {"descriptor-release"},
    "drop-free": {"tensor-memory"},
    "drop-hand-over": {"accumulator"},
    "drop-meeting": {"tensor-memory"},
    "drop-proxy-fence": {"proxy"},
    "drop-scale-copy": {"fill"},
    "drop-tensor-fence": {"accumulator"},
    "drop-tensor-wait": {"accumulator"},
}


@pytest.fixture(scope="module")
def planted_in_tensor_memory(builds: Builds) -> dict[tuple[str, str], list[faults.Fault]]:
    variants = {variant.name: variant for variant in enumerate_variants("sm_100a")}
    found: dict[tuple[str, str], list[faults.Fault]] = {}
    for name in TENSOR_NAMES:
        source = builds.get(variants[name]).ptx
        of_descriptors = (f for f in faults.planted(source) if f.kind in ("drop-acquire", "drop-descriptor-release"))
        for fault in (*of_descriptors, *faults.planted_in_tensor_memory(source)):
            found.setdefault((name, fault.kind), []).append(fault)
    return found


@pytest.mark.parametrize("kind", TENSOR_KINDS)
@pytest.mark.parametrize("name", TENSOR_NAMES)
def test_every_fault_in_tensor_memory_is_reported_by_its_rule(planted_in_tensor_memory, name: str, kind: str) -> None:
    assert planted_in_tensor_memory[name, kind]
    for fault in planted_in_tensor_memory[name, kind]:
        assert {found.rule for found in check_text(fault.source)} & TENSOR_KINDS[kind], fault.name


def test_every_kind_of_fault_in_tensor_memory_is_planted(planted_in_tensor_memory) -> None:
    assert {kind for _, kind in planted_in_tensor_memory} == set(TENSOR_KINDS)
