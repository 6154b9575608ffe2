"""Runs a plan of KDA kernels on tensors: copies what the kernels cannot read in place, takes workspaces, launches in
order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..device.sizes import PAD
from ..reference import kda_chunked
from ..runtime import load
from .plan import Plan
from .problem import CHUNK


@dataclass(frozen=True)
class Inputs:
    """What the kernels read: q, k, v, do, Aqk, Akk in bf16, g and beta in fp32, all with rows of 16-byte accesses;
    states in fp32, empty if absent; cu_seqlens in int64 or None."""

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


@dataclass(frozen=True)
class Tapes:
    """Workspaces between the kernels: [NT, HV, ...] in bf16 with padded rows (decay fp32), the chunk table [rows, 4]
    and bounds [N + 1] in int32."""

    table: Tensor
    bounds: Tensor
    minus_w: Tensor
    u: Tensor
    qg: Tensor
    kg: Tensor
    decay: Tensor
    h: Tensor
    v_new: Tensor
    dh: Tensor
    dvn: Tensor


def _rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor itself if its dtype is `dtype` and its last dimension can be read 16 bytes at a time, else a
    contiguous copy."""
    step = 16 // dtype.itemsize
    if (
        tensor.dtype is dtype
        and tensor.stride(-1) == 1
        and not any(stride % step for stride in tensor.stride()[:-1])
        and tensor.data_ptr() % 16 == 0
    ):
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def _state(state: Tensor | None, v: Tensor, key_dim: int) -> Tensor:
    if state is None:
        return v.new_empty((0, v.shape[2], key_dim, v.shape[3]), dtype=torch.float32)
    return (
        state
        if state.is_contiguous() and state.data_ptr() % 16 == 0
        else state.clone(memory_format=torch.contiguous_format)
    )


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
        dht=_state(dht, v, q.shape[3]),
        q=_rows(q, bf16),
        k=_rows(k, bf16),
        v=_rows(v, bf16),
        g=_rows(g, fp32),
        beta=beta.to(fp32),
        aqk=_rows(aqk, bf16),
        akk=_rows(akk, bf16),
        initial=_state(initial, v, q.shape[3]),
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous(),
    ), scale


def allocate(inputs: Inputs) -> Tapes:
    """Workspaces for a call; their sizes follow from shapes alone.

    A table of packed sequences has two rows more than there can be chunks: the stretches before the first and behind
    the last sequence.
    """
    batch, tokens, heads, value_dim = inputs.v.shape
    key_dim, device = inputs.q.shape[3], inputs.q.device
    packed = inputs.cu_seqlens is not None
    sequences = inputs.cu_seqlens.shape[0] - 1 if inputs.cu_seqlens is not None else batch
    each = -(-tokens // CHUNK)
    chunks = each + sequences if packed else each * batch

    def tape(rows: int, columns: int) -> Tensor:
        padded = torch.empty((chunks, heads, rows, columns + PAD), dtype=torch.bfloat16, device=device)
        return padded[..., :columns]

    return Tapes(
        table=torch.empty((chunks + 2 * packed, 4), dtype=torch.int32, device=device),
        bounds=torch.empty(sequences + 1, dtype=torch.int32, device=device),
        minus_w=tape(CHUNK, key_dim),
        u=tape(CHUNK, value_dim),
        qg=tape(CHUNK, key_dim),
        kg=tape(CHUNK, key_dim),
        decay=torch.empty((chunks, heads, key_dim), dtype=torch.float32, device=device),
        h=tape(key_dim, value_dim),
        v_new=tape(CHUNK, value_dim),
        dh=tape(key_dim, value_dim),
        dvn=tape(CHUNK, value_dim),
    )


def build_table(plan: Plan, x: Inputs, t: Tapes) -> None:
    """The chunk table and the sequences' first chunks."""
    kernel = load.get(plan.chunk_table)
    if x.cu_seqlens is None:
        kernel(t.bounds, t.table, x.q.shape[1])
    else:
        kernel(x.cu_seqlens, torch.empty_like(t.bounds), t.bounds, t.table, x.q.shape[1])


def prep(plan: Plan, x: Inputs, t: Tapes, scale: float) -> None:
    """F3 for every chunk."""
    load.get(plan.prep)(x.q, x.k, x.v, x.g, x.beta, x.akk, t.table, t.minus_w, t.u, t.qg, t.kg, t.decay, scale)


def scan(plan: Plan, x: Inputs, t: Tapes) -> None:
    """F4: the states before the chunks, and v_new."""
    no_state = x.initial[:0]
    load.get(plan.scan)(t.minus_w, t.u, t.kg, t.decay, t.bounds, x.initial, t.h, t.v_new, no_state)


def reverse_scan(plan: Plan, x: Inputs, t: Tapes, dh0: Tensor) -> None:
    """B2: the gradients of the states after the chunks, dvn, and dh0."""
    load.get(plan.reverse_scan)(t.qg, t.minus_w, t.kg, t.decay, x.do, x.aqk, t.table, t.bounds, x.dht, t.dh, t.dvn, dh0)


def local(plan: Plan, x: Inputs, t: Tapes, gradients: tuple[Tensor, ...], scale: float) -> None:
    """B3, B4, B6: dq, dk (or their shares), dv, dg, dbeta."""
    load.get(plan.local)(x.q, x.k, x.v, x.g, x.beta, x.do, x.akk, t.v_new, t.dvn, t.h, t.dh, t.table, *gradients, scale)


def run(plan: Plan, arguments: tuple) -> tuple[Tensor, ...]:
    """kda_bwd by the plan's kernels on torch's current stream: gradients of q, k, v, g, beta, initial_state.

    Each in its input's dtype; dinitial_state is empty where initial_state is None.
    """
    q, k, v, g, beta = arguments[2:7]
    with torch.cuda.device(q.device):
        x, scale = collect(arguments)
        t = allocate(x)
        dq, dk, dv = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (q, k, v))
        dg, dbeta = (torch.empty(y.shape, dtype=torch.float32, device=y.device) for y in (g, beta))
        dh0 = torch.empty(x.initial.shape, dtype=torch.float32, device=q.device)
        build_table(plan, x, t)
        prep(plan, x, t, scale)
        scan(plan, x, t)
        reverse_scan(plan, x, t, dh0)
        if plan.group_sum is None:
            local(plan, x, t, (dq, dk, dv, dg, dbeta), scale)
        else:
            shares = tuple(torch.empty(g.shape, dtype=torch.float32, device=q.device) for _ in range(2))
            local(plan, x, t, (*shares, dv, dg, dbeta), scale)
            rows, group = dq.numel() // dq.shape[3], g.shape[2] // q.shape[2]
            grouped = (share.view(rows, group, g.shape[3]) for share in shares)
            load.get(plan.group_sum)(*grouped, dq.view(rows, -1), dk.view(rows, -1))
        return dq, dk, dv, dg.to(g.dtype), dbeta.to(beta.dtype), dh0
