"""Reverse scan: the gradient of the state after every chunk and dvn, sequential over a sequence's chunks from the last
(B1, B2).

One CTA a sequence, value head and slice of 64 value columns: a consumer warpgroup that keeps dS in registers, and a
producer warp. Ring (rings.py): a chunk's qg, -W, kg, decay (bulk copies), do and Aqk (TMA) a stage, `stages` deep;
full: one arrival with the bytes, empty: one arrival a consumer warp, behind the wait for the chunk's last product.
A chunk of the consumers: start do^T Aqk, round dS, write dh, start dS^T kg^T, meanwhile decay dS, start do^T qg, send
dh; round dvn, write it, start dvn^T W, meanwhile send it; release the stage. Rows behind the last chunk's valid ones
are cleared before they are read.
"""

import cutlass
import cutlass.cute as cute

from culax.device import fakes, rings, states
from culax.device.sizes import CHUNK
from culax.device.walks import WARPGROUP
from culax.kda.stages.reverse_scan import layouts, roles
from culax.kda.stages.reverse_scan.config import ReverseScanConfig


@cute.kernel
def reverse_scan_kernel(gmem: roles.Gmem, value_heads: cutlass.Int32, config: cutlass.Constexpr) -> None:
    """Grid (N * HV * V / 64)."""
    place = states.place_of_cta(value_heads, config.slices)
    smem = layouts.allocate(config)
    rings.init_ring(smem.ring)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < WARPGROUP // 32:
        roles.reverse_scan(config, gmem, smem, place)
    else:
        roles.load(config, gmem, smem, place)


def entry(config: ReverseScanConfig) -> tuple:
    """The function to compile and its fake arguments: (qg, -W, kg, decay, do, Aqk, table, bounds, dht, dh, dvn, dh0,
    stream)."""

    @cute.jit
    def reverse_scan(
        qg: cute.Tensor,
        minus_w: cute.Tensor,
        kg: cute.Tensor,
        decay: cute.Tensor,
        do: cute.Tensor,
        aqk: cute.Tensor,
        table: cute.Tensor,
        bounds: cute.Tensor,
        dht: cute.Tensor,
        dh: cute.Tensor,
        dvn: cute.Tensor,
        dh0: cute.Tensor,
        stream,
    ) -> None:
        count = (bounds.shape[0] - 1) * do.shape[2]
        gmem = roles.Gmem(
            qg,
            minus_w,
            kg,
            decay,
            *layouts.tile_loads(do),
            *layouts.tile_loads(aqk),
            table,
            bounds,
            dht,
            dh,
            dvn,
            dh0,
        )
        if count > 0:
            reverse_scan_kernel(gmem, do.shape[2], config).launch(
                grid=(count * config.slices, 1, 1), block=(config.threads, 1, 1), stream=stream
            )

    key, value = config.key_dim, config.value_dim
    bf16 = cutlass.BFloat16
    return reverse_scan, (
        fakes.image(CHUNK, key),
        fakes.image(CHUNK, key),
        fakes.image(CHUNK, key),
        fakes.compact(key),
        fakes.rows(bf16, value),
        fakes.rows(bf16, CHUNK),
        fakes.table(),
        fakes.vector(cutlass.Int32),
        fakes.compact(key, value),
        fakes.image(key, value),
        fakes.image(CHUNK, value),
        fakes.compact(key, value),
        fakes.stream(),
    )
