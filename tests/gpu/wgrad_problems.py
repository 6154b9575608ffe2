"""Grouped weight-gradient problems for the tests on hardware: operands, outputs with guards, the truth in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from culax.grouped_wgrad import launch, plan
from culax.grouped_wgrad.problem import WgradProblem
from culax.grouped_wgrad.stages.gemm.config import Config
from culax.runtime.variants import Variant

DEVICE = "cuda"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Half a unit in the last place of the output, relative to the expert's peak, plus fp32 summation of <= 4,096 products.
BOUNDS = {"bfloat16": 2**-8 * 1.01, "float16": 2**-11 * 1.02, "float32": 2e-6}
GUARD = 64
VARIANTS = {variant.name: variant for variant in plan.variants("sm_90a") + plan.fault_variants("sm_90a")}


@dataclass(frozen=True)
class Sizes:
    """(M, N), tokens of each expert, and rows of the operands past the last offset."""

    m: int
    n: int
    experts: tuple[int, ...]
    tail: int = 0

    @property
    def tokens(self) -> int:
        """T, a multiple of 8 so that K-major operands have 16-byte rows."""
        return (sum(self.experts) + self.tail + 7) // 8 * 8


def offsets(experts: tuple[int, ...]) -> Tensor:
    """End offsets (E,) int32 on the device."""
    return torch.tensor(experts, dtype=torch.int64).cumsum(0).to(torch.int32).to(DEVICE)


def operands(config: Config, sizes: Sizes, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mat_a, mat_b as the variant wants them, and the token-major (T, M), (T, N) they hold, NaN past the end."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    dtype, used = DTYPES[config.dtype], sum(sizes.experts)
    rows = [torch.randn(sizes.tokens, x, device=DEVICE, generator=generator).to(dtype) for x in (sizes.m, sizes.n)]
    for tensor in rows:
        tensor[used:] = float("nan")
    a, b = rows
    return arranged(a, config.a_major, config, sizes), arranged(b, config.b_major, config, sizes).t(), a, b


def arranged(rows: Tensor, major: str, config: Config, sizes: Sizes) -> Tensor:
    """(X, T) holding token-major rows (T, X): a view, a K-major copy, or expert-major blocks."""
    if not config.ragged:
        return rows.t() if major == "mn" else rows.t().contiguous()
    blocks = [part.t().reshape(-1) for part in rows[: sum(sizes.experts)].split(list(sizes.experts))]
    flat = torch.cat([*blocks, rows[sum(sizes.experts) :].reshape(-1)])
    return flat.view(rows.shape[1], rows.shape[0])


def truth(a: Tensor, b: Tensor, experts: tuple[int, ...]) -> Tensor:
    """(E, M, N) float64 from token-major rows, expert by expert."""
    parts = zip(a[: sum(experts)].split(list(experts)), b[: sum(experts)].split(list(experts)))
    return torch.stack([x.double().t() @ y.double() for x, y in parts])


class Outputs:
    """Outputs filled with `poison` inside one buffer with guards around each, (E, M, N) dense or one an expert."""

    def __init__(self, config: Config, sizes: Sizes, poison: float) -> None:
        experts, block = len(sizes.experts), sizes.m * sizes.n
        parts = experts if config.discrete else 1
        size = block if config.discrete else block * experts
        self._buffer = torch.full((parts, GUARD + size + GUARD), 7.0, device=DEVICE, dtype=DTYPES[config.out_dtype])
        shape = (sizes.m, sizes.n) if config.discrete else (experts, sizes.m, sizes.n)
        self.tensors = [row[GUARD:-GUARD].view(shape) for row in self._buffer]
        self.given = self.tensors if config.discrete else self.tensors[0]
        self.fill(poison)

    def fill(self, poison: float) -> None:
        """Overwrite every output element."""
        for tensor in self.tensors:
            tensor.fill_(poison)

    def stacked(self) -> Tensor:
        """(E, M, N) copy."""
        return self.tensors[0].clone() if self.given is self.tensors[0] else torch.stack(self.tensors)

    def guards_hold(self) -> bool:
        """Whether nothing was written outside the outputs."""
        return bool((self._buffer[:, :GUARD] == 7).all() and (self._buffer[:, -GUARD:] == 7).all())


def plan_of(
    variant: Variant, sizes: Sizes, operands: tuple[Tensor, Tensor] | None = None, scaling: tuple[str, int] = ("", 0)
) -> plan.Plan:
    """A plan that runs exactly this variant, fault builds included; scaling = (scale layout, block) of `operands`."""
    config = variant.config
    a_strides = (1, sizes.m) if config.a_major == "mn" else (sizes.tokens, 1)
    b_strides = (sizes.n, 1) if config.b_major == "mn" else (1, sizes.tokens)
    dtypes = DTYPES[config.dtype], DTYPES[config.dtype]
    if operands is not None:
        a_strides, b_strides = (tuple(operand.stride()) for operand in operands)
        dtypes = operands[0].dtype, operands[1].dtype
    problem = WgradProblem(
        m=sizes.m,
        n=sizes.n,
        tokens=sizes.tokens,
        experts=len(sizes.experts),
        a_dtype=dtypes[0],
        b_dtype=dtypes[1],
        out_dtype=DTYPES[config.out_dtype],
        a_strides=a_strides,
        b_strides=b_strides,
        operand_layout="ragged" if config.ragged else "2d",
        scale_layout=scaling[0],
        block=scaling[1],
        discrete=config.discrete,
        accumulate=config.accumulate,
        device_type="cuda",
    )
    return plan.Plan(problem, variant)


def launched(variant: Variant, sizes: Sizes, seed: int = 0) -> tuple[Tensor, Tensor, Outputs]:
    """Run a variant on random operands: (result, truth) as (E, M, N), and the outputs. Accumulates onto 0.5."""
    mat_a, mat_b, a, b = operands(variant.config, sizes, seed)
    start = 0.5 if variant.config.accumulate else float("nan")
    outputs = Outputs(variant.config, sizes, start)
    launch.run(plan_of(variant, sizes), outputs.given, mat_a, mat_b, offsets(sizes.experts))
    expected = truth(a, b, sizes.experts) + (start if variant.config.accumulate else 0.0)
    return outputs.stacked(), expected, outputs


def assert_each_expert_close(result: Tensor, expected: Tensor, out_dtype: str) -> None:
    """Every expert within the output's rounding of its own peak; empty experts exact."""
    assert result.shape == expected.shape
    for expert, (got, want) in enumerate(zip(result.double(), expected)):
        peak = want.abs().max()
        error = (got - want).abs().max()
        assert error <= BOUNDS[out_dtype] * peak, f"expert {expert}: error {error:.3e}, peak {peak:.3e}"
