"""The SM100 kernel without an SM100: what is made for which problem, memory arithmetic, scale addresses, tails."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from culax import dispatch, doctor
from culax.grouped_wgrad import plan, plan_sm100
from culax.grouped_wgrad.stages.gemm.config import SMEM_LIMIT
from culax.grouped_wgrad.stages.gemm_tcgen05 import config as facts
from culax.grouped_wgrad.stages.gemm_tcgen05.config import Config
from culax.reference import block_scaled
from culax.runtime import arch as runtime_arch
from tests.grouped_wgrad.problems import PLAIN, M, T

MX = dataclasses.replace(PLAIN, a_dtype=torch.float8_e4m3fn, b_dtype=torch.float8_e5m2, scale_layout="padded", block=32)
K_MAJOR = {"a_strides": (T, 1), "b_strides": (1, T)}
FP4 = torch.float4_e2m1fn_x2
NV = dataclasses.replace(MX, a_dtype=FP4, b_dtype=FP4, block=16, a_strides=(T // 2, 1), b_strides=(1, T // 2))
PAIR_NV = Config(a_format="e2m1", b_format="e2m1", a_major="k", b_major="k")
CONFIGS = {variant.config for arch in plan_sm100.ARCHS for variant in plan.variants(arch)}


def config(**changes: object) -> Config:
    found = plan_sm100.config(dataclasses.replace(MX, **changes))
    assert isinstance(found, Config), found
    return found


def test_a_problem_gets_the_variant_made_for_it() -> None:
    chosen = config()
    assert (chosen.a_format, chosen.b_format, chosen.a_major, chosen.ragged) == ("e4m3", "e5m2", "mn", False)
    assert chosen.pair and not config(m=128).pair
    assert config(**K_MAJOR).a_major == "k"
    assert config(operand_layout="ragged", tokens=1001, a_strides=(1001, 1), b_strides=(1, 1001)).ragged
    listed = config(discrete=True, accumulate=True, out_dtype=torch.float32)
    assert listed.discrete and listed.accumulate and listed.out_dtype == "float32"
    assert plan_sm100.config(NV).nvfp4
    for arch in plan_sm100.ARCHS:
        assert {plan_sm100.variant(c, arch) for c in (chosen, listed, plan_sm100.config(NV))} <= {*plan.variants(arch)}


@pytest.mark.parametrize("arch", plan_sm100.ARCHS)
def test_no_variant_runs_and_the_reason_says_so(arch: str) -> None:
    reason = plan.plan(MX, arch)
    assert isinstance(reason, str)
    assert "unverified" in reason and "never run" in reason
    assert plan_sm100.variant(config(), arch).name in reason


@pytest.mark.parametrize("arch", plan_sm100.ARCHS)
def test_dispatch_takes_the_torch_path_and_the_doctor_says_unverified(monkeypatch, arch: str) -> None:
    monkeypatch.setattr(runtime_arch, "arch_of", lambda device: arch)
    choice = dispatch.choose(MX, torch.device("cuda", 0))
    assert choice.backend == "reference" and choice.plan is None and "unverified" in choice.reason
    assert "unverified" in doctor._unverified(arch)
    assert doctor._unverified("sm_90a") == ""


REFUSED = {
    "bf16": ({"block": 0, "a_dtype": torch.bfloat16}, "block-scaled"),
    "experts": ({"experts": 513}, "513 experts"),
    "tokens": ({"tokens": 2**30}, "tokens"),
    "pitch": ({"a_strides": (1, M + 8)}, "`mat_a` has strides"),
    "expanded": ({"b_strides": (0, 1)}, "`mat_b` has strides"),
    "mixed": ({"b_strides": (1, T)}, "one operand is token-major"),
    "odd_m": ({"m": 248}, "M = 248"),
    "odd_n": ({**K_MAJOR, "n": 4}, "N = 4"),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_problems_get_a_reason(changes: dict, words: str) -> None:
    reason = plan_sm100.config(dataclasses.replace(MX, **changes))
    assert isinstance(reason, str) and words in reason


def test_variants_are_complete_and_named_apart() -> None:
    for arch in plan_sm100.ARCHS:
        names = [variant.name for variant in plan.variants(arch) + plan.fault_variants(arch)]
        assert len(set(names)) == len(names)
        # (4 MXFP8 format pairs x 3 layouts + NVFP4 x 2 layouts) x 4 outputs x dense or list x pair or one
        assert len(plan.variants(arch)) == (4 * 3 + 2) * 4 * 2 * 2
    assert all(not found.fault for found in CONFIGS)


@pytest.mark.parametrize("found", sorted(CONFIGS, key=repr), ids=lambda c: plan_sm100.variant(c, "sm_100a").name)
def test_shared_and_tensor_memory_fit(found: Config) -> None:
    assert found.smem_bytes <= SMEM_LIMIT
    a, b = found.scale_columns
    first = found.accumulator_stride + found.tile_n
    assert found.accumulator_stride * (found.accumulators - 1) + found.tile_n <= first
    assert first + a + b == found.columns <= facts.TMEM_COLUMNS
    assert found.overlap % found.epi_n == 0 and found.overlap < found.tile_n
    # The accumulator is given back once what both share has been read, and never before.
    assert (found.release_after + 1) * found.epi_n == (found.overlap or found.tile_n)


def test_tiles_in_numbers() -> None:
    pair, one = Config(), Config(pair=False, tile_n=128)
    assert pair.stage_bytes == (128 + 128) * 128 + 512 + 1024
    assert one.stage_bytes == (128 + 128) * 128 + 512 + 512
    assert PAIR_NV.stage_bytes == (128 + 128) * 128 + 2048 + 4096
    assert (pair.tile_k, PAIR_NV.tile_k) == (128, 256)
    assert (one.accumulator_stride, one.overlap, one.accumulator_stages) == (128, 0, 2)
    assert (pair.accumulator_stride, pair.overlap, pair.accumulator_stages) == (224, 32, 1)
    assert (PAIR_NV.accumulator_stride, PAIR_NV.overlap, PAIR_NV.columns) == (192, 64, 192 + 256 + 48)


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": 6},
        {"b_format": "e2m1"},
        {"a_format": "e2m1", "b_format": "e2m1"},
        {"accumulate": True},
        {"ragged": True},
        {"tile_n": 192},
    ],
    ids=str,
)
def test_what_a_config_refuses(changes: dict) -> None:
    with pytest.raises(AssertionError):
        Config(**changes)


@pytest.mark.parametrize("layout", ["padded", "concatenated"])
@pytest.mark.parametrize("block", [16, 32])
def test_scale_addresses_are_the_reference_ones(block: int, layout: str) -> None:
    rows, sizes = 300, [4 * block, 0, 8 * block, 4 * block, 3 * block + 5]
    starts = [sum(sizes[:e]) for e in range(len(sizes))]
    atoms = [-(-size // (4 * block)) for size in sizes]
    offs = torch.tensor([sum(sizes[: e + 1]) for e in range(len(sizes))])
    experts = block_scaled.expert_ranges(offs, sum(sizes))
    base = block_scaled.expert_scale_base(experts, rows, block, layout)
    for e, count in enumerate(atoms):
        if layout == "padded":
            mine = facts.padded_base(rows, sum(atoms[:e]))
        else:
            mine = facts.concatenated_base(rows, starts[e], block)
        assert mine == base[e].item()
        _, atom_step, row_step = facts.scale_strides(count, 1)
        for row in (0, 1, 31, 32, 127, 128, 299):
            for column in range(4 * count):
                within = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
                address = mine + row // 128 * row_step + column // 4 * atom_step + within
                reference = block_scaled.scale_address(
                    base[e], torch.tensor(4 * count), torch.tensor(row), torch.tensor(column)
                )
                assert address == reference.item()


@pytest.mark.parametrize("found", [Config(), PAIR_NV], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 1000])
def test_no_unused_scale_byte_meets_an_instruction(found: Config, length: int) -> None:
    """MXFP8 issues an instruction a block, so none for unused ones; NVFP4's last may have some, which it zeroes."""
    k_tiles = -(-length // found.tile_k)
    issued = [
        k * found.tile_k + block * found.instruction_k
        for k in range(k_tiles)
        for block in range(4)
        if block < found.instructions(length - k * found.tile_k)
    ]
    assert issued == [*range(0, length, found.instruction_k)]
    used = {(start + token) // found.block for start in issued for token in range(found.instruction_k)}
    valid = {token // found.block for token in range(length)}
    if not found.nvfp4:
        assert used == valid
    assert used - valid <= {4 * (-(-len(valid) // 4)) - 1 - i for i in range(3)}, (
        "all in the last atom, which is masked"
    )
