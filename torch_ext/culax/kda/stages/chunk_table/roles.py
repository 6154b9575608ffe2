"""What the threads of the chunk table kernels do."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device.sizes import CHUNK
from culax.kda.stages.chunk_table.layouts import Smem


@dataclass(frozen=True)
class Gmem:
    """cu_seqlens [N + 1]; its cleaned values [N + 1], the first chunk of every sequence [N + 1] and the table [rows,
    4], int32."""

    offsets: cute.Tensor
    tokens: cute.Tensor
    bounds: cute.Tensor
    table: cute.Tensor


def _add(a: cutlass.Int32, b: cutlass.Int32) -> cutlass.Int32:
    return a + b


def _larger(a: cutlass.Int32, b: cutlass.Int32) -> cutlass.Int32:
    return cutlass.max(a, b)


@cute.jit
def _scan(
    value: cutlass.Int32, carry: cutlass.Int32, warps: cute.Tensor, join: cutlass.Constexpr
) -> tuple[cutlass.Int32, cutlass.Int32]:
    """Inclusive scan over the CTA's threads after `carry`: this thread's value and the last thread's."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    for level in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, offset=1 << level, mask_and_clamp=0)
        if lane >= (1 << level):
            value = join(value, other)
    if lane == 31:
        warps[warp] = value
    cute.arch.sync_threads()
    total = carry
    for other_warp in cutlass.range_constexpr(warps.shape[0]):
        if other_warp < warp:
            carry = join(carry, warps[other_warp])
        total = join(total, warps[other_warp])
    # Everybody has read the warps' values before the next scan writes them.
    cute.arch.sync_threads()
    return join(carry, value), total


def _clean(offset: cutlass.Int32 | cutlass.Int64, tokens: cutlass.Int32) -> cutlass.Int32:
    limit = type(offset)(tokens)
    return cutlass.Int32(cutlass.min(cutlass.max(offset, type(offset)(0)), limit))


@cute.jit
def sum_chunks(config: cutlass.Constexpr, gmem: Gmem, smem: Smem, tokens: cutlass.Int32) -> None:
    """Offsets clamped to [previous, T], and the chunks before each sequence."""
    thread = cute.arch.thread_idx()[0]
    sequences = gmem.offsets.shape[0] - 1
    latest = _clean(gmem.offsets[0], tokens)
    chunks = cutlass.Int32(0)
    if thread == 0:
        gmem.tokens[0] = latest
        gmem.bounds[0] = chunks
    trips = (sequences + config.scan_threads - 1) // config.scan_threads
    for trip in cutlass.range(trips, unroll=1):
        sequence = trip * config.scan_threads + thread
        offset = cutlass.Int32(0)
        if sequence < sequences:
            offset = _clean(gmem.offsets[sequence + 1], tokens)
        end, latest = _scan(offset, latest, smem.maxima, _larger)
        if sequence < sequences:
            gmem.tokens[sequence + 1] = end
        # The sequence begins where the one before ends; that thread's store is visible after the barrier.
        cute.arch.sync_threads()
        count = cutlass.Int32(0)
        if sequence < sequences:
            count = (end - gmem.tokens[sequence] + CHUNK - 1) // CHUNK
        past, chunks = _scan(count, chunks, smem.sums, _add)
        if sequence < sequences:
            gmem.bounds[sequence + 1] = past


@cute.jit
def fill_packed(gmem: Gmem, index: cutlass.Int32, tokens: cutlass.Int32) -> None:
    """Row `index` of the table of packed sequences; behind their chunks come stretches outside all sequences, with rows
    negative."""
    sequences = gmem.bounds.shape[0] - 1
    valid = gmem.bounds[sequences]
    if index < gmem.table.shape[0]:
        sequence, first, rows = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        if index < valid:
            past = sequences
            while past - sequence > 1:
                middle = (sequence + past) // 2
                if gmem.bounds[middle] <= index:
                    sequence = middle
                else:
                    past = middle
            first = gmem.tokens[sequence] + (index - gmem.bounds[sequence]) * CHUNK
            rows = cutlass.min(CHUNK, gmem.tokens[sequence + 1] - first)
        else:
            begin = gmem.tokens[0]
            front = (begin + CHUNK - 1) // CHUNK
            stretch = index - valid
            first = stretch * CHUNK
            rows = -cutlass.min(CHUNK, begin - first)
            if stretch >= front:
                first = gmem.tokens[sequences] + (stretch - front) * CHUNK
                rows = -cutlass.max(0, cutlass.min(CHUNK, tokens - first))
        _write(gmem.table, index, (sequence, cutlass.Int32(0), first, rows))


@cute.jit
def fill_equal(table: cute.Tensor, bounds: cute.Tensor, index: cutlass.Int32, tokens: cutlass.Int32) -> None:
    """Row `index` of the table of sequences of `tokens` rows each, and sequence `index`'s first chunk."""
    each = (tokens + CHUNK - 1) // CHUNK
    if index < bounds.shape[0]:
        bounds[index] = index * each
    if index < table.shape[0]:
        sequence, first = index // each, index % each * CHUNK
        _write(table, index, (sequence, sequence, first, cutlass.min(CHUNK, tokens - first)))


def _write(table: cute.Tensor, index: cutlass.Int32, fields: tuple) -> None:
    for field, value in enumerate(fields):
        table[index, field] = value
