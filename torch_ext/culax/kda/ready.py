"""Backward calls of a known signature (culax/calls.py): what is left to look at are addresses and the current
device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import calls
from . import launch
from .plan import Plan


def backward(plan: Plan, arguments: tuple) -> Callable[..., tuple[Tensor, ...] | None]:
    """Calls with kda_bwd's arguments that return its gradients; None where they did not run.

    They launch nothing where an operand would have to be converted or copied, or is missing.
    """
    do, dht, q, k, v, g, beta, aqk, akk, initial, cu_seqlens, _ = arguments
    bf16, fp32 = torch.bfloat16, torch.float32
    rows = (*((x, bf16) for x in (do, q, k, v, aqk, akk)), (g, fp32))
    if any(x is None or not launch.has_rows(x, dtype) for x, dtype in rows):
        return calls.never
    if any(x is not None and not x.is_contiguous() for x in (dht, initial, cu_seqlens)):
        return calls.never
    device, kernel, new = q.device, launch.kernel(plan), calls.allocator(q.device)
    index = device.index
    no_state, (no_long_offsets, no_offsets) = launch.no_state(q, v), launch.offsets_pair(None, device)
    wide = cu_seqlens is not None and cu_seqlens.dtype is torch.int64
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    size, segments = launch.sizes(plan, v, sequences)
    scratch = (size,), (1,), bf16
    outputs = [_contiguous(x) for x in (q, k, v, g, beta, no_state if initial is None else initial)]

    def call(arguments: tuple) -> tuple[Tensor, ...] | None:
        do, dht, q, k, v, g, beta, aqk, akk, initial, cu_seqlens, scale = arguments
        dht = no_state if dht is None else dht
        initial = no_state if initial is None else initial
        bits = do.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | g.data_ptr() | aqk.data_ptr()
        if (bits | akk.data_ptr() | dht.data_ptr() | initial.data_ptr()) & 15 or not calls.may_run(index):
            return None
        long_offsets, offsets = no_long_offsets, no_offsets
        if wide:
            long_offsets = cu_seqlens
        elif cu_seqlens is not None:
            offsets = cu_seqlens
        gradients = tuple([new(*output) for output in outputs])
        inputs = (do, dht, q, k, v, g, beta, aqk, akk, initial, long_offsets, offsets)
        kernel.call(*inputs, new(*scratch), *gradients, scale, segments)
        return gradients

    return call


def _contiguous(like: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Shape, strides and dtype of a contiguous tensor like another."""
    return tuple(like.shape), torch.empty(like.shape, device="meta").stride(), like.dtype
