"""GroupedLinear's main_grad on a GPU: replayed by make_graphed_callables and by reduce-overhead, as eager adds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import culax
from tests.ops import cases

BF16 = torch.bfloat16
EXPERTS, IN, OUT, TOKENS = 4, 64, 72, 200
SPLITS = ((50, 0, 100, 50), (200, 0, 0, 0), (0, 0, 0, 0), (1, 63, 65, 7), (0, 0, 0, 200))


def new_layer() -> culax.GroupedLinear:
    """The same weights each time, main_grad at zero."""
    torch.manual_seed(0)
    return culax.GroupedLinear(EXPERTS, IN, OUT, device="cuda", dtype=BF16, accumulate_main_grad=True)


def ends(split: tuple[int, ...]) -> Tensor:
    """End offsets on the device."""
    return torch.tensor(split, device="cuda").cumsum(0).to(torch.int32)


def batch(step: int) -> Tensor:
    """Rows of a step, new data each time."""
    return cases.normal(step, TOKENS, IN, dtype=BF16, device="cuda").requires_grad_()


def gradients(layer: Callable[[Tensor, Tensor], Tensor], x: Tensor, offs: Tensor) -> Tensor:
    """One backward: dx; the weight's gradient goes to main_grad."""
    (dx,) = torch.autograd.grad(layer(x, offs).float().sin().sum(), x)
    return dx.clone()


@pytest.mark.parametrize("in_place", [True, False], ids=["offsets_in_place", "offsets_passed"])
def test_graphed_callable_adds_into_main_grad(in_place: bool) -> None:
    """Two backwards a step add up in fp32; what the warm-up left is zeroed; offsets change between replays."""
    layer, twin = new_layer(), new_layer()
    offs = ends(SPLITS[0])
    main_grad = layer.main_grad
    graphed = torch.cuda.make_graphed_callables(layer, (batch(0), offs), allow_unused_input=True)
    layer.zero_main_grad()
    for step, split in enumerate(SPLITS * 3):
        given = offs.copy_(ends(split)) if in_place else ends(split)
        for part in range(2):
            x = batch(2 * step + part)
            assert torch.equal(gradients(graphed, x, given), gradients(twin, x, ends(split)))
        assert layer.main_grad is main_grad and layer.weight.grad is None
        assert torch.equal(main_grad, twin.main_grad), split
    assert main_grad.count_nonzero()


def test_reduce_overhead_adds_into_main_grad(compiled_graphs: None) -> None:
    """No graph is skipped although the backward writes into main_grad; the sums of five steps are eager's."""
    layer, twin = new_layer(), new_layer()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for step, split in enumerate(SPLITS):
        x = batch(step)
        torch.compiler.cudagraph_mark_step_begin()
        dx = gradients(compiled, x, ends(split))
        wanted = gradients(twin, x, ends(split))
        assert torch.equal(layer.main_grad, twin.main_grad), split
        assert torch.equal(dx, wanted), split
    assert layer.weight.grad is None and twin.main_grad.count_nonzero()
