"""Host arithmetic of the kernel's configuration: memory, registers, arrivals, and what it refuses to be."""

from __future__ import annotations

import dataclasses

import pytest

from culax.grouped_wgrad import plan
from culax.grouped_wgrad.stages.gemm import config as plain
from culax.grouped_wgrad.stages.gemm.config import REGISTER_FILE, SMEM_LIMIT, Config
from culax.grouped_wgrad.stages.gemm_scaled.config import Config as ScaledConfig

VARIANTS = plan.variants("sm_90a") + plan.fault_variants("sm_90a")


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_fits_the_multiprocessor(variant) -> None:
    config = variant.config
    assert config.smem_bytes <= SMEM_LIMIT
    assert config.registers <= REGISTER_FILE
    # A role that asks for more than the launch was given waits for ever: registers a thread come in eights.
    threads = plain.WARPGROUP * (config.producers + plain.CONSUMERS)
    assert config.registers <= threads * (REGISTER_FILE // threads // 8 * 8)
    # fp32 accumulators of a consumer's rows over the 128 threads of a warpgroup.
    assert config.rows * config.tile_n // 128 <= 192


def test_default_tile_in_numbers() -> None:
    config = Config(tile_m=128, tile_n=128, tile_k=64, stages=6, epi_n=32, epi_stages=4, cluster_m=2, cluster_n=1)
    assert config.stage_bytes == (128 + 128) * 64 * 2
    assert config.epilogue_bytes == 2 * 4 * 64 * 32 * 2
    # 6 stages, the epilogue, 513 offsets rounded up to 2,176 bytes, 12 barriers of 8 bytes.
    assert config.smem_bytes == 6 * 32_768 + 32_768 + 2_176 + 96
    assert config.registers == 128 * (40 + 2 * 232)
    assert config.chunks == 8


@pytest.mark.parametrize(
    ("cluster", "arrivals"), [((1, 1), 4), ((2, 1), 8), ((1, 2), 8)], ids=["one_cta", "pair_along_m", "pair_along_n"]
)
def test_a_stage_is_freed_by_every_warp_that_reads_it(cluster: tuple[int, int], arrivals: int) -> None:
    assert Config(cluster_m=cluster[0], cluster_n=cluster[1]).empty_arrivals == arrivals


def test_block_scaled_tile_in_numbers() -> None:
    config = ScaledConfig(epi_n=32)
    assert (config.rows, config.b_rows, config.chunks) == (64, 128, 8)
    # Bytes of 128 rows of A and 128 of B; a factor of 4 bytes for each row and block of 32 tokens; all of B in bf16.
    assert (config.stage_bytes, config.factor_bytes, config.converted_bytes) == (16_384, 2_048, 32_768)
    # Each of four warps converts 32 rows of 128 bytes, and its like in the other CTA as many.
    assert config.sent_bytes * 4 * config.cluster_m == config.converted_bytes
    # Two rings, the epilogue, offsets and atoms, two barriers a stage.
    assert config.smem_bytes == 5 * 18_432 + 3 * 32_768 + 32_768 + 2 * 2_176 + 2 * 8 * 8
    # Loading warp and two decoders; four converting and eight multiplying warps; four converters; eight in each CTA.
    arrivals = config.full_arrivals, config.empty_arrivals, config.ready_arrivals, config.used_arrivals
    assert arrivals == (3, 12, 4, 16)


@pytest.mark.parametrize("changes", [{"cluster_m": 1}, {"tile_n": 128}, {"stages": 6}, {"b_format": "e2m1"}])
def test_block_scaled_configurations_that_cannot_be_built_are_refused(changes: dict) -> None:
    with pytest.raises(AssertionError):
        ScaledConfig(**changes)


@pytest.mark.parametrize(
    ("kind", "slots"),
    [
        ({}, (0, 0, 0)),
        ({"discrete": True}, (1, 0, 0)),
        ({"a_major": "k"}, (1, 1, 1)),
        ({"b_major": "k", "discrete": True}, (2, 0, 1)),
        ({"a_major": "k", "b_major": "k", "discrete": True}, (3, 1, 2)),
    ],
    ids=["dense", "list", "a_k_major", "b_k_major_list", "k_major_list"],
)
def test_descriptor_slots_are_distinct(kind: dict, slots: tuple[int, int, int]) -> None:
    config = Config(**kind)
    assert (config.slots, config.slot_b, config.slot_c) == slots


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": 7},
        {"tile_m": 256, "tile_n": 256},
        {"ragged": True, "cluster_m": 1},
        {"accumulate": True},
        {"epi_stages": 3},
        {"poison": True},
        {"band": 6},
        {"dtype": "float32"},
    ],
    ids=lambda changes: "-".join(f"{key}_{value}" for key, value in changes.items()),
)
def test_what_cannot_be_built_is_refused(changes: dict) -> None:
    with pytest.raises(AssertionError):
        Config(**changes)


def test_config_is_hashable_and_shows_every_field() -> None:
    text = repr(Config())
    assert hash(Config()) == hash(Config())
    assert all(f"{field.name}=" in text for field in dataclasses.fields(Config))
