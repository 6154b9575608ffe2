"""What the warps of the scan kernel do; one role, all warps alike.

Equation numbers are those of kda/README.md. A warp keeps 16 rows of the state [K, columns] as fp32 accumulators over
all chunks, and makes a block of 16 x 16 of v_new (device/states.py).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import bulk, chunks, states, warp_tiles
from culax.device.sizes import BLOCK
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
    share = states.share_of_warp(config.key_dim)
    state = states.load_state(gmem.initial, place, share, config.widths)
    if past > first:
        _scan_chunks(config, gmem, smem, place, share, state, (first, past))
    states.store_state(state, gmem.final, place, share, config.widths)


@cute.jit
def _scan_chunks(
    config: cutlass.Constexpr,
    gmem: Gmem,
    smem: Smem,
    place: states.Place,
    share: states.Share,
    state: cute.Tensor,
    run: tuple[cutlass.Int32, cutlass.Int32],
) -> None:
    first, past = run
    width = config.widths[1]
    bulk.init_barriers([(smem.arrived, config.stages, 1)])
    for ahead in cutlass.range_constexpr(config.stages - 1):
        _load(config, gmem, smem, place, first + ahead, past, ahead)
    for index in cutlass.range(first, past, unroll=1):
        stage, operand = (index - first) % config.stages, smem.state[None, None, (index - first) % 2]
        # This operand was last read for the chunk before the previous one; a barrier has passed since.
        warp_tiles.store_fragment(state, share.of_state(operand, width))
        bulk.wait(smem.arrived + stage, (index - first) // config.stages % 2)
        minus_w = warp_tiles.load_left(share.tokens(smem.minus_w[None, None, stage]))
        kg = warp_tiles.load_left(share.keys(warp_tiles.transposed(smem.kg[None, None, stage])))
        warp_tiles.scale_rows(state, cute.local_tile(smem.decay[None, stage], (BLOCK,), (share.row,)))
        cute.arch.cp_async_wait_group(config.stages - 2)
        cute.arch.sync_threads()
        h = warp_tiles.load_right(share.values(warp_tiles.transposed(operand)))
        v_new = warp_tiles.load_fragment(share.of_rows(smem.u[None, None, stage]))
        # The barrier lies behind every warp's last read of the previous chunk's stage: it may be refilled.
        ahead = index + config.stages - 1
        _load(config, gmem, smem, place, ahead, past, (ahead - first) % config.stages)
        warp_tiles.multiply(v_new, minus_w, h)
        warp_tiles.store_fragment(v_new, share.of_rows(smem.v_new))
        cute.arch.sync_threads()
        v_rounded = warp_tiles.load_right(share.state_values(warp_tiles.transposed(smem.v_new), width))
        warp_tiles.multiply(state, kg, v_rounded)
        for tile, tape in ((operand, gmem.h), (smem.v_new, gmem.v_new)):
            chunks.store_tile(tile, states.slice_of(tape, index, place, config.columns), config.threads)


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
    """Start the loads of one chunk into a stage: bulk copies, and a cp.async group for U's columns.

    A group is committed in any case, so that groups count chunks.
    """
    if index < past:
        if cute.arch.thread_idx()[0] == 0:
            head = place.value_head
            pairs = [
                (gmem.minus_w[index, head, None, None], smem.minus_w[None, None, stage]),
                (gmem.kg[index, head, None, None], smem.kg[None, None, stage]),
                (gmem.decay[index, head, None], smem.decay[None, stage]),
            ]
            bulk.load_images(pairs, smem.arrived + stage)
        u = states.slice_of(gmem.u, index, place, config.columns)
        chunks.load_tile(u, smem.u[None, None, stage], config.threads)
    cute.arch.cp_async_commit_group()
