"""The launch of a whole backward call: chunk table, prep, scans (with summaries and join before them, where sequences
have several segments), local, group sum, on one stream.

One host function, so that every tensor crosses from Python once; the stages' kernels are compiled into it as their own
entries compile them.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from culax.device import fakes
from culax.device.sizes import CHUNK
from culax.kda.stages.backward import layouts
from culax.kda.stages.backward.config import BackwardConfig
from culax.kda.stages.chunk_table import kernel as chunk_table
from culax.kda.stages.chunk_table.config import ChunkTableConfig
from culax.kda.stages.group_sum import kernel as group_sum
from culax.kda.stages.join import kernel as join
from culax.kda.stages.local import kernel as local
from culax.kda.stages.prep import kernel as prep
from culax.kda.stages.scans import kernel as scans


@dataclass(frozen=True)
class Stages:
    """The stages' host functions; the chunk table's by the dtype of its offsets."""

    tables: dict[str, Any]
    prep: Any
    scans: Any
    summary: Any
    join: Any
    local: Any
    group_sum: Any


def _stages(config: BackwardConfig) -> Stages:
    return Stages(
        tables={offsets: chunk_table.entry(ChunkTableConfig(offsets))[0] for offsets in ("int64", "int32", "")},
        prep=prep.entry(config.prep)[0],
        scans=scans.entry(config.scans)[0],
        summary=scans.entry(config.summary)[0],
        join=join.entry(config.join)[0],
        local=local.entry(config.local)[0],
        group_sum=None if config.group_sum is None else group_sum.entry(config.group_sum)[0],
    )


def _sizes(q: cute.Tensor, v: cute.Tensor, offsets: int | Int32, segments: Int32) -> layouts.Sizes:
    """The call's sizes; offsets: the number of entries of cu_seqlens, 0 for sequences of equal length."""
    batch, tokens, value_heads = q.shape[0], q.shape[1], v.shape[2]
    packed = cutlass.min(offsets, 1)
    sequences = packed * (offsets - 1) + (1 - packed) * batch
    each = (tokens + CHUNK - 1) // CHUNK
    chunks = packed * (each + sequences) + (1 - packed) * each * batch
    return layouts.Sizes(chunks, sequences, chunks + 2 * packed, batch * tokens, value_heads, segments)


def _share(share: cute.Tensor, like: cute.Tensor) -> cute.Tensor:
    """A vector as [B, T, HV, K]."""
    batch, tokens, heads, key_dim = like.shape
    row = Int64(heads) * key_dim
    stride = tuple(cute.assume(step, divby=4) for step in (tokens * row, row, Int64(key_dim)))
    stride = (*stride, 1)
    return cute.make_tensor(share.iterator, cute.make_layout((batch, tokens, heads, key_dim), stride=stride))


def _grouped(share: cute.Tensor, dq: cute.Tensor, value_heads: Int32) -> cute.Tensor:
    """A vector as [B T H, group, K]."""
    batch, tokens, heads, key_dim = dq.shape
    group = value_heads // heads
    stride = (cute.assume(Int64(group) * key_dim, divby=key_dim), key_dim, 1)
    return cute.make_tensor(share.iterator, cute.make_layout((batch * tokens * heads, group, key_dim), stride=stride))


def _rows(dq: cute.Tensor) -> cute.Tensor:
    """A contiguous [B, T, H, K] as [B T H, K]."""
    batch, tokens, heads, key_dim = dq.shape
    return cute.make_tensor(dq.iterator, cute.make_layout((batch * tokens * heads, key_dim), stride=(key_dim, 1)))


def _no_states(states: cute.Tensor) -> cute.Tensor:
    """States that are not wanted: none of the shape's."""
    return _states(states.iterator, Int32(0), states)


def _states(start: cute.Pointer, rows: Int32, like: cute.Tensor) -> cute.Tensor:
    """States of another one's shape, but for their number."""
    _, heads, key_dim, value_dim = like.shape
    stride = (Int64(heads) * key_dim * value_dim, key_dim * value_dim, value_dim, 1)
    return cute.make_tensor(start, cute.make_layout((rows, heads, key_dim, value_dim), stride=stride))


