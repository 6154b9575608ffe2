"""Runs a plan of KDA kernels on tensors: copies what the kernels cannot read in place, takes workspaces, launches in
order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..device.sizes import PAD, PADDED_RESULTS, tile_elements
from ..reference import kda_chunked
from ..runtime import load
from .plan import Plan
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


@dataclass(frozen=True)
class Tapes:
    """Workspaces between the kernels: [NT, HV, rows * columns] in bf16, each entry the image of a tile as
    device/images.py states it (h, v_new, dh, dvn: padded tiles [NT, HV, rows, columns]), decay [NT, HV, K] in fp32, the
    chunk table [rows, 4] and bounds [N + 1] in int32."""

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


def allocate(inputs: Inputs) -> Tapes:
    """Workspaces for a call; their sizes follow from shapes alone.

    A table of packed sequences has two rows more than there can be chunks: the stretches before the first and behind
    the last sequence. All tapes in bf16 lie in one buffer: an allocation costs the host more than a view.
    """
    batch, tokens, heads, value_dim = inputs.v.shape
    key_dim, device = inputs.q.shape[3], inputs.q.device
    packed = inputs.cu_seqlens is not None
    sequences = inputs.cu_seqlens.shape[0] - 1 if inputs.cu_seqlens is not None else batch
    each = -(-tokens // CHUNK)
    chunks = each + sequences if packed else each * batch
    keys, values, states = (CHUNK, key_dim), (CHUNK, value_dim), (key_dim, value_dim)
    shapes = (keys, values, keys, keys, states, values, states, values)
    padded = (False,) * 4 + (PADDED_RESULTS,) * 4
    sizes = [tile_elements(*shape) if rows else shape[0] * shape[1] for shape, rows in zip(shapes, padded)]
    buffer = torch.empty(chunks * heads * sum(sizes), dtype=torch.bfloat16, device=device)
    views, offset = [], 0
    for (rows, columns), size, pad in zip(shapes, sizes, padded):
        if pad:
            view = buffer.as_strided((chunks, heads, rows, columns), (heads * size, size, columns + PAD, 1), offset)
        else:
            view = buffer.as_strided((chunks, heads, size), (heads * size, size, 1), offset)
        views.append(view)
        offset += chunks * heads * size
    minus_w, u, qg, kg, h, v_new, dh, dvn = views
    return Tapes(
        table=torch.empty((chunks + 2 * packed, 4), dtype=torch.int32, device=device),
        bounds=torch.empty(sequences + 1, dtype=torch.int32, device=device),
        minus_w=minus_w,
        u=u,
        qg=qg,
        kg=kg,
        decay=torch.empty((chunks, heads, key_dim), dtype=torch.float32, device=device),
        h=h,
        v_new=v_new,
        dh=dh,
        dvn=dvn,
    )


@dataclass(frozen=True)
class Kernels:
    """The callables of a plan's variants, under the plan's names."""

    chunk_table: Callable[..., None]
    prep: Callable[..., None]
    scan: Callable[..., None]
    reverse_scan: Callable[..., None]
    local: Callable[..., None]
    group_sum: Callable[..., None] | None


_ready: dict[int, tuple[Plan, Kernels]] = {}


def kernels(plan: Plan) -> Kernels:
    """A plan's kernels, loaded at its first call. Plans are told apart by identity: there is one of each."""
    found = _ready.get(id(plan))
    if found is None:
        loaded = Kernels(
            chunk_table=load.get(plan.chunk_table),
            prep=load.get(plan.prep),
            scan=load.get(plan.scan),
            reverse_scan=load.get(plan.reverse_scan),
            local=load.get(plan.local),
            group_sum=None if plan.group_sum is None else load.get(plan.group_sum),
        )
        found = _ready[id(plan)] = plan, loaded
    return found[1]


def build_table(ready: Kernels, x: Inputs, t: Tapes) -> None:
    """The chunk table and the sequences' first chunks."""
    if x.cu_seqlens is None:
        ready.chunk_table(t.bounds, t.table, x.q.shape[1])
    else:
        ready.chunk_table(x.cu_seqlens, torch.empty_like(t.bounds), t.bounds, t.table, x.q.shape[1])


def prep(ready: Kernels, x: Inputs, t: Tapes, scale: float) -> None:
    """F3 for every chunk."""
    ready.prep(x.q, x.k, x.v, x.g, x.beta, x.akk, t.table, t.minus_w, t.u, t.qg, t.kg, t.decay, scale)


