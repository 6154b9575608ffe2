"""Join: the states before all segments of every sequence, and the gradients of those after them, out of the segments'
summaries. A few products [K, K] x [K, V] a head that depend on each other, in fp32: bound by latency.

One CTA a direction, sequence, value head and 8 value columns, one role. A thread asks for all its factors of a product
at once, one product ahead.
"""

import cutlass
import cutlass.cute as cute

from culax.device import fakes
from culax.kda.stages.join import layouts, roles
from culax.kda.stages.join.config import JoinConfig


@cute.kernel
def join_kernel(forward: roles.Gmem, backward: roles.Gmem, segments: cutlass.Int32, config: cutlass.Constexpr) -> None:
    """Grid (N * HV * V / columns, 2)."""
    blocks, value_heads = config.value_dim // config.columns, forward.states.shape[1]
    row = cute.arch.block_idx()[0] // blocks
    sequence = row // value_heads
    where = sequence, row % value_heads, cute.arch.block_idx()[0] % blocks
    smem = layouts.allocate(config)
    first = sequence * segments
    if cute.arch.block_idx()[1] == 0:
        roles.join(config, forward, smem, roles.Place(*where, first, cutlass.Int32(1), segments))
    else:
        roles.join(config, backward, smem, roles.Place(*where, first + segments - 1, cutlass.Int32(-1), segments))


def entry(config: JoinConfig) -> tuple:
    """The function to compile and its fake arguments: (initial, dht, transitions, transposed transitions, states before
    the segments, gradients of those after them, number of segments, stream)."""

    @cute.jit
    def join(
        initial: cute.Tensor,
        dht: cute.Tensor,
        transitions: cute.Tensor,
        transposed: cute.Tensor,
        starts: cute.Tensor,
        ends: cute.Tensor,
        segments: cutlass.Int32,
        stream,
    ) -> None:
        count = starts.shape[0] // segments * starts.shape[1]
        if count > 0:
            # A state's next one is T S, an earlier gradient T^T dS: sums over T's last and first dimension.
            forward, backward = roles.Gmem(initial, transposed, starts), roles.Gmem(dht, transitions, ends)
            join_kernel(forward, backward, segments, config).launch(
                grid=(count * (config.value_dim // config.columns), 2, 1),
                block=(config.threads, 1, 1),
                stream=stream,
            )

    key, value = config.key_dim, config.value_dim
    shapes = ((key, value), (key, value), (key, key), (key, key), (key, value), (key, value))
    return join, (*(fakes.compact(*shape) for shape in shapes), cutlass.Int32(1), fakes.stream())