def _either(one: Int32, a: cute.Tensor, b: cute.Tensor) -> cute.Tensor:
    """The states a if `one` is 1, b if it is 0: one launch serves both."""
    address = one * a.iterator.toint() + (1 - one) * b.iterator.toint()
    start = cute.make_ptr(cutlass.Float32, address, cute.AddressSpace.gmem, assumed_align=16)
    return _states(start, one * a.shape[0] + (1 - one) * b.shape[0], a)


def entry(config: BackwardConfig) -> tuple:
    """The function to compile and its fake arguments: (do, dht, q, k, v, g, beta, Aqk, Akk, initial, long_offsets,
    offsets, workspace, dq, dk, dv, dg, dbeta, dh0, scale, segments, stream).

    cu_seqlens is given as one of long_offsets (int64) and offsets (int32), or neither for sequences of equal length;
    what is not given has no elements, nor have absent states. workspace: bf16, as large as
    BackwardConfig.workspace_bytes says. Gradients are contiguous; beta and dbeta have config.beta's dtype. segments: of
    every sequence, each walked over by CTAs of its own.
    """
    stages = _stages(config)

    @cute.jit
    def backward(
        do: cute.Tensor,
        dht: cute.Tensor,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        aqk: cute.Tensor,
        akk: cute.Tensor,
        initial: cute.Tensor,
        long_offsets: cute.Tensor,
        offsets: cute.Tensor,
        workspace: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dg: cute.Tensor,
        dbeta: cute.Tensor,
        dh0: cute.Tensor,
        scale: cutlass.Float32,
        segments: Int32,
        stream,
    ) -> None:
        t = layouts.cut(config, workspace, _sizes(q, v, long_offsets.shape[0] + offsets.shape[0], segments))
        if long_offsets.shape[0] > 0:
            stages.tables["int64"](long_offsets, t.tokens_of, t.bounds, t.table, q.shape[1], stream)
        elif offsets.shape[0] > 0:
            stages.tables["int32"](offsets, t.tokens_of, t.bounds, t.table, q.shape[1], stream)
        else:
            stages.tables[""](t.bounds, t.table, q.shape[1], stream)
        stages.prep(q, k, v, g, beta, akk, t.table, t.minus_w, t.u, t.qg, t.kg, t.decay, scale, stream)
        read = (t.qg, t.minus_w, t.u, t.kg, t.decay, do, aqk, t.table, t.bounds)
        if segments > 1:
            walked = (t.h, t.v_new, t.starts, t.dh, t.dvn, t.ends)
            stages.summary((*read, initial, dht), *walked, t.transitions, t.transposed, segments, stream)
            stages.join(initial, dht, t.transitions, t.transposed, t.starts, t.ends, segments, stream)
        one = Int32(1) // segments
        states = (_either(one, initial, t.starts), _either(one, dht, t.ends))
        final = _no_states(initial)
        stages.scans((*read, *states), t.h, t.v_new, final, t.dh, t.dvn, dh0, segments, stream)
        dqk = (dq, dk)
        if cutlass.const_expr(config.group_sum is not None):
            dqk = tuple(_share(share, g) for share in t.shares)
        stages.local(
            *(q, k, v, g, beta, do, akk, t.v_new, t.dvn, t.h, t.dh, t.table), *dqk, dv, dg, dbeta, scale, stream
        )
        if cutlass.const_expr(config.group_sum is not None):
            shares = tuple(_grouped(share, dq, v.shape[2]) for share in t.shares)
            stages.group_sum(*shares, _rows(dq), _rows(dk), stream)

    key, value = config.prep.key_dim, config.prep.value_dim
    bf16, fp32 = cutlass.BFloat16, cutlass.Float32
    beta = bf16 if config.beta == "bfloat16" else fp32
    states = [fakes.compact(key, value) for _ in range(3)]
    return backward, (
        fakes.rows(bf16, value),
        states[0],
        fakes.rows(bf16, key),
        fakes.rows(bf16, key),
        fakes.rows(bf16, value),
        fakes.rows(fp32, key),
        fakes.column(beta),
        fakes.rows(bf16, CHUNK),
        fakes.rows(bf16, CHUNK),
        states[1],
        fakes.vector(Int64),
        fakes.vector(Int32),
        fakes.buffer(),
        fakes.rows(bf16, key),
        fakes.rows(bf16, key),
        fakes.rows(bf16, value),
        fakes.rows(fp32, key),
        fakes.column(beta),
        states[2],
        fp32(1.0),
        Int32(1),
        fakes.stream(),
    )
