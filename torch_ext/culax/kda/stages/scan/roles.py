"""What the warps of the scan kernel do; one role, four warps alike.

Equation numbers are those of kda/README.md. Warp w keeps rows K/4 w .. of the state [K, columns] as fp32 accumulators
over all chunks, and makes rows 16 w .. of v_new.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import chunks, states, warp_tiles
from culax.device.sizes import BLOCK, CHUNK
from culax.kda.stages.scan.layouts import Smem


@dataclass(frozen=True)
class Gmem:
    """Tapes [NT, HV, ...] of prep, bounds [N + 1], states [N, HV, K, V] fp32 (empty if absent), and the tapes h [NT,
    HV, K, V], v_new."""

    minus_w: cute.Tensor
    u: cute.Tensor
    kg: cute.Tensor
    decay: cute.Tensor
    bounds: cute.Tensor
    initial: cute.Tensor
    h: cute.Tensor
    v_new: cute.Tensor
    final: cute.Tensor


@cute.jit
def scan(config: cutlass.Constexpr, gmem: Gmem, smem: Smem, place: states.Place) -> None:
    """F4 over the chunks of one sequence: v_new = U - W S; S <- 2^G_last S + kg^T v_new; h is S before each chunk."""
    first, past = gmem.bounds[place.sequence], gmem.bounds[place.sequence + 1]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    key_rows = config.key_dim // 4
    state = states.load_state(gmem.initial, place, key_rows, config.columns)
    for ahead in cutlass.range_constexpr(config.stages - 1):
        _load(config, gmem, smem, place, first + ahead, past, ahead)
    for index in cutlass.range(first, past, unroll=1):
        stage = (index - first) % config.stages
        # All warps have passed the previous chunk's second barrier, so nobody reads the state operand any more.
        warp_tiles.store_fragment(state, cute.local_tile(smem.state, (key_rows, config.columns), (warp, 0)))
        cute.arch.cp_async_wait_group(config.stages - 2)
        cute.arch.sync_threads()
        # The barrier ends every warp's reads of the previous chunk's stage; only now may it be refilled.
        refill = (index - first + config.stages - 1) % config.stages
        _load(config, gmem, smem, place, index + config.stages - 1, past, refill)
        v_new = warp_tiles.load_fragment(cute.local_tile(smem.u[None, None, stage], (BLOCK, config.columns), (warp, 0)))
        minus_w = cute.local_tile(smem.minus_w[None, None, stage], (BLOCK, config.key_dim), (warp, 0))
        warp_tiles.gemm(v_new, minus_w, warp_tiles.transposed(smem.state))
        warp_tiles.store_fragment(v_new, cute.local_tile(smem.v_new, (BLOCK, config.columns), (warp, 0)))
        states.store_slice(smem.state, gmem.h, index, place, config.threads)
        cute.arch.sync_threads()
        states.store_slice(smem.v_new, gmem.v_new, index, place, config.threads)
        decay = cute.local_tile(smem.decay[None, stage], (key_rows,), (warp,))
        warp_tiles.scale_rows(state, decay)
        kg = cute.local_tile(warp_tiles.transposed(smem.kg[None, None, stage]), (key_rows, CHUNK), (warp, 0))
        warp_tiles.gemm(state, kg, warp_tiles.transposed(smem.v_new))
    states.store_state(state, gmem.final, place, key_rows, config.columns)


@cute.jit
def _load(
    config: cutlass.Constexpr,
    gmem: Gmem,
    smem: Smem,
    place: states.Place,
    index: cutlass.Int32,
    past: cutlass.Int32,
    stage: cutlass.Int32,
) -> None:
    """Start the loads of one chunk into a stage; a group is committed in any case, so that groups count chunks."""
    if index < past:
        for tape, tile in ((gmem.minus_w, smem.minus_w), (gmem.kg, smem.kg)):
            rows = tape[index, place.value_head, None, None]
            chunks.load_rows(rows, tile[None, None, stage], CHUNK, config.threads)
        u = cute.local_tile(gmem.u[index, place.value_head, None, None], (CHUNK, config.columns), (0, place.slice))
        chunks.load_rows(u, smem.u[None, None, stage], CHUNK, config.threads)
        chunks.load_vector(gmem.decay[index, place.value_head, None], smem.decay[None, stage])
    cute.arch.cp_async_commit_group()
