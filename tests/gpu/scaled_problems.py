"""Block-scaled grouped weight-gradient problems for the tests on hardware: quantised operands, scales, exact values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from culax.grouped_wgrad import checks, launch, plan
from culax.grouped_wgrad.stages.gemm_scaled.config import Config
from culax.reference.block_scaled import Scales
from culax.runtime.variants import Variant
from tests import quantize
from tests.gpu.wgrad_problems import DEVICE, DTYPES, VARIANTS, Outputs, Sizes, offsets, plan_of

FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Problem:
    """Operands of one call. exact_a (M, T), exact_b (N, T): fp64 without global scales, 2-D, zero past the end."""

    mat_a: Tensor
    mat_b: Tensor
    scales: Scales
    exact_a: Tensor
    exact_b: Tensor


def padded_tokens(sizes: Sizes) -> int:
    """T, a multiple of 32 so that rows of every format start on 16 bytes."""
    return (sizes.tokens + 31) // 32 * 32


def quantized(
    config: Config, rows: int, sizes: Sizes, form: str, layout: str, generator: torch.Generator, pad: int
) -> quantize.Quantized:
    """One operand (rows, T) of normal values, spread over many powers of two, in a format and a variant's layout."""
    tokens = padded_tokens(sizes)
    x = torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    x *= torch.exp2(torch.randint(-4, 5, (rows, 1), generator=generator))
    ends = torch.tensor(sizes.experts).cumsum(0).tolist()
    operands = "ragged" if config.ragged else "2d"
    if config.nv:
        return quantize.quantize_nv(x, ends, layout, operands, pad)
    return quantize.quantize_mx(x, ends, FLOATS[form], layout, operands, pad)


def problem(config: Config, sizes: Sizes, layout: str = "padded", seed: int = 0, pad: int = 0xFF) -> Problem:
    """Random operands of a variant, scale bytes nobody owns `pad`, elements past the last expert NaN."""
    generator = torch.Generator().manual_seed(seed)
    sides = (sizes.m, config.a_format), (sizes.n, config.b_format)
    a, b = (quantized(config, rows, sizes, form, layout, generator, pad) for rows, form in sides)
    values = [operand.values.view(torch.uint8).to(DEVICE).view(operand.values.dtype) for operand in (a, b)]
    blocks = [operand.scale.view(torch.uint8).to(DEVICE).view(operand.scale.dtype) for operand in (a, b)]
    factors = [None if operand.global_scale is None else operand.global_scale.to(DEVICE) for operand in (a, b)]
    scales = Scales(blocks[0], blocks[1], factors[0], factors[1], layout)
    return Problem(values[0], values[1].t(), scales, a.exact.to(DEVICE), b.exact.to(DEVICE))


def truth(given: Problem, experts: tuple[int, ...]) -> Tensor:
    """(E, M, N) float64, global scales included."""
    parts, start = [], 0
    for expert, count in enumerate(experts):
        product = given.exact_a[:, start : start + count] @ given.exact_b[:, start : start + count].t()
        if given.scales.global_a is not None and given.scales.global_b is not None and count:
            product = product * given.scales.global_a[expert].double() * given.scales.global_b[expert].double()
        parts.append(product)
        start += count
    return torch.stack(parts)


def scaled_plan(variant: Variant, sizes: Sizes, given: Problem) -> plan.Plan:
    """A plan that runs exactly this variant, fault builds included."""
    kind = given.scales.layout, checks.BLOCKS[given.mat_a.dtype]
    return plan_of(variant, sizes, (given.mat_a, given.mat_b), kind)


def launched(variant: Variant, sizes: Sizes, layout: str = "padded", seed: int = 0) -> tuple[Tensor, Problem, Outputs]:
    """Run a variant: the result (E, M, N), what it ran on, and the outputs. Accumulates onto 0.5."""
    given = problem(variant.config, sizes, layout, seed)
    outputs = Outputs(variant.config, sizes, 0.5 if variant.config.accumulate else float("nan"))
    run(variant, sizes, given, outputs)
    return outputs.stacked(), given, outputs


def run(variant: Variant, sizes: Sizes, given: Problem, outputs: Outputs) -> None:
    """Launch a variant on a problem."""
    chosen = scaled_plan(variant, sizes, given)
    launch.run(chosen, outputs.given, given.mat_a, given.mat_b, offsets(sizes.experts), given.scales)


def by_plain_kernel(given: Problem, sizes: Sizes, out_dtype: str) -> Tensor:
    """(E, M, N): operands dequantised to bf16, then the plain kernel. NVFP4's global scales in fp32, as the op does."""
    nv = given.scales.global_a is not None
    wide = "fp32" if nv else {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[out_dtype]
    variant = VARIANTS[f"wgrad_bf16_{wide}_k_k_sm90"]
    outputs = Outputs(variant.config, sizes, float("nan"))
    a, b = given.exact_a.to(torch.float32).to(torch.bfloat16), given.exact_b.to(torch.float32).to(torch.bfloat16)
    flat = Sizes(sizes.m, sizes.n, sizes.experts, a.shape[1] - sum(sizes.experts))
    launch.run(plan_of(variant, flat), outputs.given, a, b.t(), offsets(sizes.experts))
    result = outputs.stacked()
    if nv:
        empty = torch.tensor(sizes.experts, device=DEVICE) == 0
        for factor in (given.scales.global_a, given.scales.global_b):
            assert factor is not None
            result = result * factor.masked_fill(empty, 1.0)[:, None, None]
    return result.to(DTYPES[out_dtype])
