"""What the warps of the prep kernel do; one role, all warps alike.

Equation numbers are those of kda/README.md. Warp w owns rows 16 I .. 16 I + 15 and key columns 64 c .. 64 c + 63 with
I, c = divmod(w, K / 64), both when it works on columns (each lane two neighbouring ones) and in the products.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import bulk, chunks, gates, images, warp_tiles
from culax.device.sizes import BLOCK, CHUNK, VECTOR
from culax.kda.stages.prep.layouts import Smem

PAIR = 2
"""Key columns of a lane when it works on columns."""


@dataclass(frozen=True)
class Gmem:
    """Inputs [B, T, H or HV, D], the chunk table, and the tapes [NT, HV, 64 D] of images (decay [NT, HV, K] fp32)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    akk: cute.Tensor
    table: cute.Tensor
    minus_w: cute.Tensor
    u: cute.Tensor
    qg: cute.Tensor
    kg: cute.Tensor
    decay: cute.Tensor


@cute.jit
def prepare(
    config: cutlass.Constexpr,
    gmem: Gmem,
    smem: Smem,
    index: cutlass.Int32,
    heads: tuple[cutlass.Int32, cutlass.Int32],
    scale: cutlass.Float32,
) -> None:
    """One chunk of one value head: -W, U, s q 2^G, k 2^(G_last - G) and 2^G_last. `heads` are the value head and its
    query head."""
    chunk = chunks.read_chunk(gmem.table, index)
    if chunk.rows > 0:
        _prepare_valid(config, gmem, smem, index, chunk, heads, scale)


@cute.jit
def _prepare_valid(
    config: cutlass.Constexpr,
    gmem: Gmem,
    smem: Smem,
    index: cutlass.Int32,
    chunk: chunks.Chunk,
    heads: tuple[cutlass.Int32, cutlass.Int32],
    scale: cutlass.Float32,
) -> None:
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    value_head, head = heads
    chunks.load_rows(chunks.chunk_rows(gmem.akk, chunk, value_head), smem.p, chunk.rows, config.threads)
    q, k, keys, values = (tile[None, None, 0] for tile in (smem.q, smem.k, smem.keys, smem.values))
    for tensor, owner, tile in ((gmem.q, head, q), (gmem.k, head, k), (gmem.v, value_head, values)):
        chunks.load_rows(chunks.chunk_rows(tensor, chunk, owner), tile, chunk.rows, config.threads)
    cute.arch.cp_async_commit_group()
    gates.load_beta(chunks.chunk_column(gmem.beta, chunk, value_head), smem.beta, chunk.rows)
    raw = gates.load_gates(chunks.chunk_rows(gmem.g, chunk, value_head), chunk.rows, PAIR)
    gate = gates.cumulate(raw, smem.gate_sums)
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    _scale_rows(values, smem.beta, config.threads)
    before, last = gates.before_and_last(smem.gate_sums, PAIR)
    _apply_gates((q, k, keys), smem.beta, (gate, before, last), scale)
    _write_decay(gmem.decay[index, value_head, None], last, config)
    bulk.publish()
    cute.arch.sync_threads()
    entry = (index, value_head, None)
    bulk.store_images([(images.flat(q), gmem.qg[entry]), (images.flat(k), gmem.kg[entry])])
    block, group = warp // (config.key_dim // 64), warp % (config.key_dim // 64)
    p = cute.local_tile(smem.p, (BLOCK, CHUNK), (block, 0))
    w = warp_tiles.accumulator(BLOCK, 64)
    warp_tiles.gemm(w, p, cute.local_tile(images.transposed(smem.keys)[None, None, 0], (64, CHUNK), (group, 0)))
    width = config.value_dim * 64 // config.key_dim
    u = warp_tiles.accumulator(BLOCK, width)
    warp_tiles.gemm(u, p, cute.local_tile(images.transposed(smem.values)[None, None, 0], (width, CHUNK), (group, 0)))
    # Every warp has read the operand tiles before any overwrites them with results.
    cute.arch.sync_threads()
    warp_tiles.store_fragment(w, cute.local_tile(keys, (BLOCK, 64), (block, group)))
    warp_tiles.store_fragment(u, cute.local_tile(values, (BLOCK, width), (block, group)))
    bulk.publish()
    cute.arch.sync_threads()
    bulk.store_images([(images.flat(keys), gmem.minus_w[entry]), (images.flat(values), gmem.u[entry])])
    bulk.stored()


def _scale_rows(tile: cute.Tensor, beta: cute.Tensor, threads: int) -> None:
    """F3's operand of U in place: row i times beta_i."""
    tid = cute.arch.thread_idx()[0]
    across = cute.size(tile, mode=[1]) // VECTOR
    for step in range(CHUNK * across // threads):
        row, column = (tid + step * threads) // across, (tid + step * threads) % across
        vector = cute.local_tile(tile, (1, VECTOR), (row, column))
        vector.store((vector.load().to(cutlass.Float32) * beta[row]).to(cutlass.BFloat16))


def _apply_gates(
    tiles: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    beta: cute.Tensor,
    gate: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    scale: cutlass.Float32,
) -> None:
    """F3's elementwise part on the tiles q, k and W's operand [64, K]: -beta k 2^G as the operand, and in place s q 2^G
    and k 2^(G_last - G)."""
    q_tile, k_tile, keys = tiles
    inside, before, last = gate
    block, place = gates.column_owner(cute.size(keys, mode=[1]), PAIR)
    for r in range(BLOCK):
        row = block * BLOCK + r
        q, k = (gates.read_cells(tile, row, place, PAIR) for tile in (q_tile, k_tile))
        total = [before[c] + inside[r, c] for c in range(PAIR)]
        start = [chunks.exp2(total[c]) for c in range(PAIR)]
        gates.write_cells(keys, row, place, [-beta[row] * k[c] * start[c] for c in range(PAIR)])
        gates.write_cells(q_tile, row, place, [scale * q[c] * start[c] for c in range(PAIR)])
        gates.write_cells(k_tile, row, place, [k[c] * chunks.exp2(last[c] - total[c]) for c in range(PAIR)])


@cute.jit
def _write_decay(row: cute.Tensor, last: cute.Tensor, config: cutlass.Constexpr) -> None:
    block, place = gates.column_owner(config.key_dim, PAIR)
    if block == 0:
        target = cute.local_tile(row, (PAIR,), (place,))
        for c in cutlass.range_constexpr(PAIR):
            target[c] = chunks.exp2(last[c])
