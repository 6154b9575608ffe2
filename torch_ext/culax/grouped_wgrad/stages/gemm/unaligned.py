"""Loads without TMA, for expert-major groups whose length is no multiple of 8, and stage poisoning for tests."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64

from culax.grouped_wgrad.stages.gemm.config import Config


@cute.jit
def fill(tensor: cute.Tensor, source: cute.Tensor, first: Int32, part):
    """One warp: tensor (X, tile_k) in shared memory from rows `first`.. of one group's block, at its tokens `start`..

    source (X, T) only lends pointer and rows: element (x, t) of a group that begins at token b and has k is at
    b * X + x * k + t. Rows past X and tokens past k become zeros.
    """
    begin, length, start = part
    rows = source.shape[0]
    base = Int64(begin) * rows
    count: cutlass.Constexpr = cute.size(tensor)
    width: cutlass.Constexpr = cute.size(tensor, mode=[1])
    for i in cutlass.range(cute.arch.lane_idx(), count, 32, unroll=1):
        x = i // width
        t = i - x * width
        value = tensor.element_type(0)
        if first + x < rows:
            if start + t < length:
                element = source.iterator + base + Int64(first + x) * length + start + t
                value = cute.make_tensor(element, cute.make_layout(1))[0]
        tensor[x, t] = value


@cute.jit
def load_unaligned(config: cutlass.Constexpr[Config], gmem, smem, ab: pipeline.PipelineTmaAsync, state, tile):
    """As roles.load_tile, with ordinary loads: the full barrier is then a plain arrival without a byte count."""
    row, column, begin, length, k_tiles = tile
    for k in cutlass.range(k_tiles, unroll=1):
        ab.sync_object_empty.wait(state.index, state.phase)
        part = begin, length, k * config.tile_k
        fill(smem.a[None, None, state.index], gmem.a_plain, row * config.tile_m, part)
        fill(smem.b[None, None, state.index], gmem.b_plain, column * config.tile_n, part)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ab.producer_get_barrier(state))
        state.advance()
    return state


@cute.jit
def fill_nan(config: cutlass.Constexpr[Config], smem, stage: Int32):
    """One warp: a stage of NaN, so that a reader that lags behind its release, or a short load, shows up."""
    for tensor in cutlass.range_constexpr(2):
        target = (smem.a if tensor == 0 else smem.b)[None, None, stage]
        rows: cutlass.Constexpr = cute.size(target, mode=[0])
        for i in cutlass.range(cute.arch.lane_idx(), cute.size(target), 32, unroll=1):
            target[i % rows, i // rows] = target.element_type(float("nan"))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
