"""Every built variant: the protocol rules on its PTX, and what the assembler and the launch said."""

from __future__ import annotations

import pytest

from culax.runtime.arch import ARCHS
from culax.runtime.variants import enumerate_variants
from tests.ptx import resources, sm100_table
from tests.ptx.check import check_text
from tests.ptx.conftest import CI, Built, select

# The first test that needs a build waits for all of them.
pytestmark = pytest.mark.timeout(3600)


def test_protocols_hold(shipped_build: Built) -> None:
    assert check_text(shipped_build.ptx) == []


def test_no_spills_and_no_serialised_wgmma(shipped_build: Built) -> None:
    assert resources.spills(shipped_build.log) == []
    assert resources.warnings(shipped_build.log) == []


def test_registers_and_local_memory(shipped_build: Built) -> None:
    usages = {usage.kernel: usage for usage in resources.usage(shipped_build.cubin)}
    kernels = {kernel.name: kernel for kernel in shipped_build.kernels}
    assert usages.keys() == kernels.keys()
    for name, usage in usages.items():
        assert (usage.stack, usage.local) == (0, 0), usage
        assert kernels[name].threads * usage.registers <= resources.MOST_REGISTERS, usage


def test_shared_memory_fits(shipped_build: Built) -> None:
    static = max(usage.shared - resources.RESERVED_SHARED for usage in resources.usage(shipped_build.cubin))
    assert shipped_build.launch_smem
    for launch in shipped_build.launch_smem:
        assert launch is not None, "the size of a launch's shared memory isn't a constant"
        assert static + launch <= resources.MOST_SHARED


def test_planted_fault_builds_are_reported(faulty_build: Built) -> None:
    assert check_text(faulty_build.ptx)


@pytest.mark.parametrize("arch", ARCHS)
def test_ci_checks_every_kernel_set_and_operand_layout(arch: str) -> None:
    variants = enumerate_variants(arch)
    chosen = select(variants, CI)
    assert {v.kernel_set for v in chosen} == {v.kernel_set for v in variants}
    for field in ("a_major", "b_major", "ragged", "discrete", "accumulate", "dtype"):
        seen = {(v.kernel_set, getattr(v.config, field, None)) for v in variants}
        assert {(v.kernel_set, getattr(v.config, field, None)) for v in chosen} == seen, field


def test_the_readme_has_what_sm100_builds_take(shipped_build: Built) -> None:
    if shipped_build.variant in sm100_table.chosen():
        assert sm100_table.row(shipped_build) in sm100_table.README.read_text().splitlines()
