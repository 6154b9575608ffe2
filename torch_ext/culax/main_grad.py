"""Weight gradients added in fp32 into `weight.main_grad`: the private ops of GroupedLinear(accumulate_main_grad=True).

The forward op computes `grouped_mm(x, weight, offs)`. Its gradient formula gives x its gradient, adds the weight's
gradient into `main_grad` (torch.ops.culax._grouped_wgrad_main_grad) and returns none for the weight, so `weight.grad`
is left as it was. The addition is a declared mutation of a graph input, which AOTAutograd keeps in the backward graph.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks
from .gradients import without_autocast
from .grouped_wgrad import api


def _check(op: str, main_grad: Tensor, shape: Sequence[int], operand: Tensor, name: str) -> None:
    checks.expect_shape(op, "main_grad", main_grad, "E, K, N", shape)
    wanted = torch.float64 if operand.dtype == torch.float64 else torch.float32
    checks.expect_dtype(op, "main_grad", main_grad, (wanted,))
    checks.expect_device(op, "main_grad", main_grad, operand.device, name)


def _forward(x: Tensor, weight: Tensor, offs: Tensor, main_grad: Tensor) -> Tensor:
    _check("_grouped_mm_main_grad", main_grad, weight.shape, weight, "weight")
    return api.grouped_mm(x, weight, offs)


def _accumulate(main_grad: Tensor, x: Tensor, dy: Tensor, offs: Tensor) -> None:
    _check("_grouped_wgrad_main_grad", main_grad, (offs.shape[0], x.shape[1], dy.shape[1]), x, "x")
    # No graph reads main_grad, so its version stays put: compiled code saves main_grad with each forward, and would
    # refuse the second of two pending backwards after the first had bumped it.
    with torch.autograd._unsafe_preserve_version_counter(main_grad):
        api.grouped_wgrad_out(main_grad, x.t(), dy, offs, None, None, None, None, "padded", "2d", True)


def _fake_forward(x: Tensor, weight: Tensor, offs: Tensor, main_grad: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]))


def _fake_accumulate(main_grad: Tensor, x: Tensor, dy: Tensor, offs: Tensor) -> None:
    return None


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    x, weight, offs, main_grad = inputs
    ctx.save_for_backward(x, weight, offs)
    ctx.main_grad = main_grad  # a destination, not a value the formula reads: no version check


@without_autocast
def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "GroupedLinear: a gradient added into main_grad can't be differentiated again (create_graph=True); "
            "use accumulate_main_grad=False"
        )
    x, weight, offs = ctx.saved_tensors
    dx = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.culax.grouped_mm(dy, weight.transpose(1, 2), offs)
    if ctx.needs_input_grad[1]:
        torch.ops.culax._grouped_wgrad_main_grad(ctx.main_grad, x, dy, offs)
    return dx, None, None, None


def register(lib: torch.library.Library) -> None:
    """Register implementations, fakes and the gradient formula of both private ops on the culax library `lib`."""
    for key in ("CPU", "CUDA"):
        lib.impl("_grouped_mm_main_grad", _forward, key)
        lib.impl("_grouped_wgrad_main_grad", _accumulate, key)
    torch.library.register_fake("culax::_grouped_mm_main_grad", _fake_forward, lib=lib)
    torch.library.register_fake("culax::_grouped_wgrad_main_grad", _fake_accumulate, lib=lib)
    torch.library.register_autograd("culax::_grouped_mm_main_grad", _backward, setup_context=_setup_context, lib=lib)
