"""The KDA plan: which problems have kernels, which configurations are built, and that each fits a multiprocessor."""

import dataclasses
import itertools

import pytest
import torch

from culax.kda import plan
from culax.kda.problem import KdaProblem
from culax.kda.stages.local.config import LocalConfig
from culax.kda.stages.prep.config import PrepConfig
from culax.kda.stages.scans.config import ScansConfig

SMEM_LIMIT = 232_448
PROBLEM = KdaProblem(
    op="kda_bwd",
    batch=1,
    tokens=1000,
    heads=4,
    value_heads=4,
    key_dim=128,
    value_dim=128,
    sequences=1,
    varlen=False,
    dtype=torch.bfloat16,
    gate_dtype=torch.float32,
    beta_dtype=torch.float32,
    state_dtype=torch.float32,
    device_type="cuda",
)


@pytest.mark.parametrize(
    ("change", "arch", "named"),
    [
        ({}, "sm_100a", "sm_100a"),
        ({"op": "kda_fwd"}, "sm_90a", "kda_fwd"),
        ({"dtype": torch.float16}, "sm_90a", "float16"),
        ({"key_dim": 96}, "sm_90a", "K = 96"),
        ({"value_dim": 256}, "sm_90a", "V = 256"),
    ],
    ids=["arch", "forward", "half", "key-dim", "value-dim"],
)
def test_what_has_no_kernel_gets_a_reason_that_names_it(change, arch, named):
    reason = plan.plan(dataclasses.replace(PROBLEM, **change), arch)
    assert isinstance(reason, str) and named in reason


def test_a_problem_within_reach_gets_its_plan():
    assert plan.plan(PROBLEM, "sm_90a") is plan.plan_for("sm_90a", 128, 128, "", False, "float32")
    packed = dataclasses.replace(PROBLEM, varlen=True, value_heads=8, key_dim=64, beta_dtype=torch.bfloat16)
    assert plan.plan(packed, "sm_90a") is plan.plan_for("sm_90a", 64, 128, "int64", True, "bfloat16")


def test_every_plan_launches_only_kernels_that_are_built_ahead():
    built, stages = set(plan.variants("sm_90a")), set(plan.stage_variants("sm_90a"))
    for key_dim in plan.DIMS:
        for value_dim in plan.DIMS:
            for offsets in ("", "int64"):
                for grouped, beta in itertools.product((False, True), ("float32", "bfloat16")):
                    chosen = plan.plan_for("sm_90a", key_dim, value_dim, offsets, grouped, beta)
                    assert chosen.variant in built and set(chosen.stages.values()) <= stages
                    assert ("group_sum" in chosen.stages) == grouped == chosen.config.local.partial


def test_names_are_unique_and_other_architectures_have_none():
    names = [variant.name for variant in plan.variants("sm_90a") + plan.stage_variants("sm_90a")]
    assert len(names) == len(set(names)) > 0
    assert plan.variants("sm_100a") == plan.stage_variants("sm_100a") == ()


CONFIGS = [variant.config for variant in plan.stage_variants("sm_90a") if hasattr(variant.config, "smem_bytes")]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_shared_memory_and_threads_fit(config):
    assert config.smem_bytes <= SMEM_LIMIT
    assert config.threads % 32 == 0 and config.threads <= 1024


@pytest.mark.parametrize(
    ("config", "smem", "threads"),
    [
        (PrepConfig(128, 128), 77_056, 256),
        (ScansConfig(128, 128).forward, 215_104, 160),
        (ScansConfig(128, 128), 222_768, 160),
        (ScansConfig(128, 128, summary=True), 222_768, 160),
        (LocalConfig(128, 128, partial=False), 115_504, 256),
        (LocalConfig(64, 128, partial=False), 123_696, 256),
    ],
    ids=repr,
)
def test_shared_memory_is_what_the_kernels_were_seen_to_take(config, smem, threads):
    assert (config.smem_bytes, config.threads) == (smem, threads)


@pytest.mark.parametrize("key_dim", plan.DIMS)
@pytest.mark.parametrize("value_dim", plan.DIMS)
def test_two_local_ctas_fit_on_an_sm_but_for_128_value_columns(key_dim, value_dim):
    config = LocalConfig(key_dim, value_dim, partial=False)
    assert config.ctas == (1 if config.value_columns == 128 else 2)
    assert config.ctas * (config.smem_bytes + 1024) <= 228 * 1024
    assert config.splits * config.value_columns >= value_dim


@pytest.mark.parametrize("config", [ScansConfig(128, 128).forward, ScansConfig(128, 128).reverse], ids=repr)
def test_a_scan_stage_more_would_not_fit(config):
    with pytest.raises(AssertionError):
        dataclasses.replace(config, stages=config.stages + 1)


@pytest.mark.parametrize(
    ("sizes", "segments"),
    [
        ((128, 128, 1, 8, 1024), 4),
        ((128, 128, 1, 4, 512), 6),
        ((64, 64, 1, 8, 1024), 6),
        ((64, 128, 2, 4, 1024), 4),
        ((128, 128, 1, 1, 100_000), 23),
        ((128, 128, 1, 8, 63), 3),
        ((128, 128, 1, 8, 47), 1),
        ((128, 128, 1, 12, 1024), 1),
        ((128, 128, 1, 16, 1024), 1),
        ((128, 128, 1, 32, 128), 1),
        ((128, 128, 1, 1, 3), 1),
        ((128, 128, 0, 8, 0), 1),
        ((128, 128, 100, 8, 228), 1),
    ],
)
def test_few_states_are_walked_over_in_segments(sizes, segments):
    assert plan.segments(*sizes) == segments


def test_segments_fill_the_multiprocessors_once():
    for states, chunks in itertools.product(range(1, 12), (16, 60, 1000)):
        count = plan.segments(128, 128, 1, states, chunks)
        assert count == 1 or states * max(4 * count, 4 * (count - 1) + 2 * (count - 2)) <= plan.MULTIPROCESSORS
        assert count == 1 or chunks >= plan.FEWEST_CHUNKS * count


def test_fault_builds_are_in_no_plan():
    shipped, faults = set(plan.variants("sm_90a")), set(plan.fault_variants("sm_90a"))
    assert faults and not shipped & faults
    assert all(variant.config.poison for variant in faults)
    assert {variant.config.fault for variant in faults} == {"", "weak_release"}
