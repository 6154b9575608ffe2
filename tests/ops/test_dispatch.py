"""What runs where, with a reason; explain and warmup; the cost of a call before any work is done."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import culax
from culax import dispatch
from culax.grouped_wgrad import checks as grouped_checks
from culax.kda import checks as kda_checks
from culax.runtime import arch, load
from tests.ops import cases

OPS = torch.ops.culax
CUDA = torch.device("cuda", 0)


def problem_on_cuda(problem: Any) -> Any:
    return dataclasses.replace(problem, device_type="cuda")


def kda_problem(**keywords: Any) -> Any:
    case = cases.kda(**{"tokens": 5, "dtype": torch.bfloat16, "sizes": (2, 2, 64, 64)} | keywords)
    arguments = (case.v, None, *case.arguments[:5], None, None, *case.arguments[5:])
    return problem_on_cuda(kda_checks.build("kda_bwd", arguments))


def wgrad_problem(dtype: torch.dtype = torch.bfloat16, m: int = 64) -> Any:
    arguments = (*cases.wgrad(m=m, n=64, dtype=dtype), None, None, None, None, "padded", "2d", None)
    return problem_on_cuda(grouped_checks.build_wgrad("grouped_wgrad", arguments))


def product_problem(dtype: torch.dtype = torch.bfloat16, k: int = 64, tokens: int = 70, experts: int = 4) -> Any:
    x, weight = torch.zeros(tokens, k, dtype=dtype), torch.zeros(experts, k, 64, dtype=dtype)
    return problem_on_cuda(grouped_checks.build_mm("grouped_mm", (x, weight, torch.zeros(experts).int())))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device of compute capability 9.0 with every kernel built, as far as dispatch can see."""
    monkeypatch.setattr(arch, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(load, "availability", lambda variant: load.Availability("built", ""))


@pytest.mark.parametrize(
    "make, backend, reason",
    [
        (lambda: kda_problem(dtype=torch.float32), "reference", "float32"),
        (lambda: kda_problem(sizes=(2, 2, 32, 64)), "reference", "32"),
        (lambda: wgrad_problem(), "cutedsl", "sm_90a"),
        (lambda: wgrad_problem(torch.float32), "reference", "float32"),
        (lambda: wgrad_problem(m=60), "reference", "60"),
        (lambda: product_problem(), "torch", "bfloat16"),
        (lambda: product_problem(torch.float16), "reference", "float16"),
        (lambda: product_problem(k=60), "reference", "16-byte"),
        (lambda: product_problem(tokens=0), "reference", "empty"),
        (lambda: product_problem(experts=1023), "torch", "bfloat16"),
        (lambda: product_problem(experts=1024), "reference", "fewer than 1024"),
    ],
    ids=[
        *("kda_fp32", "kda_k32", "wgrad", "wgrad_fp32", "wgrad_m60"),
        *("mm", "mm_fp16", "mm_k60", "mm_t0", "mm_e1023", "mm_e1024"),
    ],
)
def test_choice_on_hopper(make: Callable[[], Any], backend: str, reason: str, hopper: None) -> None:
    choice = dispatch.choose(make(), CUDA)
    assert choice.backend == backend and reason in choice.reason
    assert (choice.plan is not None) == (backend == "cutedsl") == (choice.built == "built")


def test_plans_with_several_kernels(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel that has to be compiled makes the whole plan `jit`; one that can't be had rules it out."""
    stages = SimpleNamespace(variants=(SimpleNamespace(name="prep"), SimpleNamespace(name="scan")))
    monkeypatch.setattr("culax.kda.plan.plan", lambda problem, architecture: stages)
    how = {"prep": "built", "scan": "jit"}
    monkeypatch.setattr(load, "availability", lambda variant: load.Availability(how[variant.name], "no compiler"))
    choice = dispatch.choose(kda_problem(), CUDA)
    assert (choice.backend, choice.plan, choice.built) == ("cutedsl", stages, "jit")
    how["scan"] = None  # type: ignore[assignment]
    choice = dispatch.choose(kda_problem(), CUDA)
    assert (choice.backend, choice.reason) == ("reference", "no compiler")


@pytest.mark.parametrize("make", [kda_problem, wgrad_problem, product_problem], ids=["kda", "wgrad", "mm"])
def test_other_capabilities(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arch, "arch_of", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    choice = dispatch.choose(make(), CUDA)
    assert choice.backend == "reference" and "8.6" in choice.reason


@pytest.mark.parametrize("stride", [64, 65, 1, 0])
def test_torch_product_of_one_row(stride: int, hopper: None) -> None:
    """A size-1 dimension may come with any stride; torch's kernel refuses some of them."""
    x = torch.zeros(100, dtype=torch.bfloat16).as_strided((1, 64), (stride, 1))
    problem = grouped_checks.build_mm("grouped_mm", (x, cases.normal(2, 1, 64, 64).bfloat16(), torch.ones(1).int()))
    assert dispatch.choose(problem_on_cuda(problem), CUDA).backend == ("torch" if stride == 64 else "reference")


def test_torch_product_takes_rows_not_columns(hopper: None) -> None:
    """With x column-major torch's kernel asserts, on the device, that groups are multiples of 8 rows."""
    x, weight, offs = cases.normal(1, 64, 32).bfloat16(), cases.normal(2, 2, 64, 16).bfloat16(), torch.ones(2).int()
    for rows, w, backend in (
        (x.t(), weight, "reference"),
        (x.t().contiguous(), weight, "torch"),
        (x.t().contiguous(), weight.transpose(1, 2).contiguous().transpose(1, 2), "torch"),
        (x.t().contiguous(), torch.zeros(4000).bfloat16().as_strided((2, 64, 16), (1028, 16, 1)), "reference"),
        (x.t().contiguous(), torch.zeros(4000).bfloat16().as_strided((2, 64, 16), (1032, 16, 1)), "torch"),
    ):
        problem = grouped_checks.build_mm("grouped_mm", (rows, w, offs))
        assert dispatch.choose(problem_on_cuda(problem), CUDA).backend == backend


@pytest.mark.parametrize("tokens", [1, 70])
def test_torch_product_is_contiguous(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch pads the rows of its output to 16 bytes, where the fake promises contiguous ones."""
    x, weight = cases.normal(1, tokens, 16).bfloat16(), cases.normal(2, 2, 12, 16).bfloat16().transpose(1, 2)
    offs = torch.tensor([1, tokens - tokens // 8], dtype=torch.int32)
    expected = OPS.grouped_mm(x, weight, offs)
    product = torch.nn.functional.grouped_mm

    def padded(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        rows = x.new_full((x.shape[0], 16), float("nan"))[:, :12]
        return rows.copy_(product(x, weight, offs=offs))

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", padded)
    monkeypatch.setattr(dispatch, "choose", lambda *_: dispatch.Choice("torch", ""))
    monkeypatch.setattr(dispatch, "_prepared", {})
    found = OPS.grouped_mm(x, weight, offs)
    assert found.stride() == expected.stride() == (12, 1)
    torch.testing.assert_close(found, expected)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_prepared", {})
    monkeypatch.setattr(dispatch, "REMEMBERED", 3)
    mat_a, mat_b, offs = cases.wgrad()
    for end in range(1, 9):
        OPS.grouped_wgrad(mat_a[:, :70], mat_b[:70], offs[:1].clamp(max=end).expand(end).contiguous())
        assert 1 <= len(dispatch._prepared) <= 3


def test_missing_kernels_fall_back(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "availability", lambda variant: load.Availability(None, "neither built nor compilable"))
    choice = dispatch.choose(wgrad_problem(), CUDA)
    assert (choice.backend, choice.reason) == ("reference", "neither built nor compilable")


def test_explain_on_the_cpu() -> None:
    case, (mat_a, mat_b, offs) = cases.kda(tokens=5), cases.wgrad()
    for op in ("kda_fwd", "culax::kda_fwd", OPS.kda_fwd, OPS.kda_fwd.default):
        found = culax.explain(op, *case.arguments[:5])
        assert (found.op, found.backend, found.variant, found.built) == ("kda_fwd", "reference", "", "")
    text = "culax::grouped_wgrad_out -> reference: tensors on cpu take the torch path; kernels need a CUDA device"
    assert str(culax.explain(OPS.grouped_wgrad_out, torch.zeros(4, 6, 5), mat_a, mat_b, offs, accumulate=True)) == text
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.backend = "cutedsl"  # type: ignore[misc]


def test_explain_names_kernels(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    metas = [tensor.to("meta") for tensor in cases.wgrad(m=64, n=64, dtype=torch.bfloat16)]
    found = culax.explain("grouped_wgrad", *metas)
    assert (found.backend, found.built) == ("cutedsl", "built")
    assert f"[{found.variant}; built]" in str(found) and found.variant


def test_warmup_of_the_reference_does_nothing() -> None:
    mat_a, mat_b, offs = cases.wgrad()
    assert culax.warmup(OPS.grouped_wgrad, mat_a, mat_b, offs) == culax.explain("grouped_wgrad", mat_a, mat_b, offs)
    metas = [tensor.to("meta") for tensor in (mat_a, mat_b, offs)]
    assert culax.warmup("grouped_wgrad", *metas).backend == "reference"


def seconds_a_call(call: Callable[[], Any]) -> float:
    """CPU seconds, the best of 30 runs."""
    best = float("inf")
    for _ in range(30):
        start = time.process_time()
        for _ in range(100):
            call()
        best = min(best, (time.process_time() - start) / 100)
    return best


def seconds_of_a_bare_op() -> float:
    """The yardstick of this machine: an op of 12 arguments whose Python implementation does nothing."""
    arguments = [torch.zeros(()) for _ in range(12)]
    with torch.library._scoped_library("culax_yardstick", "DEF") as library:
        library.define(f"bare({', '.join(f'Tensor x{i}' for i in range(12))}) -> Tensor")
        library.impl("bare", lambda *tensors: torch.empty_like(tensors[0]), "CPU")
        return seconds_a_call(lambda: torch.ops.culax_yardstick.bare(*arguments))


def overhead(name: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds of one eager call without grads beyond the reference's own work, which is stubbed out."""
    import culax.grouped_wgrad.api as grouped_api
    import culax.kda.api as kda_api

    mat_a, mat_b, offs = cases.wgrad()
    case = cases.kda(tokens=70, dtype=torch.float32)
    o, final_state, Aqk, Akk = case.forward()
    arguments = (o, final_state, *case.arguments[:5], Aqk, Akk, *case.arguments[5:])
    gradients, product = OPS.kda_bwd(*arguments), OPS.grouped_wgrad(mat_a, mat_b, offs)
    monkeypatch.setattr(grouped_api.reference, "grouped_wgrad", lambda *_: product)
    monkeypatch.setattr(kda_api.kda_chunked, "backward", lambda *_: gradients)
    with torch.no_grad():
        if name == "kda_bwd":
            return seconds_a_call(lambda: OPS.kda_bwd(*arguments))
        return seconds_a_call(lambda: OPS.grouped_wgrad(mat_a, mat_b, offs))


@pytest.mark.parametrize("name", ["grouped_wgrad", "kda_bwd"])
def test_overhead_of_a_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard against checks that grow: CPU time in units of a bare op, whatever the machine and its load."""
    assert overhead(name, monkeypatch) < 12 * seconds_of_a_bare_op()
