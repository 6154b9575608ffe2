"""Runs a plan of KDA kernels on tensors: copies what the kernels cannot read in place, takes a workspace, launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..reference import kda_chunked
from ..runtime import load
from .plan import Plan, segments
from .problem import CHUNK


@dataclass(frozen=True)
class Inputs:
    """What the kernels read: q, k, v, do, Aqk, Akk in bf16 and g in fp32, all with rows of 16-byte accesses; beta of
    any strides; states in fp32, empty if absent; cu_seqlens or None."""

    do: Tensor
    dht: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    aqk: Tensor
    akk: Tensor
    initial: Tensor
    cu_seqlens: Tensor | None


def has_rows(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor has this dtype and strides of rows that can be read 16 bytes at a time."""
    step = 16 // dtype.itemsize
    *strides, last = tensor.stride()
    return tensor.dtype is dtype and last == 1 and not any(stride % step for stride in strides)


def _rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor itself if kernels can read it in place, else a contiguous copy of this dtype."""
    if has_rows(tensor, dtype) and tensor.data_ptr() % 16 == 0:
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def no_state(q: Tensor, v: Tensor) -> Tensor:
    """What stands for a state that is absent: [0, HV, K, V] in fp32."""
    return v.new_empty((0, v.shape[2], q.shape[3], v.shape[3]), dtype=torch.float32)


def _state(state: Tensor) -> Tensor:
    if state.is_contiguous() and state.data_ptr() % 16 == 0:
        return state
    return state.clone(memory_format=torch.contiguous_format)


def collect(arguments: tuple) -> tuple[Inputs, float]:
    """kda_bwd's arguments as the kernels read them, and the scale.

    do None is a row of zeros seen everywhere. Aqk and Akk that were not saved come from the torch path.
    """
    do, dht, q, k, v, g, beta, aqk, akk, initial, cu_seqlens, scale = arguments
    bf16, fp32 = torch.bfloat16, torch.float32
    if aqk is None or akk is None:
        _, _, aqk, akk = kda_chunked.forward(q, k, v, g, beta, initial, cu_seqlens, scale, False)
    if do is None:
        do = v.new_zeros(v.shape[3]).expand(v.shape)
    return Inputs(
        do=_rows(do, bf16),
        dht=no_state(q, v) if dht is None else _state(dht),
        q=_rows(q, bf16),
        k=_rows(k, bf16),
        v=_rows(v, bf16),
        g=_rows(g, fp32),
        beta=beta,
        aqk=_rows(aqk, bf16),
        akk=_rows(akk, bf16),
        initial=no_state(q, v) if initial is None else _state(initial),
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.contiguous(),
    ), scale


@cache
def kernel(plan: Plan) -> load.Kernel:
    """The plan's kernels, loaded at their first use."""
    return load.get(plan.variant)


def sizes(plan: Plan, v: Tensor, sequences: int | None, count: int | None = None) -> tuple[int, int]:
    """Size of a call's workspace in bf16, and the segments each sequence is walked over in, from shapes alone unless
    `count` says how many; sequences: those of cu_seqlens, None without it."""
    batch, tokens, value_heads, value_dim = v.shape
    each = -(-tokens // CHUNK)
    chunks = each * batch if sequences is None else each + sequences
    full = each * batch if sequences is None else each
    sequences = batch if sequences is None else sequences
    if count is None:
        count = segments(plan.key_dim, value_dim, sequences, value_heads, full)
    return plan.config.workspace_bytes(chunks, sequences, batch * tokens, value_heads, count) // 2, count


def offsets_pair(cu_seqlens: Tensor | None, device: torch.device) -> list[Tensor]:
    """cu_seqlens as the kernels take it: in int64 and in int32, the one it is not (or both) without elements."""
    dtypes = (torch.int64, torch.int32)
    return [
        torch.empty(0, dtype=dtype, device=device)
        if cu_seqlens is None or cu_seqlens.dtype is not dtype
        else cu_seqlens
        for dtype in dtypes
    ]


def run(plan: Plan, arguments: tuple, count: int | None = None) -> tuple[Tensor, ...]:
    """kda_bwd by the plan's kernels on torch's current stream: gradients of q, k, v, g, beta, initial_state.

    Each in its input's dtype; dinitial_state is empty where initial_state is None. count: see `sizes`.
    """
    q, k, v, g, beta = arguments[2:7]
    with torch.cuda.device(q.device):
        x, scale = collect(arguments)
        size, count = sizes(plan, x.v, None if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1, count)
        workspace = torch.empty(size, dtype=torch.bfloat16, device=q.device)
        dq, dk, dv = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (q, k, v))
        dg = torch.empty(g.shape, dtype=torch.float32, device=g.device)
        dbeta = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
        dh0 = torch.empty(x.initial.shape, dtype=torch.float32, device=q.device)
        inputs = (x.do, x.dht, x.q, x.k, x.v, x.g, x.beta, x.aqk, x.akk, x.initial)
        offsets = offsets_pair(x.cu_seqlens, q.device)
        kernel(plan)(*inputs, *offsets, workspace, dq, dk, dv, dg, dbeta, dh0, scale, count)
        return dq, dk, dv, dg.to(g.dtype), dbeta, dh0


def warm(plan: Plan, device: torch.device) -> None:
    """Make the plan's kernels ready: run them on one token of zeros, in segments, which takes all of them."""
    key_dim, value_dim = plan.key_dim, plan.value_dim
    value_heads = 1 if plan.config.group_sum is None else 2
    bf16 = torch.bfloat16
    do = torch.zeros((1, 1, value_heads, value_dim), dtype=bf16, device=device)
    q = torch.zeros((1, 1, 1, key_dim), dtype=bf16, device=device)
    g = torch.zeros((1, 1, value_heads, key_dim), device=device)
    square = torch.zeros((1, 1, value_heads, CHUNK), dtype=bf16, device=device)
    state = torch.zeros((1, value_heads, key_dim, value_dim), device=device)
    cu_seqlens = torch.tensor([0, 1], device=device) if plan.packed else None
    beta = g[..., 0].to(getattr(torch, plan.config.beta))
    run(plan, (do, state, q, q, do, g, beta, square, square, state, cu_seqlens, 1.0), count=3)
