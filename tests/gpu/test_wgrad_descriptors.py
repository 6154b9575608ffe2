"""Descriptors written on the device: two calls of one signature in one graph must not see each other's.

Without the tensormap acquire, eager launches are right and graph replays are wrong, every time, on an H200: so the
builds without it must fail this very test, or it would prove nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from culax.grouped_wgrad import launch, plan
from culax.reference.block_scaled import Scales
from culax.runtime.variants import Variant
from tests import quantize
from tests.gpu.graphs import capture
from tests.gpu.wgrad_problems import DEVICE, DTYPES, VARIANTS, Outputs, Sizes, arranged, offsets, plan_of

M, N, REPLAYS = 2048, 2304, 8
"""A group has 72 tiles of the largest kind (256 x 256, a pair of CTAs), more than there are pairs: so every
multiprocessor has one of every group in either call, wherever a launch puts its CTAs, and holds what is stale."""
CALLS = (((128, 128, 0, 256), 1.0, 0.5), ((256, 0, 128, 128), 2.0, 1.5))
CASES = [
    f"wgrad_bf16_{out}_{layout}{discrete}{add}_sm90"
    for layout in ("mn_mn", "k_k", "ragged")
    for discrete in ("", "_list")
    for out, add in (("bf16", ""), ("fp32", ""), ("fp32", "_add"))
]
SCALED = [
    f"wgrad_mx_e4m3_e4m3_{out}_{layout}{discrete}{add}_sm90"
    for layout in ("2d", "ragged")
    for discrete in ("", "_list")
    for out, add in (("bf16", ""), ("fp32", "_add"))
]
FAULTS = [variant.name for variant in plan.fault_variants("sm_90a") if variant.config.fault.startswith("no_acquire")]


class Call:
    """One call with constant operands, so that each result is exact: k_e * a * b (+ what was there)."""

    def __init__(self, variant: Variant, experts: tuple[int, ...], a: float, b: float) -> None:
        sizes, config = Sizes(M, N, experts), variant.config
        dtype = DTYPES[config.dtype]
        rows = torch.full((sizes.tokens, M), a, dtype=dtype, device=DEVICE)
        columns = torch.full((sizes.tokens, N), b, dtype=dtype, device=DEVICE)
        self.mat_a = arranged(rows, config.a_major, config, sizes)
        self.mat_b = arranged(columns, config.b_major, config, sizes).t()
        self.offs, self.plan = offsets(experts), plan_of(variant, sizes)
        self.poison = 3.0 if config.accumulate else float("nan")
        self.outputs = Outputs(config, sizes, self.poison)
        sums = torch.tensor(experts, device=DEVICE) * (a * b) + (self.poison if config.accumulate else 0.0)
        self.expected = sums[:, None, None]

    def __call__(self) -> None:
        launch.run(self.plan, self.outputs.given, self.mat_a, self.mat_b, self.offs)

    def wrong(self) -> Tensor:
        """Number of elements that differ from the exact result."""
        return (self.outputs.stacked().double() != self.expected).sum()


class ScaledCall(Call):
    """The same with fp8 operands and one scale for each: k_e * a * b * 2^x * 2^y (+ what was there). Pads are NaN."""

    def __init__(self, variant: Variant, experts: tuple[int, ...], a: float, b: float) -> None:
        sizes, config = Sizes(M, N, experts), variant.config
        sides = []
        for rows, value, exponent in ((M, a, int(2 * a)), (N, b, -int(2 * b))):
            codes = torch.full((rows, sizes.tokens), value).to(torch.float8_e4m3fn).view(torch.uint8)
            blocks = [torch.full((rows, -(-k // 32)), 127 + exponent, dtype=torch.uint8) for k in experts]
            scale = torch.cat([quantize.swizzle(block, 0xFF) for block in blocks]).view(
                quantize.round_up(rows, 128), -1
            )
            sides.append((codes.to(DEVICE).view(torch.float8_e4m3fn), scale.to(DEVICE).view(torch.float8_e8m0fnu)))
        (self.mat_a, scale_a), (columns, scale_b) = sides
        self.mat_b, self.offs = columns.t(), offsets(experts)
        self.scales = Scales(scale_a, scale_b, None, None, "padded")
        self.plan = plan_of(variant, sizes, (self.mat_a, self.mat_b), ("padded", 32))
        self.poison = 3.0 if config.accumulate else float("nan")
        self.outputs = Outputs(config, sizes, self.poison)
        product = a * b * 2.0 ** (int(2 * a) - int(2 * b))
        sums = torch.tensor(experts, device=DEVICE) * product + (self.poison if config.accumulate else 0.0)
        self.expected = sums[:, None, None]

    def __call__(self) -> None:
        launch.run(self.plan, self.outputs.given, self.mat_a, self.mat_b, self.offs, self.scales)


def wrong_elements(name: str) -> tuple[list[int], list[int]]:
    """Wrong elements of both calls: after each of 3 eager rounds, and after each replay of one graph of both."""
    kind = ScaledCall if "_mx_" in name else Call
    calls = [kind(VARIANTS[name], *description) for description in CALLS]

    def poison() -> None:
        for call in calls:
            call.outputs.fill(call.poison)
        torch.cuda.synchronize()

    def count() -> int:
        torch.cuda.synchronize()
        return int(sum(call.wrong() for call in calls))

    eager, replayed = [], []
    for _ in range(3):
        poison()
        for call in calls:
            call()
        eager.append(count())
    graph, _ = capture(lambda: [call() for call in calls], warm=False)
    for _ in range(REPLAYS):
        poison()
        graph.replay()
        replayed.append(count())
    return eager, replayed


@pytest.mark.parametrize("name", CASES + SCALED)
def test_two_calls_in_one_graph_are_exact(name: str) -> None:
    assert wrong_elements(name) == ([0] * 3, [0] * REPLAYS)


@pytest.mark.parametrize("name", FAULTS)
def test_without_the_acquire_replays_are_wrong(name: str) -> None:
    _, replayed = wrong_elements(name)
    assert all(count > 0 for count in replayed), replayed
