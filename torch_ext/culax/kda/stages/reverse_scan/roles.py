"""What the warps of the reverse scan kernel do; one role, all warps alike.

Equation numbers are those of kda/README.md. A warp keeps 16 rows of dS [K, columns] as fp32 accumulators over all
chunks, and makes a block of 16 x 16 of dvn (device/states.py).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import bulk, chunks, states, warp_tiles
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


@dataclass(frozen=True)
class Run:
    """The tokens of a sequence: its batch entry, first token and the one behind its last; its first chunk and the one
    behind its last."""

    batch: cutlass.Int32
    begin: cutlass.Int32
    end: cutlass.Int32
    chunk: cutlass.Int32
    past: cutlass.Int32

    def rows(self, index: cutlass.Int32) -> chunks.Chunk:
        """The table's row of one of the sequence's chunks, without reading it."""
        first = self.begin + (index - self.chunk) * CHUNK
        return chunks.Chunk(cutlass.Int32(0), self.batch, first, cutlass.min(CHUNK, self.end - first))


@cute.jit
def reverse_scan(config: cutlass.Constexpr, gmem: Gmem, smem: Smem, place: states.Place) -> None:
    """B2 over the chunks of one sequence, last first, with B1's dv_loc: dh is dS after each chunk, what is left is
    dh0."""
    first, past = gmem.bounds[place.sequence], gmem.bounds[place.sequence + 1]
    share = states.share_of_warp(config.key_dim)
    state = states.load_state(gmem.dht, place, share, config.widths)
    if past > first:
        _scan_chunks(config, gmem, smem, place, share, state, _tokens(gmem.table, first, past))
    states.store_state(state, gmem.dh0, place, share, config.widths)


@cute.jit
def _scan_chunks(
    config: cutlass.Constexpr,
    gmem: Gmem,
    smem: Smem,
    place: states.Place,
    share: states.Share,
    state: cute.Tensor,
    run: Run,
) -> None:
    width = config.widths[1]
    bulk.init_barriers([(smem.arrived, config.stages, 1)])
    for ahead in cutlass.range_constexpr(config.stages - 1):
        _load(config, gmem, smem, place, run, run.past - 1 - ahead, ahead)
    for done in cutlass.range(run.past - run.chunk, unroll=1):
        index = run.past - 1 - done
        stage, operand = done % config.stages, smem.state[None, None, done % 2]
        # This operand was last read for the chunk before the previous one; a barrier has passed since.
        warp_tiles.store_fragment(state, share.of_state(operand, width))
        cute.arch.cp_async_wait_group(config.stages - 2)
        bulk.wait(smem.arrived + stage, done // config.stages % 2)
        cute.arch.sync_threads()
        # The barrier lies behind every warp's last read of the previous chunk's stage: it may be refilled.
        ahead = config.stages - 1
        _load(config, gmem, smem, place, run, index - ahead, (done + ahead) % config.stages)
        do = warp_tiles.transposed(smem.do[None, None, stage])
        dvn = warp_tiles.accumulator(BLOCK, BLOCK)
        kg = share.tokens(smem.kg[None, None, stage])
        warp_tiles.gemm(dvn, kg, share.values(warp_tiles.transposed(operand)))
        warp_tiles.gemm(dvn, share.tokens(warp_tiles.transposed(smem.aqk[None, None, stage])), share.values(do))
        warp_tiles.store_fragment(dvn, share.of_rows(smem.dvn))
        warp_tiles.scale_rows(state, cute.local_tile(smem.decay[None, stage], (BLOCK,), (share.row,)))
        qg, minus_w = (share.keys(warp_tiles.transposed(tile[None, None, stage])) for tile in (smem.qg, smem.minus_w))
        warp_tiles.gemm(state, qg, share.state_values(do, width))
        cute.arch.sync_threads()
        warp_tiles.gemm(state, minus_w, share.state_values(warp_tiles.transposed(smem.dvn), width))
        for tile, tape in ((operand, gmem.dh), (smem.dvn, gmem.dvn)):
            chunks.store_tile(tile, states.slice_of(tape, index, place, config.columns), config.threads)


def _tokens(table: cute.Tensor, first: cutlass.Int32, past: cutlass.Int32) -> Run:
    """A sequence's tokens from the table's rows of its first and last chunk."""
    head, tail = chunks.read_chunk(table, first), chunks.read_chunk(table, past - 1)
    return Run(head.batch, head.first, tail.first + tail.rows, first, past)


@cute.jit
def _load(
    config: cutlass.Constexpr,
    gmem: Gmem,
    smem: Smem,
    place: states.Place,
    run: Run,
    index: cutlass.Int32,
    stage: cutlass.Int32,
) -> None:
    """Start the loads of one chunk into a stage: bulk copies, and a cp.async group for the rows of Aqk and do.

    A group is committed in any case, so that groups count chunks.
    """
    if index >= run.chunk:
        if cute.arch.thread_idx()[0] == 0:
            head = place.value_head
            pairs = [
                (gmem.qg[index, head, None, None], smem.qg[None, None, stage]),
                (gmem.minus_w[index, head, None, None], smem.minus_w[None, None, stage]),
                (gmem.kg[index, head, None, None], smem.kg[None, None, stage]),
                (gmem.decay[index, head, None], smem.decay[None, stage]),
            ]
            bulk.load_images(pairs, smem.arrived + stage)
        chunk = run.rows(index)
        aqk = chunks.chunk_rows(gmem.aqk, chunk, place.value_head)
        chunks.load_rows(aqk, smem.aqk[None, None, stage], chunk.rows, config.threads)
        do = chunks.chunk_rows(gmem.do, chunk, place.value_head)
        do = cute.local_tile(do, (CHUNK, config.columns), (0, place.slice))
        chunks.load_rows(do, smem.do[None, None, stage], chunk.rows, config.threads)
    cute.arch.cp_async_commit_group()
