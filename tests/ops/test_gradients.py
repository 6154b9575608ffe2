"""gradcheck and gradgradcheck in fp64, constant output gradients, and every subset of gradients in and out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from culax.reference.kda_recurrence import kda_recurrence
from tests.ops import cases

OPS = torch.ops.culax
SMALL: dict[str, dict[str, Any]] = {
    "fixed": {"batch": 2, "tokens": 3, "sizes": (1, 2, 2, 3)},
    "packed": {"tokens": 5, "lengths": (1, 0, 3), "sizes": (1, 2, 2, 3)},
    "no_state": {"tokens": 3, "state": False, "sizes": (1, 1, 2, 2)},
}


def function_of(case: cases.Kda, final: bool = True) -> Callable[..., tuple[Tensor, ...]]:
    def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None) -> tuple:
        o, final_state, _, _ = OPS.kda_fwd(q, k, v, g, beta, state, case.cu_seqlens, case.scale, final)
        return (o, final_state) if final else (o,)

    return forward


@pytest.mark.parametrize("name", SMALL)
def test_kda_gradcheck(name: str) -> None:
    case = cases.kda(**SMALL[name]).requiring()
    assert torch.autograd.gradcheck(function_of(case), case.differentiable, fast_mode=False)


@pytest.mark.parametrize("name", SMALL)
def test_kda_gradgradcheck(name: str) -> None:
    case = cases.kda(**SMALL[name]).requiring()
    assert torch.autograd.gradgradcheck(function_of(case), case.differentiable, fast_mode=True)


@pytest.mark.parametrize("outputs", [(True, False), (False, True), (True, True)], ids=["o", "state", "both"])
@pytest.mark.parametrize("name", SMALL)
def test_constant_output_gradient(name: str, outputs: tuple[bool, bool]) -> None:
    """A formula that loses its second-order term where grad_out needs no gradient: the truth is the recurrence."""
    case = cases.kda(**SMALL[name] | {"tokens": 6}).requiring()

    def second(forward: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        inputs = case.differentiable
        results = [result for result, used in zip(forward(*inputs), outputs) if used]
        constants = [cases.normal(30 + i, *result.shape, dtype=torch.float64) for i, result in enumerate(results)]
        first = torch.autograd.grad(results, inputs, constants, create_graph=True, materialize_grads=True)
        loss = sum((gradient * cases.normal(40 + i, *gradient.shape)).sum() for i, gradient in enumerate(first))
        return list(torch.autograd.grad(loss, inputs, materialize_grads=True))

    def recurrence(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        state = inputs[5] if len(inputs) > 5 else None
        return kda_recurrence(*inputs[:5], state, case.cu_seqlens, case.scale)

    for ours, true in zip(second(function_of(case)), second(recurrence)):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-11)


def test_third_derivative_raises() -> None:
    case = cases.kda(tokens=2, sizes=(1, 1, 2, 2)).requiring()
    inputs = case.differentiable
    loss = function_of(case)(*inputs)[0]
    for _ in range(2):
        (loss,) = torch.autograd.grad(loss.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="third derivative"):
        torch.autograd.grad(loss.square().sum(), inputs[0])


SUBSETS = [
    subset
    for size in (1, 2, 6)
    for subset in itertools.combinations(cases.KDA_INPUTS, size)
    if size != 2 or "g" in subset or "beta" in subset
]


@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
def test_kda_subsets_of_inputs(subset: tuple[str, ...]) -> None:
    base = cases.kda(tokens=66, dtype=torch.float32)
    full, some = base.requiring(), base.requiring(*subset)
    wanted = dict(zip(cases.KDA_INPUTS, torch.autograd.grad(loss_of(full.forward()), full.differentiable)))
    loss_of(some.forward()).backward()
    for name in cases.KDA_INPUTS:
        gradient = getattr(some, name).grad
        assert (gradient is not None) == (name in subset)
        if name in subset:
            assert torch.equal(gradient, wanted[name])


def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0].square().sum() + outputs[1].sin().sum()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot"])
@pytest.mark.parametrize("used", ["o", "state", "both", "neither"])
def test_kda_subsets_of_output_gradients(used: str, compiled: bool) -> None:
    case = cases.kda(tokens=9).requiring()

    def loss(*inputs: Tensor) -> Tensor:
        o, final_state = function_of(case)(*inputs)
        terms = {"o": o.square().sum(), "state": final_state.sin().sum()}
        return sum((terms[name] for name in ("o", "state") if used in (name, "both")), 0 * inputs[0].sum())

    def recurrence(*inputs: Tensor) -> Tensor:
        o, final_state = kda_recurrence(*inputs, case.cu_seqlens, case.scale)
        terms = {"o": o.square().sum(), "state": final_state.sin().sum()}
        return sum((terms[name] for name in ("o", "state") if used in (name, "both")), 0 * inputs[0].sum())

    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    inputs = case.differentiable
    ours = torch.autograd.grad(run(*inputs), inputs, allow_unused=True, materialize_grads=True)
    true = torch.autograd.grad(recurrence(*inputs), inputs, allow_unused=True, materialize_grads=True)
    for gradient, wanted in zip(ours, true):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)


def test_missing_output_gradients_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only o is used: the backward gets None for the state's gradient, not a tensor of zeros."""
    import culax.kda.api as api

    seen = []
    original = api.kda_chunked.backward

    def spy(*arguments: Any) -> Any:
        seen.append(arguments[:2])
        return original(*arguments)

    monkeypatch.setattr(api.kda_chunked, "backward", spy)
    case = cases.kda(tokens=3).requiring()
    o, final_state, _, _ = case.forward()
    o.sum().backward(retain_graph=True)
    final_state.sum().backward()
    assert [[gradient is None for gradient in pair] for pair in seen] == [[False, True], [True, False]]


