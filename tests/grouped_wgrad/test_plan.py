"""The choice of a variant: what is taken, what is refused and with which reason, and the list of what is built."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from culax.grouped_wgrad import plan
from culax.grouped_wgrad.problem import WgradProblem
from tests.grouped_wgrad.problems import PLAIN, M, T


def changed(**changes: object) -> WgradProblem:
    return dataclasses.replace(PLAIN, **changes)


TAKEN = {
    "token_major": {},
    "padded_rows": {"a_strides": (1, M + 8)},
    "k_major": {"a_strides": (T, 1), "b_strides": (1, T)},
    "mixed_majors": {"b_strides": (1, T)},
    "one_token": {"tokens": 1, "a_strides": (1, 1), "b_strides": (1, 1)},
    "ragged": {"operand_layout": "ragged", "a_strides": (T, 1), "b_strides": (1, T)},
    "ragged_odd_tokens": {"operand_layout": "ragged", "tokens": 1001, "a_strides": (1001, 1), "b_strides": (1, 1001)},
    "fp16": {"a_dtype": torch.float16, "b_dtype": torch.float16, "out_dtype": torch.float16},
    "fp16_to_bf16": {"a_dtype": torch.float16, "b_dtype": torch.float16},
    "fp32_list_accumulated": {"out_dtype": torch.float32, "discrete": True, "accumulate": True},
    "no_tokens": {"tokens": 0, "a_strides": (1, M)},
    "no_experts": {"experts": 0},
}


@pytest.mark.parametrize("changes", TAKEN.values(), ids=TAKEN.keys())
def test_taken_problems_get_a_variant_that_is_built(changes: dict) -> None:
    chosen = plan.plan(changed(**changes), "sm_90a")
    assert isinstance(chosen, plan.Plan)
    assert chosen.variant in plan.variants("sm_90a")
    config = chosen.variant.config
    assert config.fault == "" and not config.poison
    assert (config.discrete, config.accumulate) == (changes.get("discrete", False), changes.get("accumulate", False))
    assert config.ragged == (changes.get("operand_layout") == "ragged")


MX = {
    "a_dtype": torch.float8_e4m3fn,
    "b_dtype": torch.float8_e5m2,
    "a_strides": (T, 1),
    "b_strides": (1, T),
    "block": 32,
    "scale_layout": "padded",
    "out_dtype": torch.float32,
}


def test_block_scaled_problems_get_their_variants() -> None:
    chosen = plan.plan(changed(**MX), "sm_90a")
    assert chosen.variant.name == "wgrad_mx_e4m3_e5m2_fp32_2d_sm90"
    fp4 = {
        "a_dtype": torch.float4_e2m1fn_x2,
        "b_dtype": torch.float4_e2m1fn_x2,
        "block": 16,
        "operand_layout": "ragged",
    }
    chosen = plan.plan(changed(**{**MX, **fp4}, discrete=True, accumulate=True), "sm_90a")
    assert chosen.variant.name == "wgrad_nvfp4_fp32_ragged_list_add_sm90"
    assert chosen.variant in plan.variants("sm_90a")


REFUSED = {
    "other_arch": ("sm_100a", {}, "takes block-scaled ones"),
    "scaled_token_major": ("sm_90a", {**MX, "a_strides": (1, M)}, "`mat_a` has strides"),
    "scaled_pitch": ("sm_90a", {**MX, "b_strides": (1, T + 8)}, "`mat_b` has strides"),
    "scaled_too_many_experts": ("sm_90a", {**MX, "experts": 513}, "513 experts"),
    "fp32_operands": ("sm_90a", {"a_dtype": torch.float32, "b_dtype": torch.float32}, "float32 operands"),
    "odd_m": ("sm_90a", {"m": 252}, "M = 252"),
    "odd_n": ("sm_90a", {"n": 4}, "N = 4"),
    "too_many_experts": ("sm_90a", {"experts": 513}, "513 experts"),
    "too_many_tokens": ("sm_90a", {"tokens": 2**30}, "tokens"),
    "unaligned_pitch": ("sm_90a", {"a_strides": (1, M + 4)}, "`mat_a` has strides"),
    "unaligned_k_major": ("sm_90a", {"b_strides": (1, 1001)}, "`mat_b` has strides"),
    "no_unit_stride": ("sm_90a", {"a_strides": (2, 2 * M)}, "`mat_a` has strides"),
    "expanded": ("sm_90a", {"a_strides": (1, 0)}, "`mat_a` has strides"),
    "too_many_tiles": ("sm_90a", {"m": 2**22, "n": 2**22, "experts": 4, "a_strides": (1, 2**22)}, "more tiles"),
}


@pytest.mark.parametrize(("arch", "changes", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_problems_get_a_reason(arch: str, changes: dict, words: str) -> None:
    reason = plan.plan(changed(**changes), arch)
    assert isinstance(reason, str) and words in reason


def test_majors_are_told_apart() -> None:
    def majors(**changes: object) -> tuple[str, str]:
        config = plan.plan(changed(**changes), "sm_90a").variant.config
        return config.a_major, config.b_major

    assert majors() == ("mn", "mn")
    assert majors(a_strides=(T, 1)) == ("k", "mn")
    assert majors(b_strides=(1, T)) == ("mn", "k")


def test_variants_are_complete_and_named_apart() -> None:
    built = plan.variants("sm_90a")
    names = [variant.name for variant in built + plan.fault_variants("sm_90a")]
    assert len(set(names)) == len(names)
    # Plain: 2 operand dtypes x (3 outputs + fp32 accumulation) x 5 operand layouts x dense or list; block-scaled: 4
    # pairs of fp8 formats and fp4, 2 operand layouts.
    assert len(built) == 2 * 4 * 5 * 2 + 5 * 4 * 2 * 2
    assert all(not variant.config.fault and not variant.config.poison for variant in built)
