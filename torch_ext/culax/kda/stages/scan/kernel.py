"""Scan: the state before every chunk and v_new, sequential over a sequence's chunks (F4).

One CTA a sequence, value head and slice of value columns, eight warps, one role; the state stays in registers in fp32.
Pipeline: cp.async by all threads, `stages` deep, a chunk's -W, kg, U and decay a stage, one group a chunk; a stage is
refilled after the barrier that follows the last read of it. Two barriers a chunk: one for the state operand and the
arrived stage, one for the v_new operand.
"""

import cutlass
import cutlass.cute as cute

from culax.device import fakes, states
from culax.device.sizes import CHUNK
from culax.kda.stages.scan import layouts, roles
from culax.kda.stages.scan.config import ScanConfig


@cute.kernel
def scan_kernel(gmem: roles.Gmem, value_heads: cutlass.Int32, config: cutlass.Constexpr) -> None:
    """Grid (N * HV * V / columns)."""
    place = states.place_of_cta(value_heads, config.value_dim // config.columns)
    roles.scan(config, gmem, layouts.allocate(config), place)


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
                grid=(count * (config.value_dim // config.columns), 1, 1),
                block=(config.threads, 1, 1),
                stream=stream,
            )

    key, value = config.key_dim, config.value_dim
    return scan, (
        fakes.tape(CHUNK, key),
        fakes.tape(CHUNK, value),
        fakes.tape(CHUNK, key),
        fakes.compact(key),
        fakes.vector(cutlass.Int32),
        fakes.compact(key, value),
        fakes.tape(key, value),
        fakes.tape(CHUNK, value),
        fakes.compact(key, value),
        fakes.stream(),
    )