def test_one_backward_no_second_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    import culax.kda.api as api

    def refuse(*_: Any) -> None:
        raise AssertionError("a second forward")

    case = cases.kda(tokens=3).requiring()
    o, _, Aqk, Akk = case.forward()
    monkeypatch.setattr(api.kda_chunked, "forward", refuse)
    scores = []
    original = api.kda_chunked.backward

    def spy(*arguments: Any) -> Any:
        scores.append(arguments[7:9])
        return original(*arguments)

    monkeypatch.setattr(api.kda_chunked, "backward", spy)
    o.sum().backward()
    assert len(scores) == 1 and torch.equal(scores[0][0], Aqk) and torch.equal(scores[0][1], Akk)


def test_q_is_k() -> None:
    case = cases.kda(tokens=9)
    shared = case.q.clone().requires_grad_()
    twin = [case.q.clone().requires_grad_() for _ in range(2)]
    function_of(case)(shared, shared, case.v, case.g, case.beta)[0].square().sum().backward()
    function_of(case)(*twin, case.v, case.g, case.beta)[0].square().sum().backward()
    torch.testing.assert_close(shared.grad, twin[0].grad + twin[1].grad, rtol=1e-12, atol=1e-13)


OFFS = torch.tensor([2, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck], ids=["first", "second"])
def test_grouped_gradcheck(check: Callable[..., bool]) -> None:
    a, b = (cases.normal(seed, 6, size, dtype=torch.float64).requires_grad_() for seed, size in ((1, 3), (2, 2)))
    weight = cases.normal(3, 3, 3, 2, dtype=torch.float64).requires_grad_()
    assert check(lambda a, b: OPS.grouped_wgrad(a.t(), b, OFFS), (a, b))
    assert check(lambda x, weight: OPS.grouped_mm(x, weight, OFFS), (a, weight))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_grouped_wgrad_gradient_dtypes(out_dtype: torch.dtype) -> None:
    """bf16 operands, fp32 result: the gradient is computed from the unrounded fp32 output gradient."""
    a, b = (cases.normal(seed, 6, size, dtype=torch.bfloat16).requires_grad_() for seed, size in ((1, 3), (2, 2)))
    out = OPS.grouped_wgrad(a.t(), b, OFFS, out_dtype=out_dtype)
    gradient = cases.normal(3, 3, 3, 2, dtype=torch.float32).to(out_dtype)
    da, db = torch.autograd.grad(out, (a, b), gradient)
    assert da.dtype == db.dtype == torch.bfloat16
    exact = [tensor.detach().double().requires_grad_() for tensor in (a, b)]
    truth = OPS.grouped_wgrad(exact[0].t(), exact[1], OFFS)
    for ours, true in zip((da, db), torch.autograd.grad(truth, exact, gradient.double())):
        torch.testing.assert_close(ours.double(), true, rtol=2**-8, atol=1e-6)


def test_ragged_operands_say_why_not() -> None:
    a, b = (cases.normal(seed, size, 6).requires_grad_() for seed, size in ((1, 3), (2, 2)))
    out = OPS.grouped_wgrad(a, b.t(), OFFS, operand_layout="ragged")
    with pytest.raises(NotImplementedError, match="ragged layout"):
        out.sum().backward()


@pytest.mark.parametrize("subset", [("x",), ("weight",), ("x", "weight")], ids="-".join)
def test_grouped_mm_subsets(subset: tuple[str, ...]) -> None:
    tensors = {"x": cases.normal(1, 6, 3, dtype=torch.float64), "weight": cases.normal(2, 3, 3, 2, dtype=torch.float64)}
    for name in subset:
        tensors[name].requires_grad_()
    OPS.grouped_mm(*tensors.values(), OFFS).square().sum().backward()
    assert [name for name in tensors if tensors[name].grad is not None] == list(subset)


@pytest.mark.parametrize("strides", ["expanded", "sliced"])
def test_gradients_of_odd_strides(strides: str) -> None:
    """Leaves that reach the op as expanded or sliced views get the gradient of the copy."""
    case = cases.kda(tokens=5, sizes=(2, 2, 8, 4))

    def reshaped(tensor: Tensor) -> Tensor:
        return tensor[:, :1].expand_as(tensor) if strides == "expanded" else torch.cat([tensor, tensor], -1)[..., 1::2]

    def gradients(contiguous: bool) -> tuple[Tensor, ...]:
        leaves = case.requiring().differentiable
        views = [reshaped(leaf) for leaf in leaves[:5]]
        views = [view.contiguous() for view in views] if contiguous else views
        outputs = OPS.kda_fwd(*views, leaves[5], None, case.scale, True)
        return torch.autograd.grad(loss_of(outputs), leaves)

    for odd, plain in zip(gradients(False), gradients(True)):
        torch.testing.assert_close(odd, plain, rtol=1e-12, atol=1e-13)
