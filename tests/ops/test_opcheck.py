"""torch.library.opcheck of every op over dtypes, requires_grad, optional arguments, empty and singleton sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

from tests.ops import cases

OPS = torch.ops.culax
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPE_IDS = ["fp64", "fp32", "bf16", "fp16"]
TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")

KDA_CASES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "no_state": {"state": False},
    "varlen_int32": {"lengths": (1, 0, 40, 20)},
    "batch": {"batch": 2, "tokens": 3},
    "no_tokens": {"tokens": 0},
    "no_batch": {"batch": 0},
    "one_token": {"tokens": 1},
    "ones": {"tokens": 1, "sizes": (1, 1, 1, 1)},
    "no_sequences": {"tokens": 5, "lengths": ()},
}


def run(op: Any, arguments: tuple, keywords: dict[str, Any] | None = None, aot: bool = True) -> None:
    """All of opcheck's tests; without ``aot``, all but the slow one that traces with dynamic shapes."""
    tests = (*TESTS, "test_aot_dispatch_dynamic") if aot else TESTS
    results = opcheck(op, arguments, keywords or {}, test_utils=tests, atol=0, rtol=0)
    assert results == dict.fromkeys(tests, "SUCCESS"), results


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("name", KDA_CASES)
def test_kda_optional_arguments_and_sizes(name: str, requires_grad: bool) -> None:
    case = cases.kda(**{"tokens": 66, "dtype": torch.float32} | KDA_CASES[name])
    case = case.requiring() if requires_grad else case
    for final in (True, False):
        run(OPS.kda_fwd.default, (*case.arguments, final), aot=requires_grad and final)
    with torch.no_grad():
        o, final_state, Aqk, Akk = case.forward()
    *tensors, initial_state, cu_seqlens, scale = case.arguments
    do = torch.ones_like(o).requires_grad_(requires_grad)
    for gradients, scores in [
        ((do, None), (Aqk, Akk)),
        ((None, final_state), (None, None)),
        ((None, None), (Aqk, Akk)),
    ]:
        arguments = (*gradients, *tensors, *scores, initial_state, cu_seqlens, scale)
        run(OPS.kda_bwd.default, arguments, aot=requires_grad and gradients[0] is not None)


@pytest.mark.parametrize("gate_dtype", [None, torch.float32], ids=["gates_as_q", "gates_fp32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_kda_dtypes(dtype: torch.dtype, gate_dtype: torch.dtype | None) -> None:
    case = cases.kda(tokens=9, dtype=dtype, gate_dtype=gate_dtype).requiring()
    run(OPS.kda_fwd.default, (*case.arguments, True), aot=False)
    o, final_state, Aqk, Akk = (tensor.detach() for tensor in case.forward())
    *tensors, initial_state, cu_seqlens, scale = case.arguments
    arguments = (o, final_state, *tensors, Aqk, Akk, initial_state, cu_seqlens, scale)
    run(OPS.kda_bwd.default, arguments, aot=dtype is torch.bfloat16)


@pytest.mark.parametrize("name", ["fixed", "no_state", "varlen_int32", "no_tokens"])
def test_kda_double_backward(name: str) -> None:
    case = cases.kda(**{"tokens": 66} | KDA_CASES[name])
    gradients = [torch.ones_like(tensor) for tensor in case.differentiable] + (
        [] if case.initial_state is not None else [None]
    )
    do = torch.ones_like(case.v)
    for given in (gradients, [None, *gradients[1:]], [None] * 6):
        run(OPS._kda_bwd_bwd.default, (*given, do, None, *case.arguments), aot=given is gradients)


GROUPS = {
    "ragged_sizes": ((3, 0, 66, 1), {}),
    "no_experts": ((), {}),
    "all_empty": ((0, 0), {}),
    "no_tokens": ((0, 0), {"tail": 0}),
    "no_rows": ((3, 2), {"m": 0}),
    "ones": ((1,), {"m": 1, "n": 1, "tail": 0}),
}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("name", GROUPS)
def test_grouped_sizes(name: str, requires_grad: bool) -> None:
    sizes, keywords = GROUPS[name]
    mat_a, mat_b, offs = cases.wgrad(sizes, **keywords)
    weight = cases.normal(9, len(sizes), mat_b.shape[1], 3)
    inputs = [tensor.detach().requires_grad_(requires_grad) for tensor in (mat_a, mat_b, weight)]
    run(OPS.grouped_wgrad.default, (inputs[0], inputs[1], offs), aot=requires_grad)
    run(OPS.grouped_mm.default, (inputs[1], inputs[2], offs), aot=requires_grad)


@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("name", GROUPS)
def test_mutating_sizes(name: str, accumulate: bool) -> None:
    sizes, keywords = GROUPS[name]
    mat_a, mat_b, offs = cases.wgrad(sizes, **keywords)
    out = torch.zeros(len(sizes), mat_a.shape[0], mat_b.shape[1])
    for op, outs in ((OPS.grouped_wgrad_out, out), (OPS.grouped_wgrad_out_list, list(out.clone()))):
        run(op.default, (outs, mat_a, mat_b, offs), {"accumulate": accumulate}, aot=accumulate)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_grouped_dtypes(dtype: torch.dtype) -> None:
    mat_a, mat_b, offs = cases.wgrad(dtype=dtype)
    inputs = [tensor.detach().requires_grad_() for tensor in (mat_a, mat_b)]
    outputs = [torch.float64] if dtype is torch.float64 else [torch.float32, torch.bfloat16, torch.float16]
    for out_dtype in (None, *outputs):
        run(
            OPS.grouped_wgrad.default,
            (*inputs, offs),
            {"out_dtype": out_dtype},
            aot=dtype is torch.bfloat16 and out_dtype is None,
        )
    run(
        OPS.grouped_mm.default,
        (inputs[1], cases.normal(9, 4, 5, 3, dtype=dtype).requires_grad_(), offs.long()),
        aot=False,
    )


@pytest.mark.parametrize("operand_layout", ["2d", "ragged"])
@pytest.mark.parametrize("scale_layout", ["padded", "concatenated"])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "nvfp4"])
def test_block_scaled(kind: str, scale_layout: str, operand_layout: str) -> None:
    keywords = cases.scaled_wgrad(kind, scale_layout, operand_layout)
    arguments = tuple(keywords.pop(name) for name in ("mat_a", "mat_b", "offs"))
    # opcheck's other tests copy and compare inputs, which torch can't do for these dtypes on the CPU.
    for test in ("test_autograd_registration", "test_faketensor"):
        assert opcheck(OPS.grouped_wgrad.default, arguments, keywords, test_utils=test) == {test: "SUCCESS"}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
def test_main_grad(requires_grad: bool) -> None:
    mat_a, mat_b, offs = cases.wgrad()
    x, weight = mat_b.requires_grad_(requires_grad), cases.normal(9, 4, 5, 3)
    main_grad = torch.zeros(4, 5, 3)
    run(OPS._grouped_mm_main_grad.default, (x, weight, offs, main_grad))
    with torch.no_grad():
        y = OPS.grouped_mm(x, weight, offs)
    run(OPS._grouped_wgrad_main_grad.default, (main_grad, x.detach(), y, offs))
