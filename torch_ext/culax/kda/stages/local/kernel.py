"""Local: all gradients of a chunk but the states', fused (B1's E, B3, B4, B6), for all chunks at once.

A cluster of K / 64 CTAs a chunk and value head; a CTA has 64 key columns and its share of the value columns, two
warpgroups, and leaves room for a second CTA on its SM, whose products fill its waits. Every tile is loaded once, so
there is no ring: a tile's place is taken by later ones behind the barrier that follows the wait for all products that
read it. Timeline, a barrier between the lines; what the two warpgroups do is divided by |:

    loads of do v_new dvn h dh k v P beta and the gates; gates summed within 8 rows
    do S^T, P^T dvn | do v_new^T, dvn v^T
    dv over v, dvn S^T | E over do, v_new dS^T; sums of S dS
    dW | dks; ke; q is loaded over v_new
    dX | M's second part, sent to the other CTA; dv leaves; kd; sums of k dks
    M with what the other CTA sent, P^T M, dL in the second; qd, kbd
    dq, x from earlier blocks | t from later blocks
    diagonal blocks by columns, sums of dG within 8 rows
    outputs
"""

import cutlass
import cutlass.cute as cute

from culax.device import chunks, fakes, launches
from culax.device.sizes import CHUNK
from culax.kda.stages.local import columns, layouts, memory, roles
from culax.kda.stages.local.config import GROUP, THREADS, LocalConfig


@cute.jit
def _local(
    config: cutlass.Constexpr, gmem: memory.Gmem, smem: layouts.Smem, task: memory.Task, scale: cutlass.Float32
) -> None:
    sums = columns.load_gates(gmem, task)
    memory.load_inputs(config, gmem, smem, task)
    columns.cumulate(sums, smem)
    memory.wait_for_inputs(smem)
    if cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP) == 0:
        roles.first(config, gmem, smem, task, sums, scale)
    else:
        roles.second(config, gmem, smem, task, sums, scale)
    cute.arch.sync_threads()
    if cutlass.const_expr(config.splits > 1):
        cute.arch.cluster_arrive_relaxed()
    columns.finish(config, gmem, smem, task)


@cute.kernel
def local_kernel(
    gmem: memory.Gmem,
    value_heads: cutlass.Int32,
    group: cutlass.Int32,
    scale: cutlass.Float32,
    config: cutlass.Constexpr,
) -> None:
    """Grid (NT * HV * splits): CTA i is rank i mod splits of cluster j = i / splits, that of value head j mod HV of
    chunk j / HV."""
    cta = cute.arch.block_idx()[0]
    cluster, rank = cta // config.splits, cta % config.splits
    index, value_head = cluster // value_heads, cluster % value_heads
    task = memory.Task(index, chunks.read_chunk(gmem.table, index), value_head, value_head // group, rank)
    smem = layouts.allocate(config)
    if task.chunk.rows > 0:
        _local(config, gmem, smem, task, scale)
    elif task.chunk.rows < 0:
        memory.write_zeros(config, gmem, task)


def launch(config: LocalConfig, gmem: memory.Gmem, heads: tuple, scale: cutlass.Float32, stream) -> None:
    """heads: value heads, and value heads of a query head."""
    value_heads, group = heads
    with launches.most_shared_memory():
        local_kernel(gmem, value_heads, group, scale, config).launch(
            grid=(gmem.table.shape[0] * value_heads * config.splits, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(config.splits, 1, 1),
            min_blocks_per_mp=config.ctas,
            preferred_smem_carveout=100,
            stream=stream,
        )


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
        gmem = memory.Gmem(q, k, v, g, beta, do, akk, v_new, dvn, h, dh, table, dq, dk, dv, dg, dbeta)
        if count * value_heads > 0:
            launch(config, gmem, (value_heads, value_heads // q.shape[2]), scale, stream)

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
        fakes.image(CHUNK, value),
        fakes.image(CHUNK, value),
        fakes.image(key, value),
        fakes.image(key, value),
        fakes.table(),
        fakes.rows(out, key),
        fakes.rows(out, key),
        fakes.rows(bf16, value),
        fakes.rows(cutlass.Float32, key),
        fakes.column(cutlass.Float32),
        cutlass.Float32(1.0),
        fakes.stream(),
    )
