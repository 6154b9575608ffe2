"""Loads without TMA, for K-major groups that are not 16-byte aligned, and stage poisoning for tests."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64

from culax.grouped_wgrad.stages.gemm.config import CONSUMERS, WARPGROUP, Config

PRODUCER_BARRIER = 1 + CONSUMERS
NAN_BYTE = 0x7F
"""NaN in both fp8 formats; two fp4 numbers."""


def group_view(config: Config, plain: cute.Tensor, begin: Int32, length: Int32) -> cute.Tensor:
    """One group's operand (X, tokens) in memory."""
    if config.ragged:
        start = plain.iterator + Int64(begin) * plain.shape[0]
        return cute.make_tensor(start, cute.make_layout((plain.shape[0], length), stride=(Int64(length), 1)))
    return cute.domain_offset((0, begin), plain)


@cute.jit
def fill(
    target: cute.Tensor,
    group: cute.Tensor,
    first: Int32,
    start: Int32,
    length: Int32,
    threads: cutlass.Constexpr[int] = WARPGROUP,
):
    """target (X, tile_k) in shared memory = rows `first`.. and tokens `start`.. of a group.

    Done by `threads` threads, numbered from a multiple of their count. Rows past X and tokens past `length` become
    zeros; what is there is not read.
    """
    rows = group.shape[0]
    width: cutlass.Constexpr = cute.size(target, mode=[1])
    for i in cutlass.range(cute.arch.thread_idx()[0] % threads, cute.size(target), threads, unroll=4):
        x = i // width
        t = i - x * width
        value = target.element_type(group[cutlass.min(first + x, rows - 1), cutlass.min(start + t, length - 1)])
        if first + x >= rows or start + t >= length:
            value = target.element_type(0)
        target[x, t] = value


@cute.jit
def load_unaligned(config: cutlass.Constexpr[Config], gmem, smem, ab: pipeline.PipelineTmaAsync, state, tile):
    """As roles.load_tile, with ordinary loads by all warps: the full barrier is then an arrival without a byte count.

    Only warp 0 waits for the stage: the others may be several rounds ahead of it, where a parity means nothing.
    """
    row, column, begin, length, k_tiles = tile
    g_a, g_b = (group_view(config, plain, begin, length) for plain in (gmem.a_plain, gmem.b_plain))
    loading = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
    for k in cutlass.range(k_tiles, unroll=1):
        if loading:
            ab.sync_object_empty.wait(state.index, state.phase)
        cute.arch.barrier(barrier_id=PRODUCER_BARRIER, number_of_threads=WARPGROUP)
        fill(smem.a[None, None, state.index], g_a, row * config.tile_m, k * config.tile_k, length)
        fill(smem.b[None, None, state.index], g_b, column * config.tile_n, k * config.tile_k, length)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=PRODUCER_BARRIER, number_of_threads=WARPGROUP)
        if loading:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ab.producer_get_barrier(state))
        state.advance()
    return state


@cute.jit
def poison(config: cutlass.Constexpr[Config], smem, stage: Int32):
    """One warp: NaN in all of a stage, last tokens first: who still reads it, or reads it too soon, multiplies NaN."""
    for tensor in cutlass.range_constexpr(2):
        tile = (smem.a if tensor == 0 else smem.b)[None, None, stage]
        rows: cutlass.Constexpr = cute.size(tile, mode=[0])
        narrow: cutlass.Constexpr = tile.element_type.width == 8
        for i in cutlass.range(cute.arch.lane_idx(), cute.size(tile), 32, unroll=8):
            tile[i % rows, config.loaded_k - 1 - i // rows] = tile.element_type(NAN_BYTE if narrow else float("nan"))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