def scan(ready: Kernels, x: Inputs, t: Tapes, final: Tensor) -> None:
    """F4: the states before the chunks, v_new, and the final states unless `final` is empty."""
    ready.scan(t.minus_w, t.u, t.kg, t.decay, t.bounds, x.initial, t.h, t.v_new, final)


def reverse_scan(ready: Kernels, x: Inputs, t: Tapes, dh0: Tensor) -> None:
    """B1's dv_loc and B2: the gradients of the states after the chunks, dvn, and dh0 unless it is empty."""
    ready.reverse_scan(t.qg, t.minus_w, t.kg, t.decay, x.do, x.aqk, t.table, t.bounds, x.dht, t.dh, t.dvn, dh0)


def local(ready: Kernels, x: Inputs, t: Tapes, gradients: tuple[Tensor, ...], scale: float) -> None:
    """B1's E, B3, B4, B6: dq, dk (or their shares), dv, dg, dbeta."""
    ready.local(x.q, x.k, x.v, x.g, x.beta, x.do, x.akk, t.v_new, t.dvn, t.h, t.dh, t.table, *gradients, scale)


@cache
def kernel(plan: Plan) -> load.Kernel:
    """The plan's kernels, loaded at their first use."""
    return load.get(plan.backward)


def workspace_bytes(plan: Plan, v: Tensor, sequences: int | None) -> int:
    """Size of a call's workspace, from shapes alone; sequences: those of cu_seqlens, None without it."""
    batch, tokens, value_heads, _ = v.shape
    each = -(-tokens // CHUNK)
    chunks = each * batch if sequences is None else each + sequences
    return plan.config.workspace_bytes(chunks, batch if sequences is None else sequences, batch * tokens, value_heads)


def offsets_pair(cu_seqlens: Tensor | None, device: torch.device) -> list[Tensor]:
    """cu_seqlens as the kernels take it: in int64 and in int32, the one it is not (or both) without elements."""
    dtypes = (torch.int64, torch.int32)
    return [
        torch.empty(0, dtype=dtype, device=device)
        if cu_seqlens is None or cu_seqlens.dtype is not dtype
        else cu_seqlens
        for dtype in dtypes
    ]


def run(plan: Plan, arguments: tuple) -> tuple[Tensor, ...]:
    """kda_bwd by the plan's kernels on torch's current stream: gradients of q, k, v, g, beta, initial_state.

    Each in its input's dtype; dinitial_state is empty where initial_state is None.
    """
    q, k, v, g, beta = arguments[2:7]
    with torch.cuda.device(q.device):
        x, scale = collect(arguments)
        size = workspace_bytes(plan, x.v, None if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1)
        workspace = torch.empty(size, dtype=torch.int8, device=q.device)
        dq, dk, dv = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (q, k, v))
        dg = torch.empty(g.shape, dtype=torch.float32, device=g.device)
        dbeta = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
        dh0 = torch.empty(x.initial.shape, dtype=torch.float32, device=q.device)
        inputs = (x.do, x.dht, x.q, x.k, x.v, x.g, x.beta, x.aqk, x.akk, x.initial)
        offsets = offsets_pair(x.cu_seqlens, q.device)
        kernel(plan)(*inputs, *offsets, workspace, dq, dk, dv, dg, dbeta, dh0, scale)
        return dq, dk, dv, dg.to(g.dtype), dbeta, dh0


def warm(plan: Plan, device: torch.device) -> None:
    """Make the plan's kernels ready: run them on one token of zeros."""
    key_dim, value_dim = plan.key_dim, plan.value_dim
    value_heads = 1 if plan.group_sum is None else 2
    bf16 = torch.bfloat16
    do = torch.zeros((1, 1, value_heads, value_dim), dtype=bf16, device=device)
    q = torch.zeros((1, 1, 1, key_dim), dtype=bf16, device=device)
    g = torch.zeros((1, 1, value_heads, key_dim), device=device)
    square = torch.zeros((1, 1, value_heads, CHUNK), dtype=bf16, device=device)
    state = torch.zeros((1, value_heads, key_dim, value_dim), device=device)
    cu_seqlens = torch.tensor([0, 1], device=device) if plan.packed else None
    beta = g[..., 0].to(getattr(torch, plan.config.beta))
    run(plan, (do, state, q, q, do, g, beta, square, square, state, cu_seqlens, 1.0))
