"""The KDA backward's stages one by one, as the tests launch them: tapes as tensors, a compiled variant a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from culax.kda.launch import Inputs
from culax.kda.plan import Plan
from culax.kda.problem import CHUNK
from culax.runtime import load


@dataclass(frozen=True)
class Tapes:
    """Workspaces between the kernels: [NT, HV, rows * columns] in bf16, each entry the image of a tile as
    device/images.py states it, decay [NT, HV, K] in fp32, the chunk table [rows, 4] and bounds [N + 1] in int32."""

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
    sizes = [rows * columns for rows, columns in (keys, values, keys, keys, states, values, states, values)]
    buffer = torch.empty(chunks * heads * sum(sizes), dtype=torch.bfloat16, device=device)
    parts = buffer.split([chunks * heads * size for size in sizes])
    views = [part.view(chunks, heads, size) for part, size in zip(parts, sizes)]
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
    """The callables of a plan's stages, under the plan's names."""

    chunk_table: Callable[..., None]
    prep: Callable[..., None]
    scans: Callable[..., None]
    summary: Callable[..., None]
    join: Callable[..., None]
    local: Callable[..., None]
    group_sum: Callable[..., None] | None


@cache
def kernels(plan: Plan) -> Kernels:
    """The stages of a plan, loaded at their first use."""
    loaded = {name: load.get(variant) for name, variant in plan.stages.items()}
    return Kernels(**{"group_sum": None, **loaded})


def build_table(ready: Kernels, x: Inputs, t: Tapes) -> None:
    """The chunk table and the sequences' first chunks."""
    if x.cu_seqlens is None:
        ready.chunk_table(t.bounds, t.table, x.q.shape[1])
    else:
        ready.chunk_table(x.cu_seqlens, torch.empty_like(t.bounds), t.bounds, t.table, x.q.shape[1])


def prep(ready: Kernels, x: Inputs, t: Tapes, scale: float) -> None:
    """F3 for every chunk."""
    ready.prep(x.q, x.k, x.v, x.g, x.beta, x.akk, t.table, t.minus_w, t.u, t.qg, t.kg, t.decay, scale)


@dataclass(frozen=True)
class Summaries:
    """States before the segments and gradients of those after them [N * segments, HV, K, V], transitions [N * segments,
    HV, K, K] as they are and transposed, fp32, all NaN at first."""

    starts: Tensor
    ends: Tensor
    transitions: Tensor
    transposed: Tensor


def _reads(x: Inputs, t: Tapes, initial: Tensor, dht: Tensor) -> tuple[Tensor, ...]:
    return (t.qg, t.minus_w, t.u, t.kg, t.decay, x.do, x.aqk, t.table, t.bounds, initial, dht)


def summarise(ready: Kernels, x: Inputs, t: Tapes, segments: int) -> Summaries:
    """The first segments' walks, and last states and transitions of the others alone."""
    heads, key_dim, value_dim = x.v.shape[2], x.q.shape[3], x.v.shape[3]
    rows = (t.bounds.shape[0] - 1) * segments
    widths = (value_dim, value_dim, key_dim, key_dim)
    nan = float("nan")
    s = Summaries(*(torch.full((rows, heads, key_dim, width), nan, device=x.q.device) for width in widths))
    walked = t.h, t.v_new, s.starts, t.dh, t.dvn, s.ends
    ready.summary(_reads(x, t, x.initial, x.dht), *walked, s.transitions, s.transposed, segments)
    return s


def join(ready: Kernels, x: Inputs, s: Summaries, segments: int) -> None:
    """The states between the segments out of their summaries, in place."""
    ready.join(x.initial, x.dht, s.transitions, s.transposed, s.starts, s.ends, segments)


def scans(ready: Kernels, x: Inputs, t: Tapes, last: tuple[Tensor, Tensor], segments: int = 1) -> None:
    """F4, B1's dv_loc and B2: states before the chunks and v_new, gradients of the states after them and dvn; final
    states and dh0 unless these are empty."""
    initial, dht = x.initial, x.dht
    if segments > 1:
        s = summarise(ready, x, t, segments)
        join(ready, x, s, segments)
        initial, dht = s.starts, s.ends
    final, dh0 = last
    ready.scans(_reads(x, t, initial, dht), t.h, t.v_new, final, t.dh, t.dvn, dh0, segments)


def local(ready: Kernels, x: Inputs, t: Tapes, gradients: tuple[Tensor, ...], scale: float) -> None:
    """B1's E, B3, B4, B6: dq, dk (or their shares), dv, dg, dbeta."""
    ready.local(x.q, x.k, x.v, x.g, x.beta, x.do, x.akk, t.v_new, t.dvn, t.h, t.dh, t.table, *gradients, scale)
