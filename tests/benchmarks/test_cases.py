"""Benchmark cases: costs against the published floors, inputs, and a gate that can fail."""

import pytest
import torch

from benchmarks import registry, roofline, verify
from benchmarks.case import Cost
from benchmarks.kda import KdaCase
from benchmarks.roofline import Ceilings
from benchmarks.wgrad import WgradCase, token_counts
from benchmarks.wgrad_scaled import ScaledWgradCase

H200 = Ceilings("H200", 4.23e12, 789e12, "known")
# Floors in ms of the seven shapes on that card, from the table that the shapes come from.
FLOORS = (0.969, 0.970, 2.753, 0.390, 0.343, 0.516, 0.139)

KDA = KdaCase("kda", 1, 70, 2, 16, 16, dtype=torch.float32, device="cpu", forward_too=True)
KDA_BWD = KdaCase("kda_bwd", 1, 90, 2, 16, 16, sequences=3, dtype=torch.float32, device="cpu")
WGRAD = WgradCase("wgrad", 4, 24, 40, 32, dtype=torch.float32, device="cpu")
K_MAJOR = WgradCase("k_major", 4, 24, 40, 32, dtype=torch.float32, device="cpu", k_major=True, multiple=1)
MXFP8 = ScaledWgradCase("mxfp8", "mxfp8", 3, 136, 72, 64, device="cpu")
NVFP4 = ScaledWgradCase("nvfp4", "nvfp4", 3, 136, 72, 64, device="cpu")


@pytest.mark.parametrize(("shape", "floor"), list(zip(registry.WGRAD_SHAPES, FLOORS)), ids=str)
def test_wgrad_cost_gives_the_published_floor(shape, floor):
    e, m, n, k = shape
    got = roofline.floor_ms(WgradCase("x", e, m, n, k).cost(), H200)
    assert got == pytest.approx(floor, rel=4e-3)


def test_kda_cost_matches_the_plan():
    """About 137 GFLOP and 1.6 GB at B1 T8192 H32 K=V=128: inputs, outputs and tapes, each once."""
    cost = KdaCase("x", 1, 8192, 32).cost()
    assert cost.flops == pytest.approx(137e9, rel=0.15)
    assert cost.bytes == pytest.approx(1.6e9, rel=0.05)


def test_token_counts_are_seeded_multiples_of_16():
    counts = token_counts(32, 1024)
    assert counts == token_counts(32, 1024)
    assert len(set(counts)) > 16 and all(c % 16 == 0 and 0.3 * 1024 - 16 <= c <= 1.7 * 1024 for c in counts)


def test_names_are_unique_and_selectable():
    names = [case.name for case in registry.cases()]
    assert len(names) == len(set(names))
    chosen = [case.name for case in registry.select(["wgrad_bf16*"], "cuda")]
    assert chosen == [name for name in names if name.startswith("wgrad_bf16")] and len(chosen) == 7
    assert {c.device for c in registry.select([], "cpu")} == {"cpu"}
    with pytest.raises(ValueError, match="no case matches 'nothing'"):
        registry.select(["nothing"], "cpu")


def test_share_is_the_tighter_ceiling():
    machine = Ceilings("m", bytes_per_s=1e9, flops_per_s=1e10, source="given")
    assert roofline.floor_ms(Cost(1e7, 1e3), machine) == pytest.approx(1.0)
    assert roofline.floor_ms(Cost(1e3, 2e6), machine) == pytest.approx(2.0)
    assert roofline.share(4.0, Cost(1e3, 2e6), machine) == pytest.approx(0.5)


@pytest.mark.parametrize("case", [KDA, KDA_BWD, WGRAD, K_MAJOR, MXFP8, NVFP4], ids=lambda case: case.name)
def test_every_implementation_passes_the_gate(case):
    inputs = case.make_inputs(0)
    truth = case.truth(inputs)
    for name, implementation in case.implementations().items():
        if callable(implementation):
            gate = verify.verify(case, implementation, inputs, truth)
            assert gate.ok, f"{name}: {gate}"


@pytest.mark.parametrize("case", [KDA, KDA_BWD, WGRAD, K_MAJOR, MXFP8, NVFP4], ids=lambda case: case.name)
def test_gate_catches_one_wrong_group(case):
    """One chunk of one head, or one expert, off by a tenth: a norm over everything would not see it."""
    inputs = case.make_inputs(0)
    truth = case.truth(inputs)
    outputs = {name: x.float() for name, x in truth.items()}
    assert case.gate(outputs, truth).ok
    for name in truth:
        planted = outputs[name].clone()
        part = planted[-1:] if name in ("dw", "dinitial_state") else planted[:, -8:, -1:]
        part *= 1.1
        gate = case.gate(outputs | {name: planted}, truth)
        assert not gate.ok and gate.worst.startswith(f"{name}[")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gate_catches_a_value_that_is_not_finite(value):
    truth = {"dw": torch.ones(2, 3, 3, dtype=torch.float64)}
    wrong = truth["dw"].float()
    wrong[1, 2, 2] = value
    gate = verify.worst({"dw": wrong}, truth, {"dw": (0,)}, 1e-3)
    assert not gate.ok and gate.error == float("inf") and gate.worst == "dw[1]"


def test_gate_demands_exact_zeros():
    truth = {"dw": torch.zeros(2, 3, 3, dtype=torch.float64)}
    assert verify.worst({"dw": torch.zeros(2, 3, 3)}, truth, {"dw": (0,)}, 1e-3).ok
    assert not verify.worst({"dw": torch.full((2, 3, 3), 1e-30)}, truth, {"dw": (0,)}, 1e-3).ok


def test_k_major_operands_have_unaligned_groups_in_aligned_rows():
    inputs = K_MAJOR.make_inputs(0)
    assert any(end % 8 for end in inputs["offs"].tolist()) and inputs["mat_a"].shape[1] % 8 == 0
    assert inputs["mat_a"].stride(1) == inputs["mat_b"].stride(0) == 1
