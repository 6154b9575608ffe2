"""What the warps of the reverse scan kernel do; one role, four warps alike.

Equation numbers are those of kda/README.md. Warp w keeps rows K/4 w .. of dS [K, columns] as fp32 accumulators over all
chunks, and makes rows 16 w .. of dvn.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import chunks, states, warp_tiles
from culax.device.sizes import BLOCK, CHUNK
from culax.kda.stages.reverse_scan.layouts import Smem


@dataclass(frozen=True)
class Gmem:
    """Tapes [NT, HV, ...] of prep, do [B, T, HV, V], Aqk [B, T, HV, 64], the chunk table and bounds, dht and dh0 [N,
    HV, K, V] fp32 (empty if absent), and the tapes dh [NT, HV, K, V] and dvn [NT, HV, 64, V]."""

    qg: cute.Tensor
    minus_w: cute.Tensor
    kg: cute.Tensor
    decay: cute.Tensor
    do: cute.Tensor
    aqk: cute.Tensor
    table: cute.Tensor
    bounds: cute.Tensor
    dht: cute.Tensor
    dh: cute.Tensor
    dvn: cute.Tensor
    dh0: cute.Tensor


@cute.jit
def reverse_scan(config: cutlass.Constexpr, gmem: Gmem, smem: Smem, place: states.Place) -> None:
    """B2 over the chunks of one sequence, last first, with B1's dv_loc: dh is dS after each chunk, what is left is
    dh0."""
    first, past = gmem.bounds[place.sequence], gmem.bounds[place.sequence + 1]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    key_rows = config.key_dim // 4
    state = states.load_state(gmem.dht, place, key_rows, config.columns)
    for ahead in cutlass.range_constexpr(config.stages - 1):
        _load(config, gmem, smem, place, past - 1 - ahead, first, ahead)
    for done in cutlass.range(past - first, unroll=1):
        index = past - 1 - done
        stage = done % config.stages
        # All warps have passed the previous chunk's second barrier, so nobody reads the dS operand any more.
        warp_tiles.store_fragment(state, cute.local_tile(smem.state, (key_rows, config.columns), (warp, 0)))
        cute.arch.cp_async_wait_group(config.stages - 2)
        cute.arch.sync_threads()
        # The barrier ends every warp's reads of the previous chunk's stage; only now may it be refilled.
        refill = (done + config.stages - 1) % config.stages
        _load(config, gmem, smem, place, index - (config.stages - 1), first, refill)
        do = warp_tiles.transposed(smem.do[None, None, stage])
        dvn = warp_tiles.accumulator(BLOCK, config.columns)
        aqk = cute.local_tile(warp_tiles.transposed(smem.aqk[None, None, stage]), (BLOCK, CHUNK), (warp, 0))
        warp_tiles.gemm(dvn, aqk, do)
        kg = cute.local_tile(smem.kg[None, None, stage], (BLOCK, config.key_dim), (warp, 0))
        warp_tiles.gemm(dvn, kg, warp_tiles.transposed(smem.state))
        warp_tiles.store_fragment(dvn, cute.local_tile(smem.dvn, (BLOCK, config.columns), (warp, 0)))
        states.store_slice(smem.state, gmem.dh, index, place, config.threads)
        warp_tiles.scale_rows(state, cute.local_tile(smem.decay[None, stage], (key_rows,), (warp,)))
        qg, minus_w = (
            cute.local_tile(warp_tiles.transposed(tile[None, None, stage]), (key_rows, CHUNK), (warp, 0))
            for tile in (smem.qg, smem.minus_w)
        )
        warp_tiles.gemm(state, qg, do)
        cute.arch.sync_threads()
        states.store_slice(smem.dvn, gmem.dvn, index, place, config.threads)
        warp_tiles.gemm(state, minus_w, warp_tiles.transposed(smem.dvn))
    states.store_state(state, gmem.dh0, place, key_rows, config.columns)


@cute.jit
def _load(
    config: cutlass.Constexpr,
    gmem: Gmem,
    smem: Smem,
    place: states.Place,
    index: cutlass.Int32,
    first: cutlass.Int32,
    stage: cutlass.Int32,
) -> None:
    """Start the loads of one chunk into a stage; a group is committed in any case, so that groups count chunks."""
    if index >= first:
        for tape, tile in ((gmem.qg, smem.qg), (gmem.minus_w, smem.minus_w), (gmem.kg, smem.kg)):
            rows = tape[index, place.value_head, None, None]
            chunks.load_rows(rows, tile[None, None, stage], CHUNK, config.threads)
        chunk = chunks.read_chunk(gmem.table, index)
        aqk = chunks.chunk_rows(gmem.aqk, chunk, place.value_head)
        chunks.load_rows(aqk, smem.aqk[None, None, stage], chunk.rows, config.threads)
        do = chunks.chunk_rows(gmem.do, chunk, place.value_head)
        do = cute.local_tile(do, (CHUNK, config.columns), (0, place.slice))
        chunks.load_rows(do, smem.do[None, None, stage], chunk.rows, config.threads)
        chunks.load_vector(gmem.decay[index, place.value_head, None], smem.decay[None, stage])
    cute.arch.cp_async_commit_group()
