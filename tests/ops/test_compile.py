"""torch.compile: fullgraph forward and backward, one node an op, one graph for all sizes, first call compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import culax
from tests.ops import cases
from tests.ops.graphs import Capture
from tests.ops.test_process import run_python

OPS = torch.ops.culax


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No graphs of other tests, and no equality of two sizes assumed because they happened to be the same number."""
    torch._dynamo.reset()
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        yield


LENGTHS = ((7, (3, 4)), (70, (1, 0, 64)), (65, (60, 1, 1, 3)), (8, (2, 3, 2)))
SIZES = ((6, (2, 3)), (70, (0, 64, 5)), (70, (70, 0, 0)), (9, (1, 2, 3, 3)), (64, (32, 32)))


def kda_loss(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu: Tensor | None) -> Tensor:
    o, final_state, _, _ = OPS.kda_fwd(q, k, v, g, beta, state, cu, 0.5, True)
    return o.sin().sum() + final_state.sum()


def moe_loss(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return OPS.grouped_mm(x, weight, offs).sin().sum()


def test_kda_graph() -> None:
    case, capture = cases.kda(tokens=5).requiring(), Capture()
    compiled = torch.compile(kda_loss, fullgraph=True, backend=capture.backend)
    loss = compiled(*case.differentiable, None)
    gradients = torch.autograd.grad(loss, case.differentiable)
    true = torch.autograd.grad(kda_loss(*case.differentiable, None), case.differentiable)
    for gradient, wanted in zip(gradients, true):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14)
    assert_expected_inline(
        capture.forward[0],
        """\
kda_fwd = culax.kda_fwd.default(p1, p2, p3, p4, p5, p6, None, 0.5, True)
sin = aten.sin.default(getitem)
sum_1 = aten.sum.default(sin)
sum_2 = aten.sum.default(getitem_1)
add = aten.add.Tensor(sum_1, sum_2)""",
    )
    assert_expected_inline(
        capture.backward[0],
        """\
expand = aten.expand.default(t1, [1, 2, 8, 4])
expand_1 = aten.expand.default(t1, [1, 5, 2, 4])
cos = aten.cos.default(getitem)
mul = aten.mul.Tensor(expand_1, cos)
kda_bwd = culax.kda_bwd.default(mul, expand, p1, p2, p3, p4, p5, getitem_2, getitem_3, p6, None, 0.5)""",
    )


def test_kda_graph_q_is_k() -> None:
    case, capture = cases.kda(tokens=5).requiring("q"), Capture()

    def loss(q: Tensor) -> Tensor:
        return OPS.kda_fwd(q, q, case.v, case.g, case.beta, None, None, 0.5, False)[0].sin().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=capture.backend)
    (gradient,) = torch.autograd.grad(compiled(case.q), case.q)
    (wanted,) = torch.autograd.grad(loss(case.q), case.q)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14)
    assert_expected_inline(
        capture.backward[0],
        """\
expand = aten.expand.default(t1, [1, 5, 2, 4])
cos = aten.cos.default(getitem)
mul = aten.mul.Tensor(expand, cos)
kda_bwd = culax.kda_bwd.default(mul, None, p1, p1, p2, p3, p4, getitem_2, getitem_3, None, None, 0.5)
add = aten.add.Tensor(getitem_4, getitem_5)""",
    )


def test_grouped_graph() -> None:
    x, weight = cases.normal(1, 6, 4).requires_grad_(), cases.normal(2, 2, 4, 3).requires_grad_()
    capture = Capture()
    compiled = torch.compile(moe_loss, fullgraph=True, backend=capture.backend)
    offs = torch.tensor([2, 5], dtype=torch.int32)
    gradients = torch.autograd.grad(compiled(x, weight, offs), (x, weight))
    for gradient, wanted in zip(gradients, torch.autograd.grad(moe_loss(x, weight, offs), (x, weight))):
        assert torch.equal(gradient, wanted)
    assert_expected_inline(
        capture.forward[0],
        """\
grouped_mm = culax.grouped_mm.default(p1, p2, p3)
sin = aten.sin.default(grouped_mm)
sum_1 = aten.sum.default(sin)""",
    )
    assert_expected_inline(
        capture.backward[0],
        """\
expand = aten.expand.default(t1, [6, 3])
cos = aten.cos.default(grouped_mm)
mul = aten.mul.Tensor(expand, cos)
transpose = aten.transpose.int(p2, 1, 2)
grouped_mm_1 = culax.grouped_mm.default(mul, transpose, p3)
t = aten.t.default(p1)
grouped_wgrad = culax.grouped_wgrad.default(t, mul, p3)""",
    )


