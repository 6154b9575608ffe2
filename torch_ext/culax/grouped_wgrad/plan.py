"""From a problem to the kernel variant that runs it, or the reason why none does."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

from culax.grouped_wgrad import plan_scaled, plan_sm100
from culax.grouped_wgrad.plan_shared import OUTPUTS, SHORT, STORES, epilogue_columns, last_words, too_large
from culax.grouped_wgrad.problem import WgradProblem
from culax.grouped_wgrad.stages.gemm.config import DESCRIPTOR_BYTES, Config
from culax.runtime.variants import Variant

ARCH = "sm_90a"
ENTRY = "culax.grouped_wgrad.stages.gemm.kernel:entry"
OPERANDS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
MAX_CLUSTERS = 2**31 - 2**16
"""Work indices are int32, and one grid's step past the end must not wrap."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A problem and the variant that runs it; compared by identity, as dispatch keeps one a call signature."""

    problem: WgradProblem
    variant: Variant

    @functools.cached_property
    def config(self) -> Config:
        """The variant's configuration."""
        assert isinstance(self.variant.config, Config)
        return self.variant.config

    @functools.cached_property
    def workspace_shape(self) -> tuple[int, int, int] | None:
        """Shape of the int64 workspace that holds device-written descriptors; None where there are none."""
        slots = self.config.slots
        return (self.problem.experts, slots, DESCRIPTOR_BYTES // 8) if slots else None


def plan(problem: WgradProblem, arch: str) -> Plan | str:
    """The plan of a CUDA problem on `arch`, or a sentence that says why the kernel cannot take it."""
    if arch in plan_sm100.ARCHS:
        return plan_sm100.unused(problem, arch)
    plain = problem.a_dtype in OPERANDS and problem.b_dtype == problem.a_dtype and problem.out_dtype in OUTPUTS
    if not problem.block and not plain:
        return f"{problem.a_dtype} operands with a {problem.out_dtype} output have no kernel: it takes bf16 and fp16"
    if problem.m % 8 or problem.n % 8:
        return f"M = {problem.m} and N = {problem.n} must be multiples of 8 for 16-byte aligned rows"
    if reason := too_large(problem):
        return reason
    if problem.experts * -(-problem.m // 64) * -(-problem.n // 64) > MAX_CLUSTERS:
        return f"{problem.experts} outputs of {problem.m} x {problem.n} have more tiles than the kernel counts"
    if problem.block:
        chosen = plan_scaled.choose(problem)
        return chosen if isinstance(chosen, str) else Plan(problem, chosen)
    ragged = problem.operand_layout == "ragged"
    strides_seen = (problem.a_strides, problem.b_strides[::-1])
    a_major, b_major = ("k" if ragged else _major(strides, problem.tokens) for strides in strides_seen)
    for name, major, strides in zip(("mat_a", "mat_b"), (a_major, b_major), (problem.a_strides, problem.b_strides)):
        if not major:
            return f"`{name}` has strides {strides}: TMA needs one of 1 and the other a positive multiple of 8"
    dtype, out_dtype = OPERANDS[problem.a_dtype], OUTPUTS[problem.out_dtype]
    return Plan(
        problem, variant(_config(dtype, out_dtype, (a_major, b_major, ragged), problem.discrete, problem.accumulate))
    )


def _major(strides: tuple[int, ...], tokens: int) -> str:
    """Contiguous dimension of an operand seen as (X, T): "mn", "k", or "" where TMA cannot read it."""
    x, t = strides
    if x == 1 and (tokens <= 1 or (t >= 8 and t % 8 == 0)):
        return "mn"
    return "k" if t == 1 and x >= 8 and x % 8 == 0 else ""


def _config(
    dtype: str, out_dtype: str, operands: tuple[str, str, bool], discrete: bool, accumulate: bool, **changes: Any
) -> Config:
    """The one configuration of a kind of problem; the README logs the measurements behind the numbers."""
    a_major, b_major, ragged = operands
    config = Config(
        dtype=dtype,
        out_dtype=out_dtype,
        a_major=a_major,
        b_major=b_major,
        ragged=ragged,
        discrete=discrete,
        accumulate=accumulate,
        epi_n=epilogue_columns(out_dtype),
    )
    return dataclasses.replace(config, **changes)


def variant(config: Config) -> Variant:
    """The variant of a configuration; its name says what a user would ask."""
    layout = "ragged" if config.ragged else f"{config.a_major}_{config.b_major}"
    parts = ["wgrad", SHORT[config.dtype], SHORT[config.out_dtype], layout]
    parts += last_words(config.discrete, config.accumulate, config.fault, "poison" if config.poison else "")
    return Variant("grouped_wgrad", ARCH, "_".join([*parts, "sm90"]), ENTRY, config)


LAYOUTS = (("mn", "mn", False), ("k", "k", False), ("mn", "k", False), ("k", "mn", False), ("k", "k", True))


def variants(arch: str) -> tuple[Variant, ...]:
    """Every variant that plan() can choose on `arch`; for SM100 those made for it, unverified and not chosen."""
    if arch != ARCH:
        return plan_sm100.variants(arch)
    plain = tuple(
        variant(_config(dtype, out_dtype, layout, discrete, accumulate))
        for dtype in OPERANDS.values()
        for out_dtype, accumulate in STORES
        for layout in LAYOUTS
        for discrete in (False, True)
    )
    return plain + plan_scaled.variants()


def fault_variants(arch: str) -> tuple[Variant, ...]:
    """Builds with a planted fault or with poisoned stages, which tests ask for by name; plan() never returns them."""
    if arch != ARCH:
        return plan_sm100.fault_variants(arch)
    plain, ragged = LAYOUTS[0], LAYOUTS[-1]
    add = {"out_dtype": "float32", "accumulate": True}
    store = {"out_dtype": "bfloat16", "accumulate": False}
    found = []
    for kind in (store, add):
        for layout in (plain, ragged):
            found.append(_fault(layout, kind, True, fault="no_acquire"))
        found.append(_fault(ragged, kind, False, fault="no_acquire_load"))
    for layout in LAYOUTS[:2]:
        found.append(_fault(layout, store, False, poison=True, cluster_m=1))
    found.append(_fault(plain, store, False, fault="early_release"))
    found.append(_fault(plain, store, False, fault="weak_release", poison=True, cluster_m=1))
    return tuple(found) + plan_scaled.fault_variants()


def _fault(layout: tuple[str, str, bool], kind: dict, discrete: bool, **changes: Any) -> Variant:
    return variant(_config("bfloat16", kind["out_dtype"], layout, discrete, kind["accumulate"], **changes))
