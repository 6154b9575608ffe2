"""Local: all gradients of a chunk but the states', fused (B1's E, B3, B4, B6), for all chunks at once.

One CTA a chunk and value head, K / 8 warps, one role; every operand is read once and every gradient written once. No
pipeline: a CTA loads once. Timeline, a barrier between the lines:

    loads of do v_new dvn h dh; q k v P and the gates arrive later
    E, do S^T, v_new dS^T, dW; sums of S dS; gates summed within blocks
    G into h's slot, its sums within blocks into dh's, ke into v_new's, dW into do's
    M to its square; dX, dY; sums of k dks and dY v
    dv into ke's slot; kd, qd, kbd into the slots of v, dvn, dW
    P^T M; dv leaves
    dL into M's square
    off-diagonal blocks
    dq, x and t by columns through the slots of v .. do and the squares: diagonal blocks, reverse sum
    outputs
"""

import cutlass
import cutlass.cute as cute

from culax.device import bulk, chunks, fakes, gates, warp_tiles
from culax.device.sizes import CHUNK
from culax.kda.stages.local import columns, layouts, roles
from culax.kda.stages.local.config import LocalConfig


@cute.jit
def _local(
    config: cutlass.Constexpr, gmem: roles.Gmem, smem: layouts.Smem, task: roles.Task, scale: cutlass.Float32
) -> None:
    warp = roles.warp_of(config)
    raw_gates = roles.load_inputs(config, gmem, smem, task)
    rows = task.chunk.rows
    cute.arch.cp_async_wait_group(1)
    bulk.wait(smem.arrived, 0)
    cute.arch.sync_threads()
    parts, dw = roles.state_products(config, smem, warp, scale)
    roles.state_row_sums(config, smem)
    inside = gates.cumulate(raw_gates, smem.gate_sums)
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    before, _ = gates.before_and_last(smem.gate_sums, width=1)
    owner = columns.Owner(*gates.column_owner(config.key_dim, width=1))
    warp_tiles.store_fragment(dw, warp.keys(smem.dw))
    columns.gate_and_keys(smem, owner, inside, before[0])
    cute.arch.sync_threads()
    dx = roles.key_products(config, smem, warp)
    roles.apply_gates(smem, warp, parts, dx, rows - 1, scale)
    dv = roles.value_gradient(config, smem, warp)
    cute.arch.sync_threads()
    warp_tiles.store_fragment(dv, warp.part(smem.dv, config.value_dim // config.groups))
    columns.block_operands(smem, owner)
    cute.arch.sync_threads()
    chunks.store_rows(smem.dv, chunks.chunk_rows(gmem.dv, task.chunk, task.value_head), rows, config.threads)
    roles.inverse_gradient(config, smem, warp)
    cute.arch.sync_threads()
    roles.earlier_blocks(smem, warp, parts)
    roles.later_blocks(smem, warp, parts)
    # All warps have read kd, qd, kbd, E and dL before the stage tiles take their slots.
    cute.arch.sync_threads()
    columns.finish(config, gmem, smem, task, warp, owner, parts)


@cute.kernel
def local_kernel(
    gmem: roles.Gmem,
    value_heads: cutlass.Int32,
    group: cutlass.Int32,
    scale: cutlass.Float32,
    config: cutlass.Constexpr,
) -> None:
    """Grid (NT * HV): CTA i is value head i mod HV of chunk i / HV."""
    cta = cute.arch.block_idx()[0]
    index, value_head = cta // value_heads, cta % value_heads
    task = roles.Task(index, chunks.read_chunk(gmem.table, index), value_head, value_head // group)
    smem = layouts.allocate(config)
    if task.chunk.rows > 0:
        _local(config, gmem, smem, task, scale)
    if task.chunk.rows < 0:
        columns.write_zeros(config, gmem, task)


def entry(config: LocalConfig) -> tuple:
    """The function to compile and its fake arguments.

    (q, k, v, g, beta, do, Akk, v_new, dvn, h, dh, table, dq, dk, dv, dg, dbeta, scale, stream);
    dq and dk are [B, T, H, K] bf16, or [B, T, HV, K] fp32 with ``partial``.
    """

    @cute.jit
    def local(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        do: cute.Tensor,
        akk: cute.Tensor,
        v_new: cute.Tensor,
        dvn: cute.Tensor,
        h: cute.Tensor,
        dh: cute.Tensor,
        table: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dg: cute.Tensor,
        dbeta: cute.Tensor,
        scale: cutlass.Float32,
        stream,
    ) -> None:
        count, value_heads = table.shape[0], v.shape[2]
        gmem = roles.Gmem(q, k, v, g, beta, do, akk, v_new, dvn, h, dh, table, dq, dk, dv, dg, dbeta)
        if count * value_heads > 0:
            local_kernel(gmem, value_heads, value_heads // q.shape[2], scale, config).launch(
                grid=(count * value_heads, 1, 1), block=(config.threads, 1, 1), stream=stream
            )

    key, value = config.key_dim, config.value_dim
    bf16 = cutlass.BFloat16
    out = cutlass.Float32 if config.partial else bf16
    return local, (
        fakes.rows(bf16, key),
        fakes.rows(bf16, key),
        fakes.rows(bf16, value),
        fakes.rows(cutlass.Float32, key),
        fakes.column(cutlass.Float32),
        fakes.rows(bf16, value),
        fakes.rows(bf16, CHUNK),
        fakes.tape(CHUNK, value),
        fakes.tape(CHUNK, value),
        fakes.tape(key, value),
        fakes.tape(key, value),
        fakes.table(),
        fakes.rows(out, key),
        fakes.rows(out, key),
        fakes.rows(bf16, value),
        fakes.rows(cutlass.Float32, key),
        fakes.column(cutlass.Float32),
        cutlass.Float32(1.0),
        fakes.stream(),
    )
