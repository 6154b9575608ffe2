"""Implementations of the KDA ops: check, choose a backend, run it. Arguments mirror the schemas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import calls, dispatch
from ..reference import kda_chunked, kda_double
from . import checks, launch, ready

_ready: calls.Ready = {}
_recent = calls.Recent()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
) -> tuple[Tensor, ...]:
    """kda_fwd on real tensors: (o, final_state, Aqk, Akk)."""
    arguments = (q, k, v, g, beta, initial_state, cu_seqlens, scale, output_final_state)
    _, choice = dispatch.prepare("kda_fwd", checks.signature(arguments), checks.build, arguments, q.device)
    checks.expect_cu_seqlens("kda_fwd", q, cu_seqlens)
    if choice.backend == "cutedsl":
        return launch.run(choice.plan, arguments)
    return _contiguous(kda_chunked.forward(*arguments))


def backward(
    do: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    Aqk: Tensor | None,
    Akk: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """kda_bwd on real tensors: (dq, dk, dv, dg, dbeta, dinitial_state)."""
    arguments = (do, dht, q, k, v, g, beta, Aqk, Akk, initial_state, cu_seqlens, scale)
    gradients = _recent(arguments)
    if gradients is not None:
        return gradients
    key = checks.signature(arguments)
    gradients = _ready.get(key, calls.never)(arguments)
    if gradients is not None:
        return gradients
    _, choice = dispatch.prepare("kda_bwd", key, checks.build, arguments, q.device)
    checks.expect_cu_seqlens("kda_bwd", q, cu_seqlens)
    if choice.backend == "cutedsl":
        call = calls.remember(_ready, key, ready.backward, choice.plan, arguments)
        if call is not None:
            _recent.remember(arguments, call)
        return launch.run(choice.plan, arguments)
    return _contiguous(kda_chunked.backward(*arguments))


def double_backward(
    gdq: Tensor | None,
    gdk: Tensor | None,
    gdv: Tensor | None,
    gdg: Tensor | None,
    gdbeta: Tensor | None,
    gdinitial_state: Tensor | None,
    do: Tensor | None,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """_kda_bwd_bwd on real tensors: the vector-Jacobian product of kda_bwd with Aqk and Akk recomputed.

    Returns (gdo, gdht, gq, gk, gv, gg, gbeta, ginitial_state); the gradient of an input that is None has no elements.
    """
    gradients = (gdq, gdk, gdv, gdg, gdbeta, gdinitial_state)
    arguments = (*gradients, do, dht, q, k, v, g, beta, initial_state, cu_seqlens, scale)
    dispatch.prepare("_kda_bwd_bwd", checks.signature(arguments), checks.build, arguments, q.device)
    checks.expect_cu_seqlens("_kda_bwd_bwd", q, cu_seqlens)
    with _autograd_inside_op():
        found = kda_double.double_backward(*arguments)
    return _contiguous(tuple(q.new_empty(0) if gradient is None else gradient.detach() for gradient in found))


def _contiguous(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Outputs in the strides that the fakes promise, those of size-1 dimensions too; the reference has others."""
    return tuple(
        output if _strides_are_fresh(output) else output.clone(memory_format=torch.contiguous_format)
        for output in outputs
    )


def _strides_are_fresh(tensor: Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


def _keys_of_autograd() -> torch._C.DispatchKeySet:
    names = ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    for name in names:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys


@contextmanager
def _autograd_inside_op() -> Iterator[None]:
    """Record autograd inside an op's implementation, where the dispatcher has switched it off.

    Hooks on saved tensors belong to the caller's graph (checkpointing counts tensors), so this graph gets plain ones.
    """
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set() - _keys_of_autograd()
    with (
        torch._C._ForceDispatchKeyGuard(include, exclude),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
    ):
        yield
