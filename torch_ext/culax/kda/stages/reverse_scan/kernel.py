"""Reverse scan: the gradient of the state after every chunk and dvn, sequential over a sequence's chunks from the last
(B1, B2).

One CTA a sequence, value head and slice of value columns, eight warps, one role; dS stays in registers in fp32.
Pipeline: cp.async by all threads, `stages` deep, one chunk a stage and a group; a stage is refilled after the barrier
that follows the last read of it. Two barriers a chunk: one for the dS operand and the arrived stage, one for the dvn
operand.
"""

import cutlass
import cutlass.cute as cute

from culax.device import fakes, states
from culax.device.sizes import CHUNK
from culax.kda.stages.reverse_scan import layouts, roles
from culax.kda.stages.reverse_scan.config import ReverseScanConfig


@cute.kernel
def reverse_scan_kernel(gmem: roles.Gmem, value_heads: cutlass.Int32, config: cutlass.Constexpr) -> None:
    """Grid (N * HV * V / columns)."""
    place = states.place_of_cta(value_heads, config.value_dim // config.columns)
    roles.reverse_scan(config, gmem, layouts.allocate(config), place)


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
        gmem = roles.Gmem(qg, minus_w, kg, decay, do, aqk, table, bounds, dht, dh, dvn, dh0)
        if count > 0:
            reverse_scan_kernel(gmem, do.shape[2], config).launch(
                grid=(count * (config.value_dim // config.columns), 1, 1),
                block=(config.threads, 1, 1),
                stream=stream,
            )

    key, value = config.key_dim, config.value_dim
    bf16 = cutlass.BFloat16
    return reverse_scan, (
        fakes.tape(CHUNK, key),
        fakes.tape(CHUNK, key),
        fakes.tape(CHUNK, key),
        fakes.compact(key),
        fakes.rows(bf16, value),
        fakes.rows(bf16, CHUNK),
        fakes.table(),
        fakes.vector(cutlass.Int32),
        fakes.compact(key, value),
        fakes.tape(key, value),
        fakes.tape(CHUNK, value),
        fakes.compact(key, value),
        fakes.stream(),
    )
