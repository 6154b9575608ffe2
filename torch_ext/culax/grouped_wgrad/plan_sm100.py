"""Block-scaled problems on SM100 and SM103: the variant made for each, none of which has run on hardware yet.

So `plan.plan` never chooses one: it takes what `unused` says as its reason, and the PyTorch path runs.
"""

from __future__ import annotations

import dataclasses

from culax.grouped_wgrad.plan_shared import (
    FORMATS,
    MX_PAIRS,
    NV_PAIR,
    OUTPUTS,
    SHORT,
    STORES,
    epilogue_columns,
    last_words,
    too_large,
)
from culax.grouped_wgrad.problem import WgradProblem
from culax.grouped_wgrad.stages.gemm_tcgen05.config import LANES, Config
from culax.runtime.variants import Variant

ARCHS = {"sm_100a": "sm100", "sm_103a": "sm103"}
ENTRY = "culax.grouped_wgrad.stages.gemm_tcgen05.kernel:entry"
UNVERIFIED = "unverified: never run on such a GPU, so never chosen"
ALIGNED = 16
"""Bytes that TMA aligns rows and their pitch to; an operand's element, or packed pair, is one byte."""


def config(problem: WgradProblem) -> Config | str:
    """The configuration made for a problem, or a sentence that says why there is none."""
    if not problem.block:
        return f"{problem.a_dtype} operands: the SM100 kernel takes block-scaled ones"
    if reason := too_large(problem):
        return reason
    ragged = problem.operand_layout == "ragged"
    majors = [_major(strides, ragged) for strides in (problem.a_strides, problem.b_strides[::-1])]
    for name, major, strides in zip(("mat_a", "mat_b"), majors, (problem.a_strides, problem.b_strides)):
        if not major:
            return f"`{name}` has strides {strides}: TMA needs one of 1 and the other a positive multiple of {ALIGNED}"
    if majors[0] != majors[1]:
        return "one operand is token-major and the other is not: no variant is made for that"
    rows = ALIGNED if majors[0] == "mn" else 8
    if problem.m % rows or problem.n % rows:
        return f"M = {problem.m} and N = {problem.n} must be multiples of {rows} for 16-byte aligned rows"
    return _config(
        (FORMATS[problem.a_dtype], FORMATS[problem.b_dtype]),
        OUTPUTS[problem.out_dtype],
        (majors[0], ragged),
        problem.discrete,
        problem.accumulate,
        problem.m > LANES,
    )


def unused(problem: WgradProblem, arch: str) -> str:
    """Why the PyTorch path runs a problem on `arch`."""
    found = config(problem)
    if isinstance(found, str):
        return found
    name = variant(found, arch).name
    return f"kernel {name} is compiled and its PTX checked, but {UNVERIFIED}"


def _major(strides: tuple[int, ...], ragged: bool) -> str:
    """Contiguous dimension of an operand's bytes seen as (X, T): "mn", "k", or "" where TMA cannot read it."""
    x, t = strides
    if ragged:
        return "k"
    if x == 1 and t >= ALIGNED and t % ALIGNED == 0:
        return "mn"
    return "k" if t == 1 and x >= ALIGNED and x % ALIGNED == 0 else ""


def _config(
    formats: tuple[str, str], out_dtype: str, layout: tuple[str, bool], discrete: bool, accumulate: bool, pair: bool
) -> Config:
    major, ragged = layout
    return Config(
        a_format=formats[0],
        b_format=formats[1],
        out_dtype=out_dtype,
        a_major=major,
        b_major=major,
        ragged=ragged,
        discrete=discrete,
        accumulate=accumulate,
        pair=pair,
        tile_n=256 if pair else 128,
        epi_n=epilogue_columns(out_dtype),
    )


def variant(config: Config, arch: str) -> Variant:
    """The variant of a configuration; its name says what a user would ask."""
    formats = "nvfp4" if config.nvfp4 else f"{config.a_format}_{config.b_format}"
    layout = "ragged" if config.ragged else f"{config.a_major}_{config.b_major}"
    parts = ["wgrad", formats, SHORT[config.out_dtype], layout, "pair" if config.pair else "one"]
    parts += last_words(config.discrete, config.accumulate, config.fault)
    return Variant("grouped_wgrad", arch, "_".join([*parts, ARCHS[arch]]), ENTRY, config)


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that `config` can name: formats, outputs, layouts, dense and list, one CTA a tile and pairs."""
    if arch not in ARCHS:
        return ()
    kinds = [(formats, layout) for formats in MX_PAIRS for layout in (("mn", False), ("k", False), ("k", True))]
    kinds += [(NV_PAIR, layout) for layout in (("k", False), ("k", True))]
    return tuple(
        variant(_config(formats, out_dtype, layout, discrete, accumulate, pair), arch)
        for formats, layout in kinds
        for out_dtype, accumulate in STORES
        for discrete in (False, True)
        for pair in (True, False)
    )


def fault_variants(arch: str) -> tuple[Variant, ...]:
    """Builds that leave acquires out: tests/ptx must report them; nothing else asks for them."""
    if arch != "sm_100a":
        return ()
    whole = _config(("e4m3", "e4m3"), "float32", ("k", True), True, True, True)
    return tuple(variant(dataclasses.replace(whole, fault=fault), arch) for fault in ("no_acquire", "no_acquire_load"))
