"""The scans' rings: poisoned stages change no bit, and what a release that comes too early does is recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from culax.kda import launch, plan
from culax.runtime import load
from tests.gpu import kda_stages
from tests.gpu.kda_problems import DEVICE, Case, call, poisoned, poisoned_tapes

FAULTS = {variant.name: variant for variant in plan.fault_variants("sm_90a")}
CASES = {
    f"k{key_dim}_{gate}": Case(1, 4090, 2, 2, key_dim, gate=gate)
    for key_dim in (64, 128)
    for gate in ("mild", "sigmoid")
}
RUNS = 10


def scanned(case: Case, inputs: launch.Inputs, scale: float, build: str = "") -> list[Tensor]:
    """h, v_new, the final states, dh, dvn and dh0 of a call, by the shipped scans or by another build of them."""
    ready = case.kernels()
    if build:
        ready = replace(ready, scans=load.get(FAULTS[f"kda_scans_k{case.key_dim}_v128_{build}_sm90a"]))
    tapes = poisoned_tapes(inputs)
    final, dh0 = (poisoned(tuple(inputs.initial.shape), torch.float32) for _ in range(2))
    kda_stages.build_table(ready, inputs, tapes)
    kda_stages.prep(ready, inputs, tapes, scale)
    kda_stages.scans(ready, inputs, tapes, (final, dh0))
    return [tapes.h, tapes.v_new, final, tapes.dh, tapes.dvn, dh0]


def bits(tensor: Tensor) -> Tensor:
    """The tensor as integers, so that NaN equals itself."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@pytest.fixture(scope="module", params=CASES)
def problem(request: pytest.FixtureRequest) -> tuple[Case, launch.Inputs, float, list[Tensor]]:
    case = CASES[request.param]
    inputs, scale = launch.collect(tuple(call(case, device=DEVICE)))
    expected = scanned(case, inputs, scale)
    assert all(torch.isfinite(x).all() for x in expected)
    return case, inputs, scale, expected


def test_poisoned_stages_change_no_bit(problem: tuple[Case, launch.Inputs, float, list[Tensor]]) -> None:
    case, inputs, scale, expected = problem
    for _ in range(RUNS):
        for got, want in zip(scanned(case, inputs, scale, "poison"), expected):
            assert torch.equal(bits(got), bits(want))


def test_a_weak_release_under_poison(problem: tuple[Case, launch.Inputs, float, list[Tensor]], record_property) -> None:
    """The outcome depends on timing and is recorded; tests/ptx reports these builds every time."""
    case, inputs, scale, expected = problem
    same = [0, 0]
    for _ in range(RUNS):
        equal = [
            torch.equal(bits(x), bits(y)) for x, y in zip(scanned(case, inputs, scale, "weak_release_poison"), expected)
        ]
        same = [same[0] + all(equal[:3]), same[1] + all(equal[3:])]
    record_property("bit_identical_runs", same)
    outcome = f"unchanged runs of {RUNS}: scan {same[0]}, reverse scan {same[1]}"
    print(f"weak release under poison, K = {case.key_dim}, {case.gate} gates: {outcome}")
