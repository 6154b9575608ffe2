"""Scan: the state before every chunk and v_new, sequential over a sequence's chunks (F4).

One CTA a sequence, value head and slice of 64 value columns: a consumer warpgroup that keeps the state in registers,
and a producer warp. Ring (rings.py): a chunk's -W, kg, U and decay a stage, `stages` deep, bulk copies; full: one
arrival with the bytes, empty: one arrival a consumer warp, behind the wait for the chunk's last product.
A chunk of the consumers: round S, write h, start S^T W^T, meanwhile decay S and send h; round v_new, write it, start
v_new^T kg, meanwhile send it; release the stage.
"""

import cutlass
import cutlass.cute as cute

from culax.device import fakes, rings, states
from culax.device.sizes import CHUNK
from culax.device.walks import WARPGROUP
from culax.kda.stages.scan import layouts, roles
from culax.kda.stages.scan.config import ScanConfig


@cute.kernel
def scan_kernel(gmem: roles.Gmem, value_heads: cutlass.Int32, config: cutlass.Constexpr) -> None:
    """Grid (N * HV * V / 64)."""
    place = states.place_of_cta(value_heads, config.slices)
    smem = layouts.allocate(config)
    rings.init_ring(smem.ring)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < WARPGROUP // 32:
        roles.scan(config, gmem, smem, place)
    else:
        roles.load(config, gmem, smem, place)


def entry(config: ScanConfig) -> tuple:
    """The function to compile and its fake arguments: (-W, U, kg, decay, bounds, initial, h, v_new, final, stream)."""

    @cute.jit
    def scan(
        minus_w: cute.Tensor,
        u: cute.Tensor,
        kg: cute.Tensor,
        decay: cute.Tensor,
        bounds: cute.Tensor,
        initial: cute.Tensor,
        h: cute.Tensor,
        v_new: cute.Tensor,
        final: cute.Tensor,
        stream,
    ) -> None:
        count = (bounds.shape[0] - 1) * u.shape[1]
        gmem = roles.Gmem(minus_w, u, kg, decay, bounds, initial, h, v_new, final)
        if count > 0:
            scan_kernel(gmem, u.shape[1], config).launch(
                grid=(count * config.slices, 1, 1), block=(config.threads, 1, 1), stream=stream
            )

    key, value = config.key_dim, config.value_dim
    return scan, (
        fakes.image(CHUNK, key),
        fakes.image(CHUNK, value),
        fakes.image(CHUNK, key),
        fakes.compact(key),
        fakes.vector(cutlass.Int32),
        fakes.compact(key, value),
        fakes.image(key, value),
        fakes.image(CHUNK, value),
        fakes.compact(key, value),
        fakes.stream(),
    )
