"""Chunk table: which tokens each chunk holds, from cu_seqlens on the device or from equal lengths.

Packed sequences take two kernels: one CTA sums up the chunks of the sequences in trips of 1,024 (a scan of maxima,
which cleans offsets that descend, then one of chunk counts), then one thread a row finds its sequence by bisection.
Equal lengths need the second only.
"""

import cutlass
import cutlass.cute as cute

from culax.device import fakes
from culax.kda.stages.chunk_table import layouts, roles
from culax.kda.stages.chunk_table.config import ChunkTableConfig


@cute.kernel
def sum_kernel(gmem: roles.Gmem, tokens: cutlass.Int32, config: cutlass.Constexpr) -> None:
    """Grid (1)."""
    roles.sum_chunks(config, gmem, layouts.allocate(config), tokens)


@cute.kernel
def fill_packed_kernel(gmem: roles.Gmem, tokens: cutlass.Int32, config: cutlass.Constexpr) -> None:
    """Grid (rows / threads)."""
    roles.fill_packed(gmem, cute.arch.block_idx()[0] * config.fill_threads + cute.arch.thread_idx()[0], tokens)


@cute.kernel
def fill_equal_kernel(
    table: cute.Tensor, bounds: cute.Tensor, tokens: cutlass.Int32, config: cutlass.Constexpr
) -> None:
    """Grid (max(rows, N + 1) / threads)."""
    index = cute.arch.block_idx()[0] * config.fill_threads + cute.arch.thread_idx()[0]
    roles.fill_equal(table, bounds, index, tokens)


def _packed(config: ChunkTableConfig) -> tuple:
    @cute.jit
    def chunk_table(
        offsets: cute.Tensor,
        tokens_of: cute.Tensor,
        bounds: cute.Tensor,
        table: cute.Tensor,
        tokens: cutlass.Int32,
        stream,
    ) -> None:
        gmem = roles.Gmem(offsets, tokens_of, bounds, table)
        if table.shape[0] > 0:
            sum_kernel(gmem, tokens, config).launch(grid=(1, 1, 1), block=(config.scan_threads, 1, 1), stream=stream)
            grid = cute.ceil_div(table.shape[0], config.fill_threads)
            fill_packed_kernel(gmem, tokens, config).launch(
                grid=(grid, 1, 1), block=(config.fill_threads, 1, 1), stream=stream
            )

    offsets = fakes.vector({"int32": cutlass.Int32, "int64": cutlass.Int64}[config.offsets])
    return chunk_table, (
        offsets,
        fakes.vector(cutlass.Int32),
        fakes.vector(cutlass.Int32),
        fakes.table(),
        cutlass.Int32(1),
        fakes.stream(),
    )


def entry(config: ChunkTableConfig) -> tuple:
    """The function to compile and its fake arguments.

    Packed: (cu_seqlens, tokens [N + 1], bounds [N + 1], table, T, stream). Equal lengths: (bounds [N + 1], table, T,
    stream).
    """
    if config.offsets:
        return _packed(config)

    @cute.jit
    def chunk_table(bounds: cute.Tensor, table: cute.Tensor, tokens: cutlass.Int32, stream) -> None:
        grid = cute.ceil_div(cutlass.max(table.shape[0], bounds.shape[0]), config.fill_threads)
        fill_equal_kernel(table, bounds, tokens, config).launch(
            grid=(grid, 1, 1), block=(config.fill_threads, 1, 1), stream=stream
        )

    return chunk_table, (fakes.vector(cutlass.Int32), fakes.table(), cutlass.Int32(1), fakes.stream())
