"""The GPU forms of the op tests: opcheck, fakes, gradients, bad input, autocast, repeats, poisoned memory, compile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import culax
from tests.gpu import ops_cases
from tests.ops import cases

OPS = torch.ops.culax
TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
NAMES = list(ops_cases.calls()) if torch.cuda.is_available() else ["every_op"]


@pytest.fixture(scope="module")
def calls() -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    return ops_cases.calls()


def check(op: Any, arguments: tuple, **keywords: Any) -> None:
    results = opcheck(op, arguments, keywords, test_utils=TESTS, rtol=0, atol=0)
    assert results == dict.fromkeys(TESTS, "SUCCESS"), results


@pytest.mark.parametrize("path", ["kernel", "torch"])
@pytest.mark.parametrize("lengths", [None, (1, 0, 64)], ids=["fixed", "packed"])
def test_opcheck_kda(path: str, lengths: tuple[int, ...] | None) -> None:
    make = ops_cases.kernel_kda if path == "kernel" else ops_cases.torch_kda
    case = make(tokens=70, lengths=lengths).requiring()
    check(OPS.kda_fwd.default, (*case.arguments, True))
    o, final_state, Aqk, Akk = (tensor.detach() for tensor in case.forward())
    *tensors, initial_state, cu_seqlens, scale = case.arguments
    check(OPS.kda_bwd.default, (o, None, *tensors, Aqk, Akk, initial_state, cu_seqlens, scale))


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    case = ops_cases.kernel_kda(tokens=tokens).requiring()
    gradients = torch.autograd.grad(ops_cases.kda_loss(case), case.differentiable, materialize_grads=True)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("path", ["kernel", "torch"])
def test_opcheck_grouped(path: str) -> None:
    mat_a, mat_b, offs = ops_cases.kernel_wgrad() if path == "kernel" else cases.wgrad(device="cuda")
    weight = cases.normal(9, 4, mat_b.shape[1], 64, dtype=mat_b.dtype, device="cuda")
    a, b = (tensor.detach().requires_grad_() for tensor in (mat_a, mat_b))
    check(OPS.grouped_wgrad.default, (a, b, offs))
    check(OPS.grouped_mm.default, (b, weight.requires_grad_(), offs))
    out = torch.zeros(4, mat_a.shape[0], mat_b.shape[1], device="cuda")
    check(OPS.grouped_wgrad_out.default, (out, mat_a, mat_b, offs), accumulate=True)
    check(OPS.grouped_wgrad_out_list.default, (list(out.clone()), mat_a, mat_b, offs))


@pytest.mark.parametrize("heads", [2, 4], ids=["plain", "grouped_value"])
@pytest.mark.parametrize("lengths", [None, (1, 0, 64, 130)], ids=["fixed", "packed"])
def test_gradients_against_fp64(heads: int, lengths: tuple[int, ...] | None) -> None:
    case = ops_cases.kernel_kda(lengths=lengths, heads=heads).requiring()
    truth = ops_cases.double(case).requiring()
    ours = torch.autograd.grad(ops_cases.kda_loss(case), case.differentiable)
    true = torch.autograd.grad(ops_cases.kda_loss(truth), truth.differentiable)
    errors = {name: ops_cases.relative(a, b) for name, a, b in zip(cases.KDA_INPUTS, ours, true)}
    assert max(errors.values()) < 2e-2, errors


def test_fp64_gradcheck() -> None:
    case = cases.kda(tokens=3, sizes=(1, 2, 2, 3), device="cuda").requiring()
    assert torch.autograd.gradcheck(
        lambda *inputs: OPS.kda_fwd(*inputs, None, 0.5, True)[:2], case.differentiable, nondet_tol=0.0
    )
    a, b = (cases.normal(s, 6, n, dtype=torch.float64, device="cuda").requires_grad_() for s, n in ((1, 3), (2, 2)))
    offs = torch.tensor([2, 2, 5], device="cuda")
    assert torch.autograd.gradcheck(lambda a, b: OPS.grouped_wgrad(a.t(), b, offs), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: OPS.grouped_wgrad(a.t(), b, offs), (a, b))


@pytest.mark.parametrize("name", NAMES)
def test_repeats_are_bitwise_equal(name: str, calls: dict) -> None:
    first = calls[name]()
    for _ in range(19):
        assert all(map(torch.equal, calls[name](), first))


@pytest.mark.parametrize("name", NAMES)
def test_scratch_memory_is_written_before_it_is_read(name: str, calls: dict, poisoned_memory: None) -> None:
    outputs = calls[name]()
    assert all(output.isfinite().all() for output in outputs)


def test_device_offsets_are_clamped() -> None:
    """Offsets that descend or pass T are clamped to [previous, T], as there is no reading them on the host."""
    mat_a, mat_b, _ = ops_cases.kernel_wgrad((100, 100), tail=0)
    weight = cases.normal(9, 4, 72, 64, dtype=torch.bfloat16, device="cuda")
    bad = torch.tensor([50, 30, 1000, 120], dtype=torch.int32, device="cuda")
    good = torch.tensor([50, 50, 200, 200], dtype=torch.int32, device="cuda")
    assert torch.equal(OPS.grouped_wgrad(mat_a, mat_b, bad), OPS.grouped_wgrad(mat_a, mat_b, good))
    assert torch.equal(OPS.grouped_mm(mat_b, weight, bad), OPS.grouped_mm(mat_b, weight, good))


def test_rows_past_the_last_expert() -> None:
    mat_a, mat_b, offs = ops_cases.kernel_wgrad(tail=40)
    weight = cases.normal(9, 4, 72, 64, dtype=torch.bfloat16, device="cuda")
    gradient, product = OPS.grouped_wgrad(mat_a, mat_b, offs), OPS.grouped_mm(mat_b, weight, offs)
    mat_a[:, -40:] = float("nan")
    mat_b[-40:] = float("nan")
    assert torch.equal(OPS.grouped_wgrad(mat_a, mat_b, offs), gradient)
    again = OPS.grouped_mm(mat_b, weight, offs)
    assert torch.equal(again, product) and not again[-40:].any()


@pytest.mark.parametrize("operand", ["mat_a", "mat_b"])
def test_operand_is_output(operand: str) -> None:
    buffer = cases.normal(1, 2 * 64 * 64, device="cuda")
    out, view = buffer.view(2, 64, 64), buffer[64 * 32 :][: 64 * 64].view(64, 64)
    other = cases.normal(2, 64, 64, device="cuda")
    offs = torch.tensor([20, 60], dtype=torch.int32, device="cuda")
    mat_a, mat_b = (view, other) if operand == "mat_a" else (other, view)
    wanted = OPS.grouped_wgrad(mat_a, mat_b, offs)
    OPS.grouped_wgrad_out(out, mat_a, mat_b, offs)
    assert torch.equal(out, wanted)


def test_device_mix_raises() -> None:
    case, host = ops_cases.kernel_kda(tokens=5), ops_cases.kernel_kda(tokens=5).k.cpu()
    with pytest.raises(ValueError, match="kda_fwd: argument `k`: expected device cuda:0"):
        OPS.kda_fwd(case.q, host, *case.arguments[2:], True)
    mat_a, mat_b, offs = ops_cases.kernel_wgrad()
    with pytest.raises(ValueError, match="grouped_wgrad: argument `offs`: expected device cuda:0"):
        OPS.grouped_wgrad(mat_a, mat_b, offs.cpu())


def test_autocast() -> None:
    case = cases.kda(tokens=70, dtype=torch.float32, sizes=(2, 2, 64, 64), device="cuda").requiring()
    mat_a, mat_b, offs = cases.wgrad(device="cuda")
    plain = OPS.grouped_wgrad(mat_a, mat_b, offs)
    with torch.autocast("cuda", torch.bfloat16):
        o, final_state, _, _ = case.forward()
        assert torch.equal(OPS.grouped_wgrad(mat_a, mat_b, offs), plain)
    assert (o.dtype, final_state.dtype) == (torch.bfloat16, torch.float32)
    assert all(g.dtype is torch.float32 for g in torch.autograd.grad(o.float().sum(), case.differentiable))


def test_one_graph_for_all_sizes() -> None:
    torch._dynamo.reset()

    def loss_of(*inputs: Tensor) -> Tensor:
        return OPS.kda_fwd(*inputs, None, 0.5, True)[0].float().sin().sum()

    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True)
    for index, tokens in enumerate((70, 200, 129)):
        leaves = ops_cases.kernel_kda(tokens, batch=3).requiring().differentiable
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            ours = torch.autograd.grad(compiled(*leaves), leaves)
        for gradient, wanted in zip(ours, torch.autograd.grad(loss_of(*leaves), leaves)):
            assert ops_cases.relative(gradient, wanted) < 1e-2


@pytest.mark.parametrize("form", ["columns", "padded"])
def test_products_that_torch_does_not_take_as_they_are(form: str) -> None:
    """x column-major, where torch asserts that groups are multiples of 8 rows; N = 12, whose rows torch pads."""
    x = cases.normal(1, 64, 32, dtype=torch.bfloat16, device="cuda")
    x = x if form == "padded" else x.t().contiguous().t()
    weight = cases.normal(2, 3, 12, 32, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    offs, ends = torch.tensor([3, 3, 50], dtype=torch.int32, device="cuda"), (0, 3, 3, 50)
    parts = [x[a:b].double() @ w.double() for a, b, w in zip(ends, ends[1:], weight)]
    wanted = torch.cat([*parts, parts[0].new_zeros(14, 12)])
    found = OPS.grouped_mm(x, weight, offs)
    assert found.stride() == (12, 1) and not found[50:].any()
    assert ops_cases.relative(found.double(), wanted) < 2e-3  # one rounding to bf16 is 2^-9 at most
    if form == "padded":  # compiled code asserts the strides that the fake promised
        compiled = torch.compile(lambda *inputs: OPS.grouped_mm(*inputs) * 2, fullgraph=True)
        assert torch.equal(compiled(x, weight, offs), found * 2)


class Block(torch.nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return OPS.kda_fwd(*inputs, None, 0.5, False)[0]


def test_export(tmp_path: Path) -> None:
    inputs = tuple(ops_cases.kernel_kda().differentiable)
    torch.export.save(torch.export.export(Block(), inputs), tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2").module()
    assert torch.equal(loaded(*inputs), Block()(*inputs))


def test_explain_names_a_reason() -> None:
    case, odd = ops_cases.kernel_kda(), ops_cases.torch_kda()
    for inputs in (case, odd):
        text = str(culax.explain("kda_bwd", inputs.v, None, *inputs.arguments[:5]))
        assert text.startswith("culax::kda_bwd -> ") and len(text) > 30
    assert culax.explain("kda_bwd", odd.v, None, *odd.arguments[:5]).backend == "reference"
    _, mat_b, offs = ops_cases.kernel_wgrad()
    weight = cases.normal(9, 4, 72, 64, dtype=torch.bfloat16, device="cuda")
    expected = "torch" if torch.cuda.get_device_capability() >= (9, 0) else "reference"
    assert culax.explain("grouped_mm", mat_b, weight, offs).backend == expected
    assert culax.explain("grouped_mm", mat_b.float(), weight.float(), offs).backend == "reference"
