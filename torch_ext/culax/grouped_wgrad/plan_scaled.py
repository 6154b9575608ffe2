"""Variants for block-scaled operands on SM90: which one runs a problem, or the reason why none does."""

from __future__ import annotations

import dataclasses
from typing import Any

from culax.grouped_wgrad.plan_shared import (
    FORMATS,
    MX_PAIRS,
    NV_PAIR,
    OUTPUTS,
    SHORT,
    STORES,
    epilogue_columns,
    last_words,
)
from culax.grouped_wgrad.problem import WgradProblem
from culax.grouped_wgrad.stages.gemm_scaled.config import Config
from culax.runtime.variants import Variant

ARCH = "sm_90a"
ENTRY = "culax.grouped_wgrad.stages.gemm_scaled.kernel:entry"


def choose(problem: WgradProblem) -> Variant | str:
    """The variant of a block-scaled problem whose sizes a kernel can take, or a sentence that says why it cannot."""
    ragged = problem.operand_layout == "ragged"
    stored = problem.tokens // 2 if problem.block == 16 else problem.tokens
    if stored == 1:
        return "one token: TMA needs rows of 16 bytes"
    for name, strides in (("mat_a", problem.a_strides), ("mat_b", problem.b_strides[::-1])):
        x, t = strides
        if not ragged and stored and (t != 1 or x < stored or x % 16):
            return f"`{name}` has strides {strides}: the kernel takes contiguous tokens, rows 16 bytes apart"
    if problem.block == 16 and not ragged and stored % 16:
        return f"{problem.tokens} tokens: fp4 operands are read in rows of 32"
    formats = FORMATS[problem.a_dtype], FORMATS[problem.b_dtype]
    return variant(_config(formats, OUTPUTS[problem.out_dtype], ragged, problem.discrete, problem.accumulate))


def _config(
    formats: tuple[str, str], out_dtype: str, ragged: bool, discrete: bool, accumulate: bool, **changes: Any
) -> Config:
    """The one configuration of a kind of problem."""
    config = Config(
        a_format=formats[0],
        b_format=formats[1],
        out_dtype=out_dtype,
        ragged=ragged,
        discrete=discrete,
        accumulate=accumulate,
        epi_n=epilogue_columns(out_dtype),
    )
    return dataclasses.replace(config, **changes)


def variant(config: Config) -> Variant:
    """The variant of a configuration; its name says what a user would ask."""
    formats = ["nvfp4"] if config.nv else ["mx", config.a_format, config.b_format]
    parts = ["wgrad", *formats, SHORT[config.out_dtype], "ragged" if config.ragged else "2d"]
    parts += last_words(config.discrete, config.accumulate, config.fault, "poison" if config.poison else "")
    return Variant("grouped_wgrad", ARCH, "_".join([*parts, "sm90"]), ENTRY, config)


def variants() -> tuple[Variant, ...]:
    """Every variant that choose() can return."""
    return tuple(
        variant(_config(formats, out_dtype, ragged, discrete, accumulate))
        for formats in (*MX_PAIRS, NV_PAIR)
        for out_dtype, accumulate in STORES
        for ragged in (False, True)
        for discrete in (False, True)
    )


def fault_variants() -> tuple[Variant, ...]:
    """Builds with a planted fault, which tests ask for by name."""
    mx = ("e4m3", "e4m3")
    return (
        variant(_config(mx, "bfloat16", False, True, False, fault="no_acquire")),
        variant(_config(mx, "float32", False, True, True, fault="no_acquire")),
        variant(_config(mx, "bfloat16", True, False, False, fault="no_acquire_load")),
        variant(_config(mx, "bfloat16", False, False, False, poison=True)),
        variant(_config(mx, "bfloat16", False, False, False, fault="weak_release", poison=True)),
    )
