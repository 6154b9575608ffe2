"""Gradient formulas of the functional ops, each written with ops that are differentiable themselves.

kda_fwd: kda_bwd. kda_bwd: _kda_bwd_bwd, as if Aqk and Akk had been recomputed from q, k, g and beta. grouped_mm and
grouped_wgrad: each other. Output gradients that are None stay None down to the op that takes them; nothing is
materialised for them.
Formulas run with autocast off: a gradient has the dtypes of its forward, whatever surrounds ``backward()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .grouped_wgrad.checks import BLOCKS

Gradients = tuple[Tensor | None, ...]
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def without_autocast(formula: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """A formula that computes as if no autocast surrounded ``backward()``."""

    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            return formula(ctx, *gradients)

    return backward


def _needed(ctx: Any, gradients: Sequence[Tensor | None]) -> Gradients:
    """The gradients that somebody asked for, None for the others."""
    return tuple(gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=True))


def kda_fwd_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Save what kda_bwd needs; only o, and the final state if asked for, carry a gradient."""
    *tensors, ctx.scale, output_final_state = inputs
    _, final_state, Aqk, Akk = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(Aqk, Akk, *(() if output_final_state else (final_state,)))
    ctx.save_for_backward(*tensors, Aqk, Akk)


@without_autocast
def kda_fwd_backward(ctx: Any, do: Tensor | None, dht: Tensor | None, *_: None) -> Gradients:
    """One kda_bwd call; no second forward."""
    if do is None and dht is None:
        return (None,) * 9
    q, k, v, g, beta, initial_state, cu_seqlens, Aqk, Akk = ctx.saved_tensors
    gradients = torch.ops.culax.kda_bwd(do, dht, q, k, v, g, beta, Aqk, Akk, initial_state, cu_seqlens, ctx.scale)
    return _needed(ctx, (*gradients, None, None, None))


def kda_bwd_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Save everything but Aqk and Akk, which the double backward recomputes."""
    do, dht, q, k, v, g, beta, _, _, initial_state, cu_seqlens, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    if initial_state is None:
        ctx.mark_non_differentiable(output[-1])
    ctx.save_for_backward(do, dht, q, k, v, g, beta, initial_state, cu_seqlens)


@without_autocast
def kda_bwd_backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
    """One _kda_bwd_bwd call."""
    if all(gradient is None for gradient in gradients):
        return (None,) * 12
    do, dht, *inputs, initial_state, cu_seqlens = ctx.saved_tensors
    if initial_state is None:
        gradients = (*gradients[:-1], None)
    gdo, gdht, *others, ginitial_state = torch.ops.culax._kda_bwd_bwd(
        *gradients, do, dht, *inputs, initial_state, cu_seqlens, ctx.scale
    )
    return _needed(ctx, (gdo, gdht, *others, None, None, ginitial_state, None, None))


def kda_bwd_bwd_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Nothing to save: there is no third derivative."""


def kda_bwd_bwd_backward(ctx: Any, *_: Tensor | None) -> Gradients:
    """Third derivatives do not exist here."""
    raise NotImplementedError("kda_bwd: a third derivative was asked for; only first and second ones exist")


def grouped_mm_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Save all three inputs."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


@without_autocast
def grouped_mm_backward(ctx: Any, gradient: Tensor | None) -> Gradients:
    """dx = dy weight^T by expert, dweight = x^T dy by expert."""
    if gradient is None:
        return None, None, None
    x, weight, offs = ctx.saved_tensors
    need_x, need_weight, _ = ctx.needs_input_grad
    dx = torch.ops.culax.grouped_mm(gradient, weight.transpose(1, 2), offs) if need_x else None
    dweight = torch.ops.culax.grouped_wgrad(x.t(), gradient, offs) if need_weight else None
    return dx, dweight, None


def grouped_wgrad_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Save the operands. Block-scaled operands and their scales have no gradient: the output is a constant."""
    mat_a, mat_b, offs, _, _, _, _, _, ctx.operand_layout, _ = inputs
    ctx.set_materialize_grads(False)
    if mat_a.dtype in BLOCKS:
        ctx.mark_non_differentiable(output)
    else:
        ctx.save_for_backward(mat_a, mat_b, offs)


@without_autocast
def grouped_wgrad_backward(ctx: Any, gradient: Tensor | None) -> Gradients:
    """dA^T = B dW^T and dB = A^T dW by expert, computed in the wider of the operands' and the output's dtype."""
    if gradient is None or not any(ctx.needs_input_grad[:2]):
        return (None,) * 10
    if ctx.operand_layout == "ragged":
        raise NotImplementedError("grouped_wgrad: operands in the ragged layout have no gradient; use the 2d one")
    mat_a, mat_b, offs = ctx.saved_tensors
    dtype = torch.promote_types(gradient.dtype, mat_a.dtype)
    gradient = gradient.to(dtype)
    da = db = None
    if ctx.needs_input_grad[0]:
        da = torch.ops.culax.grouped_mm(mat_b.to(dtype), gradient.transpose(1, 2), offs).t().to(mat_a.dtype)
    if ctx.needs_input_grad[1]:
        db = torch.ops.culax.grouped_mm(mat_a.t().to(dtype), gradient, offs).to(mat_b.dtype)
    return da, db, *(None,) * 8


FORMULAS: dict[str, tuple[Callable[..., None], Callable[..., Gradients]]] = {
    "kda_fwd": (kda_fwd_setup, kda_fwd_backward),
    "kda_bwd": (kda_bwd_setup, kda_bwd_backward),
    "_kda_bwd_bwd": (kda_bwd_bwd_setup, kda_bwd_bwd_backward),
    "grouped_mm": (grouped_mm_setup, grouped_mm_backward),
    "grouped_wgrad": (grouped_wgrad_setup, grouped_wgrad_backward),
}