def test_accumulation_graph() -> None:
    """The in-place op keeps one node, and nothing else copies main_grad."""
    mat_a, mat_b, offs = cases.wgrad()
    capture = Capture()

    def step(main_grad: Tensor, a: Tensor, b: Tensor) -> None:
        OPS.grouped_wgrad_out(main_grad, a, b, offs, accumulate=True)

    main_grad = torch.ones(4, 6, 5)
    torch.compile(step, fullgraph=True, backend=capture.backend)(main_grad, mat_a, mat_b)
    torch.testing.assert_close(main_grad, OPS.grouped_wgrad(mat_a, mat_b, offs) + 1)
    assert_expected_inline(
        capture.forward[0], """auto_functionalized_v2 = auto_functionalized_v2(culax.grouped_wgrad_out.default)"""
    )


def test_chunk_kda_and_grouped_linear_have_no_breaks() -> None:
    layer = culax.GroupedLinear(2, 4, 3)
    case = cases.kda(tokens=5, dtype=torch.float32)
    offs = torch.tensor([2, 5], dtype=torch.int32)

    def step(x: Tensor, q: Tensor) -> Tensor:
        o, _ = culax.chunk_kda(q, case.k, case.v, case.g, case.beta, use_qk_l2norm_in_kernel=True)
        return layer(x, offs).sum() + o.sum()

    x, q = cases.normal(1, 6, 4).requires_grad_(), case.q.clone().requires_grad_()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for gradient, wanted in zip(torch.autograd.grad(compiled(x, q), (x, q)), torch.autograd.grad(step(x, q), (x, q))):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
def test_kda_one_graph_for_all_sizes(packed: bool) -> None:
    capture = Capture()
    compiled = torch.compile(kda_loss, fullgraph=True, dynamic=True, backend=capture.backend)
    shapes: list[dict[str, Any]] = (
        [
            {"tokens": t, "lengths": lengths}
            for t, lengths in ((7, (3, 4)), (70, (1, 0, 64)), (65, (60, 1, 1, 3)), (8, (2, 3, 2)))
        ]
        if packed
        else [{"tokens": t, "batch": b} for t, b in ((5, 2), (70, 3), (64, 2), (129, 4))]
    )
    for index, shape in enumerate(shapes):
        case = cases.kda(**shape).requiring()
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            loss = compiled(*case.differentiable, case.cu_seqlens)
        wanted = kda_loss(*case.differentiable, case.cu_seqlens)
        pairs = zip(torch.autograd.grad(loss, case.differentiable), torch.autograd.grad(wanted, case.differentiable))
        for gradient, true in pairs:
            torch.testing.assert_close(gradient, true, rtol=1e-11, atol=1e-13)
    assert (len(capture.forward), len(capture.backward)) == (1, 1)


def test_grouped_one_graph_for_all_sizes() -> None:
    capture = Capture()
    compiled = torch.compile(moe_loss, fullgraph=True, dynamic=True, backend=capture.backend)
    for index, (tokens, sizes) in enumerate(
        [(6, (2, 3)), (70, (0, 64, 5)), (70, (70, 0, 0)), (9, (1, 2, 3, 3)), (64, (32, 32))]
    ):
        x = cases.normal(1, tokens, 4).requires_grad_()
        weight = cases.normal(2, len(sizes), 4, 3).requires_grad_()
        offs = torch.tensor(sizes).cumsum(0)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            loss = compiled(x, weight, offs)
        pairs = zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(moe_loss(x, weight, offs), (x, weight)))
        for gradient, true in pairs:
            torch.testing.assert_close(gradient, true, rtol=1e-5, atol=1e-5)
    assert (len(capture.forward), len(capture.backward)) == (1, 1)


def test_first_call_ever_is_compiled() -> None:
    """In a fresh process, through Inductor, forward and backward."""
    out = run_python(
        "import torch, culax\n"
        "from tests.ops import cases\n"
        "from tests.ops.test_compile import kda_loss\n"
        "case = cases.kda(tokens=70).requiring()\n"
        "compiled = torch.compile(kda_loss, fullgraph=True)\n"
        "ours = torch.autograd.grad(compiled(*case.differentiable, None), case.differentiable)\n"
        "true = torch.autograd.grad(kda_loss(*case.differentiable, None), case.differentiable)\n"
        "print(all(torch.allclose(a, b, rtol=1e-11, atol=1e-13) for a, b in zip(ours, true)))\n"
    )
    assert out == "True\n"
