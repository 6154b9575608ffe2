import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from culax.kda import gates

BOUNDS = pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5], ids=["softplus", "bounded-5", "bounded-0.5"])


def draw(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def plain_gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The published formulas, word for word; only for moderate A_log."""
    z = g if dt_bias is None else g + dt_bias.view(g.shape[-2:])
    rate = 1.0 if A_log is None else A_log.exp()[:, None]
    return -rate * torch.nn.functional.softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(rate * z)


@BOUNDS
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "dt_bias"])
def test_gate_is_the_published_formula(lower_bound: float | None, bias: bool) -> None:
    g, A_log, dt_bias = draw(2, 7, 3, 4, scale=3), draw(3, seed=1), draw(12, seed=2) if bias else None
    got = gates.decay_gate(g, A_log, dt_bias, lower_bound)
    torch.testing.assert_close(got, plain_gate(g, A_log, dt_bias, lower_bound), rtol=1e-13, atol=0)
    assert (got <= 0).all()


def test_gate_without_rate_in_the_bounded_form() -> None:
    g, dt_bias = draw(1, 5, 2, 4), draw(8, seed=1)
    torch.testing.assert_close(
        gates.decay_gate(g, None, dt_bias, -5.0), plain_gate(g, None, dt_bias, -5.0), rtol=1e-13, atol=0
    )


@BOUNDS
def test_gate_gradients(lower_bound: float | None) -> None:
    g = draw(2, 3, 2, 3, scale=4).requires_grad_()
    A_log, dt_bias = draw(2, seed=1).requires_grad_(), draw(6, seed=2).requires_grad_()

    def gate(g: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        return gates.decay_gate(g, A_log, dt_bias, lower_bound)

    assert gradcheck(gate, (g, A_log, dt_bias))
    assert gradgradcheck(gate, (g, A_log, dt_bias))


@BOUNDS
@pytest.mark.parametrize("wanted", [0, 1, 2], ids=["g", "A_log", "dt_bias"])
def test_gate_gradient_of_one_input_alone(lower_bound: float | None, wanted: int) -> None:
    inputs = [draw(1, 4, 2, 3), draw(2, seed=1), draw(6, seed=2)]
    inputs[wanted].requires_grad_()
    got = torch.autograd.grad(gates.decay_gate(*inputs, lower_bound).square().sum(), inputs[wanted])[0]
    expected = torch.autograd.grad(plain_gate(*inputs, lower_bound).square().sum(), inputs[wanted])[0]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("z", [-700.0, -100.0, -18.0 - 1e-9, -18.0 + 1e-9, -1.0, 0.0, 30.0, 45.0, 100.0])
def test_log_softplus_over_its_whole_range(z: float) -> None:
    exact = z - math.exp(z) / 2 if z < -30 else math.log(math.log1p(math.exp(z)) if z < 100 else z)
    assert gates._log_softplus(torch.tensor(z, dtype=torch.float64)).item() == pytest.approx(exact, rel=1e-14)


def test_huge_rate_meets_tiny_softplus_exactly() -> None:
    """A = 100, z = -98: e^A overflows fp32 and softplus(z) underflows it, their product is e^2."""
    g = torch.full((1, 1, 1, 1), -98.0, requires_grad=True)
    A_log = torch.full((1,), 100.0, requires_grad=True)
    gamma = gates.decay_gate(g, A_log, None, None)
    assert gamma.item() == pytest.approx(-math.exp(2), rel=1e-5)
    dg, dA = torch.autograd.grad(gamma.sum(), (g, A_log))
    assert dg.item() == pytest.approx(-math.exp(2), rel=1e-5)
    assert dA.item() == pytest.approx(-math.exp(2), rel=1e-5)


def test_gate_at_its_strongest_is_constant() -> None:
    """Beyond -128, where exp(gamma) is 0 in fp32, gamma is -128 with no slope; just before, it is the formula."""
    g = torch.tensor([130.0, 127.0], dtype=torch.float64).view(1, 2, 1, 1).requires_grad_()
    A_log = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    gamma = gates.decay_gate(g, A_log, None, None)
    torch.testing.assert_close(gamma.flatten(), torch.tensor([-128.0, -127.0], dtype=torch.float64), rtol=1e-14, atol=0)
    dg, dA = torch.autograd.grad(gamma.sum(), (g, A_log))
    torch.testing.assert_close(dg.flatten(), torch.tensor([0.0, -1.0], dtype=torch.float64), rtol=1e-14, atol=0)
    assert dA.item() == pytest.approx(-127, rel=1e-14)


@BOUNDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("A", [-100.0, 100.0, 1000.0])
def test_extreme_rates_stay_finite(lower_bound: float | None, dtype: torch.dtype, A: float) -> None:
    values = torch.tensor([-1e4, -200.0, -98.0, -1.0, -1e-3, 1e-3, 1.0, 98.0, 200.0, 1e4]).to(dtype)
    g = values.repeat(2).view(1, 10, 2, 1).clone().requires_grad_()
    A_log = torch.full((2,), A, requires_grad=True)
    dt_bias = torch.zeros(2, requires_grad=True)
    gamma = gates.decay_gate(g, A_log, dt_bias, lower_bound)
    gradients = torch.autograd.grad(gamma.sum(), (g, A_log, dt_bias))
    for value in (gamma, *gradients):
        assert torch.isfinite(value).all()
    assert gamma.min() >= (-128 if lower_bound is None else lower_bound) and gamma.max() <= 0


@BOUNDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_huge_rate_at_zero_stays_finite(lower_bound: float | None, dtype: torch.dtype) -> None:
    """z = 0 is where the bounded gate's slope is e^A itself."""
    wide = gates.compute_dtype(torch.empty(0, dtype=dtype))
    g = torch.zeros(1, 1000, 2, 1, dtype=dtype, requires_grad=True)
    A_log = torch.full((2,), 100.0, dtype=wide, requires_grad=True)
    dt_bias = torch.zeros(2, dtype=wide, requires_grad=True)
    gradients = torch.autograd.grad(gates.decay_gate(g, A_log, dt_bias, lower_bound).sum(), (g, A_log, dt_bias))
    assert all(torch.isfinite(value).all() for value in gradients)
    assert all(torch.isfinite(value.to(wide).norm()) for value in gradients)


@pytest.mark.parametrize("lower_bound", [-5.0, -0.5])
def test_saturated_sigmoid_keeps_its_small_slope(lower_bound: float) -> None:
    """1 - sigmoid(z) is 0 in fp32 from z = 17 on; the slope there isn't."""
    g = torch.full((1, 1, 1, 1), 30.0, requires_grad=True)
    dg = torch.autograd.grad(gates.decay_gate(g, torch.zeros(1), None, lower_bound).sum(), g)[0]
    assert dg.item() == pytest.approx(lower_bound * math.exp(-30), rel=1e-5, abs=0)


@BOUNDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_inputs_are_computed_in_fp32(lower_bound: float | None, dtype: torch.dtype) -> None:
    g = draw(2, 300, 2, 4, dtype=torch.float32).to(dtype).requires_grad_()
    A_log, dt_bias = draw(2, dtype=torch.float32, seed=1), draw(8, dtype=torch.float32, seed=2)
    A_log, dt_bias = A_log.requires_grad_(), dt_bias.requires_grad_()
    gamma = gates.decay_gate(g, A_log, dt_bias, lower_bound)
    assert gamma.dtype == torch.float32
    exact_inputs = [t.detach().double().requires_grad_() for t in (g, A_log, dt_bias)]
    exact = plain_gate(*exact_inputs, lower_bound)
    torch.testing.assert_close(gamma.double(), exact, rtol=3e-6, atol=1e-9)
    weight = draw(*gamma.shape, seed=3)
    got = torch.autograd.grad(gamma, (g, A_log, dt_bias), weight.float())
    expected = torch.autograd.grad(exact, exact_inputs, weight)
    assert [t.dtype for t in got] == [dtype, torch.float32, torch.float32]
    torch.testing.assert_close(got[0].double(), expected[0], rtol=torch.finfo(dtype).eps, atol=1e-7)
    for one, truth in zip(got[1:], expected[1:]):
        # fp32 sums of 600 and 2400 terms
        torch.testing.assert_close(one.double(), truth, rtol=1e-5, atol=1e-4)


def test_l2norm() -> None:
    x = draw(2, 5, 3, 8)
    torch.testing.assert_close(
        gates.l2norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), rtol=1e-14, atol=0
    )
    assert gradcheck(gates.l2norm, (draw(1, 2, 2, 4).requires_grad_(),))
    assert gradgradcheck(gates.l2norm, (draw(1, 2, 2, 4).requires_grad_(),))
    zero = torch.zeros(1, 1, 1, 8, requires_grad=True)
    gates.l2norm(zero).sum().backward()
    torch.testing.assert_close(zero.grad, torch.full_like(zero, 1000.0))
    half = draw(1, 3, 2, 64, scale=300).to(torch.float16)
    assert gates.l2norm(half).dtype == torch.float16
    torch.testing.assert_close(
        gates.l2norm(half).double().norm(dim=-1), torch.ones(1, 3, 2, dtype=torch.float64), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("neg", [False, True], ids=["sigmoid", "twice-sigmoid"])
def test_beta_gate(neg: bool) -> None:
    beta = draw(2, 5, 3)
    torch.testing.assert_close(gates.beta_gate(beta, neg), (2 if neg else 1) * torch.sigmoid(beta))
    assert gates.beta_gate(beta.to(torch.bfloat16), neg).dtype == torch.float32
    assert gradcheck(lambda b: gates.beta_gate(b, neg), (beta.requires_grad_(),))
