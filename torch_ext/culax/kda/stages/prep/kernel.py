"""Prep: everything a chunk needs before the scans, for all chunks at once.

One CTA a chunk and value head, K / 16 warps, one role. Reads q, k, v, g, beta and P = (I + L)^-1 as the forward saved
it (bf16), writes -W and U (the sign lets both scans accumulate), s q 2^G, k 2^(G_last - G) in bf16 and 2^G_last in
fp32. No pipeline: a CTA loads once, and other CTAs of the multiprocessor cover its latency.
"""

import cutlass
import cutlass.cute as cute

from culax.device import fakes
from culax.device.sizes import CHUNK
from culax.kda.stages.prep import layouts, roles
from culax.kda.stages.prep.config import PrepConfig


@cute.kernel
def prep_kernel(
    gmem: roles.Gmem,
    value_heads: cutlass.Int32,
    group: cutlass.Int32,
    scale: cutlass.Float32,
    config: cutlass.Constexpr,
) -> None:
    """Grid (NT * HV): CTA i is value head i mod HV of chunk i / HV."""
    cta = cute.arch.block_idx()[0]
    index, value_head = cta // value_heads, cta % value_heads
    roles.prepare(config, gmem, layouts.allocate(config), index, (value_head, value_head // group), scale)


def entry(config: PrepConfig) -> tuple:
    """The function to compile and its fake arguments: (q, k, v, g, beta, Akk, table, -W, U, qg, kg, decay, scale,
    stream)."""

    @cute.jit
    def prep(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        akk: cute.Tensor,
        table: cute.Tensor,
        minus_w: cute.Tensor,
        u: cute.Tensor,
        qg: cute.Tensor,
        kg: cute.Tensor,
        decay: cute.Tensor,
        scale: cutlass.Float32,
        stream,
    ) -> None:
        chunks, value_heads = table.shape[0], v.shape[2]
        gmem = roles.Gmem(q, k, v, g, beta, akk, table, minus_w, u, qg, kg, decay)
        if chunks * value_heads > 0:
            prep_kernel(gmem, value_heads, value_heads // q.shape[2], scale, config).launch(
                grid=(chunks * value_heads, 1, 1),
                block=(config.threads, 1, 1),
                min_blocks_per_mp=2,
                preferred_smem_carveout=100,
                stream=stream,
            )

    key, value = config.key_dim, config.value_dim
    bf16 = cutlass.BFloat16
    return prep, (
        fakes.rows(bf16, key),
        fakes.rows(bf16, key),
        fakes.rows(bf16, value),
        fakes.rows(cutlass.Float32, key),
        fakes.column(cutlass.Float32),
        fakes.rows(bf16, CHUNK),
        fakes.table(),
        fakes.image(CHUNK, key),
        fakes.image(CHUNK, value),
        fakes.image(CHUNK, key),
        fakes.image(CHUNK, key),
        fakes.compact(key),
        cutlass.Float32(1.0),
        fakes.stream(),
    )
