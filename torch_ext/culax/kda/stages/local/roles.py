"""What the warps of the local kernel do up to the off-diagonal blocks; one role, all warps alike.

Equation numbers are those of kda/README.md. Warp w owns rows 16 I .. 16 I + 15 and key columns 32 c .. 32 c + 31 with
I, c = divmod(w, K / 32), both in the products and (columns.py) when each lane works on a column.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import bulk, chunks, gates, warp_tiles
from culax.device.sizes import BLOCK, CHUNK, VECTOR
from culax.device.warp_tiles import fragment_of, gemm, load_fragment, row_fragment, transposed
from culax.kda.stages.local.config import KEYS, LocalConfig
from culax.kda.stages.local.layouts import Smem


@dataclass(frozen=True)
class Gmem:
    """Inputs [B, T, heads, D], tapes [NT, HV, ...], the chunk table, and the gradients [B, T, heads, D] (dbeta [B, T,
    HV])."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor
    do: cute.Tensor
    akk: cute.Tensor
    v_new: cute.Tensor
    dvn: cute.Tensor
    h: cute.Tensor
    dh: cute.Tensor
    table: cute.Tensor
    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    dg: cute.Tensor
    dbeta: cute.Tensor


@dataclass(frozen=True)
class Task:
    """The chunk a CTA works on: its index and row of the table, its value head, and that head's query head."""

    index: cutlass.Int32
    chunk: chunks.Chunk
    value_head: cutlass.Int32
    head: cutlass.Int32


@dataclass(frozen=True)
class Warp:
    """A warp's block of rows and group of 32 key columns."""

    block: cutlass.Int32
    group: cutlass.Int32

    def rows(self, tile: cute.Tensor) -> cute.Tensor:
        """The warp's 16 rows of a [64, n] tile."""
        return cute.local_tile(tile, (BLOCK, tile.shape[1]), (self.block, 0))

    def keys(self, tile: cute.Tensor) -> cute.Tensor:
        """The warp's [16, 32] part of a [64, K] tile."""
        return cute.local_tile(tile, (BLOCK, KEYS), (self.block, self.group))

    def part(self, tile: cute.Tensor, columns: int) -> cute.Tensor:
        """The warp's share [16, columns] of a [64, n] tile whose columns are divided over the groups."""
        return cute.local_tile(tile, (BLOCK, columns), (self.block, self.group))

    def row_part(self, tile: cute.Tensor, rows: int) -> cute.Tensor:
        """The warp's share [rows, m] of the rows of an operand [n, m] that are divided over the groups."""
        return cute.local_tile(tile, (rows, tile.shape[1]), (self.group, 0))


def warp_of(config: LocalConfig) -> Warp:
    """The calling warp's part of the work."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return Warp(warp // config.groups, warp % config.groups)


@dataclass(frozen=True)
class Fragments:
    """fp32 fragments [16, 32] of the warp's rows and key columns: dq, dks, and x with x = dX 2^G + a."""

    dq: cute.Tensor
    dks: cute.Tensor
    x: cute.Tensor


def load_inputs(config: LocalConfig, gmem: Gmem, smem: Smem, task: Task) -> cute.Tensor:
    """Start all loads of the chunk: bulk copies of the tapes and a cp.async group for do come first, then a group for
    q, k, v, P; the gates of the thread's column are returned."""
    rows, threads = task.chunk.rows, config.threads
    bulk.init_barriers([(smem.arrived, 1, 1)])
    _load_tapes(gmem, smem, task)
    value_rows = chunks.chunk_rows(gmem.do, task.chunk, task.value_head)
    chunks.load_rows(value_rows, smem.do, rows, threads)
    cute.arch.cp_async_commit_group()
    for tensor, head, tile in (
        (gmem.q, task.head, smem.q),
        (gmem.k, task.head, smem.k),
        (gmem.v, task.value_head, smem.v),
        (gmem.akk, task.value_head, smem.p),
    ):
        chunks.load_rows(chunks.chunk_rows(tensor, task.chunk, head), tile, rows, threads)
    cute.arch.cp_async_commit_group()
    gates.load_beta(chunks.chunk_column(gmem.beta, task.chunk, task.value_head), smem.beta, rows)
    return gates.load_gates(chunks.chunk_rows(gmem.g, task.chunk, task.value_head), rows, width=1)


@cute.jit
def _load_tapes(gmem: Gmem, smem: Smem, task: Task) -> None:
    if cute.arch.thread_idx()[0] == 0:
        tiles = ((gmem.v_new, smem.v_new), (gmem.dvn, smem.dvn), (gmem.h, smem.h), (gmem.dh, smem.dh))
        pairs = [(tape[task.index, task.value_head, None, None], tile) for tape, tile in tiles]
        bulk.load_images(pairs, smem.arrived)


def state_products(
    config: LocalConfig, smem: Smem, warp: Warp, scale: cutlass.Float32
) -> tuple[Fragments, cute.Tensor]:
    """B1's E to shared memory; B3's products with the states: do S^T, v_new dS^T and dW (third fragment) = dvn S^T,
    signs later."""
    width = CHUNK // config.groups
    e = warp_tiles.accumulator(BLOCK, width)
    gemm(e, warp.rows(smem.do), warp.row_part(smem.v_new, width))
    lower_triangle(e, warp, width, strict=False)
    e.store(e.load() * scale)
    warp_tiles.store_fragment(e, warp.part(smem.e, width))
    store_diagonal(e, smem.e_diagonal, warp, width)
    dq, dks, dw = (warp_tiles.accumulator(BLOCK, KEYS) for _ in range(3))
    gemm(dq, warp.rows(smem.do), warp.row_part(smem.h, KEYS))
    gemm(dks, warp.rows(smem.v_new), warp.row_part(smem.dh, KEYS))
    gemm(dw, warp.rows(smem.dvn), warp.row_part(smem.h, KEYS))
    dw.store(-dw.load())
    return Fragments(dq, dks, warp_tiles.accumulator(BLOCK, KEYS)), dw


def state_row_sums(config: LocalConfig, smem: Smem) -> None:
    """B3's sum over v of S dS for each key column; four threads a row."""
    thread = cute.arch.thread_idx()[0]
    row, part = thread // 4, thread % 4
    total = cutlass.Float32(0.0)
    for step in range(config.value_dim // (4 * VECTOR)):
        h, dh = (
            cute.local_tile(tile, (1, VECTOR), (row, 4 * step + part)).load().to(cutlass.Float32)
            for tile in (smem.h, smem.dh)
        )
        total = total + (h * dh).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), reduction_profile=0)
    for offset in (1, 2):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
    smem.state_sums[row] = total


def lower_triangle(acc: cute.Tensor, warp: Warp, width: int, strict: bool) -> None:
    """Zero the elements of a part [16, width] of a [64, 64] product that lie above the diagonal (or on it)."""
    where = warp_tiles.coordinates(BLOCK, width)
    for i in range(cute.size(acc)):
        row, column = warp.block * BLOCK + where[i][0], warp.group * width + where[i][1]
        acc[i] = chunks.select(row > column if strict else row >= column, acc[i], 0.0)


@cute.jit
def store_diagonal(acc: cute.Tensor, diagonal: cute.Tensor, warp: Warp, width: cutlass.Constexpr) -> None:
    """Keep the warp's diagonal block of a [64, 64] product in fp32, if it lies in the warp's part."""
    for n in cutlass.range_constexpr(width // BLOCK):
        if warp.group * (width // BLOCK) + n == warp.block:
            target = fragment_of(cute.local_tile(diagonal, (BLOCK, BLOCK), (warp.block, 0)))
            for half in cutlass.range_constexpr(2):
                for row in cutlass.range_constexpr(2):
                    for left in cutlass.range_constexpr(2):
                        target[(left, row), 0, half] = acc[(left, row), 0, 2 * n + half]


def key_products(config: LocalConfig, smem: Smem, warp: Warp) -> cute.Tensor:
    """B3: M with beta on its columns to its square, and dX = P^T dW as a fragment."""
    width = CHUNK // config.groups
    m = warp_tiles.accumulator(BLOCK, width)
    gemm(m, warp.rows(smem.dvn), warp.row_part(smem.v, width))
    gemm(m, warp.rows(smem.dw), warp.row_part(smem.ke, width))
    lower_triangle(m, warp, width, strict=True)
    m.store(m.load() * row_fragment(cute.local_tile(smem.beta, (width,), (warp.group,))).load())
    warp_tiles.store_fragment(m, warp.part(smem.square, width))
    dx = warp_tiles.accumulator(BLOCK, KEYS)
    gemm(dx, warp.rows(transposed(smem.p)), warp.row_part(transposed(smem.dw), KEYS))
    return dx


def apply_gates(
    smem: Smem, warp: Warp, parts: Fragments, dx: cute.Tensor, last_row: cutlass.Int32, scale: cutlass.Float32
) -> None:
    """B3's decays: dq, dks and x = dX 2^G; the sums over rows of k dks, the last valid row left out, to shared
    memory."""
    gate = load_fragment(warp.keys(smem.gate)).load()
    total = row_fragment(cute.local_tile(smem.gate, (1, KEYS), (CHUNK - 1, warp.group))[0, None]).load()
    from_start = cute.math.exp2(gate, fastmath=True)
    parts.dq.store(parts.dq.load() * from_start * scale)
    parts.x.store(dx.load() * from_start)
    parts.dks.store(parts.dks.load() * cute.math.exp2(total - gate, fastmath=True))
    k = load_fragment(warp.keys(smem.k))
    where = warp_tiles.coordinates(BLOCK, KEYS)
    for n in range(KEYS // 8):
        for left in range(2):
            column_sum = cutlass.Float32(0.0)
            for upper in range(2):
                spot = ((left, upper), 0, n)
                row = warp.block * BLOCK + where[spot][0]
                column_sum = column_sum + chunks.select(row != last_row, k[spot] * parts.dks[spot], 0.0)
            for step in (4, 8, 16):
                column_sum = column_sum + cute.arch.shuffle_sync_bfly(column_sum, offset=step)
            smem.key_sums[warp.block, warp.group * KEYS + where[(left, 0), 0, n][1]] = column_sum


def value_gradient(config: LocalConfig, smem: Smem, warp: Warp) -> cute.Tensor:
    """B3's dv = beta dY with dY = P^T dvn as a fragment, and the sums over v of dY v for dbeta."""
    columns = config.value_dim // config.groups
    dy = warp_tiles.accumulator(BLOCK, columns)
    gemm(dy, warp.rows(transposed(smem.p)), warp.row_part(transposed(smem.dvn), columns))
    v = load_fragment(warp.part(smem.v, columns))
    v.store(v.load() * dy.load())
    write_row_sums(smem.value_row_sums, warp, v)
    beta = cute.local_tile(smem.beta, (BLOCK,), (warp.block,))
    warp_tiles.scale_rows(dy, beta)
    return dy


def write_row_sums(target: cute.Tensor, warp: Warp, acc: cute.Tensor) -> None:
    """Sums over the columns of a [16, n] fragment to the warp's group in [64, groups]; the lanes that share a row write
    the same."""
    lane = cute.arch.lane_idx()
    for upper, total in enumerate(warp_tiles.sum_of_rows(acc)):
        target[warp.block * BLOCK + upper * 8 + lane // 4, warp.group] = total


def inverse_gradient(config: LocalConfig, smem: Smem, warp: Warp) -> None:
    """B3's dL = -strict-lower(P^T M P^T) to shared memory in M's place."""
    width = CHUNK // config.groups
    p_m = warp_tiles.accumulator(BLOCK, width)
    gemm(p_m, warp.rows(transposed(smem.p)), warp.row_part(transposed(smem.square), width))
    warp_tiles.store_fragment(p_m, warp.part(smem.p_m, width))
    # P^T M is complete, and every warp has read M before dL takes its place.
    cute.arch.sync_threads()
    dl = warp_tiles.accumulator(BLOCK, width)
    gemm(dl, warp.rows(smem.p_m), warp.row_part(smem.p, width))
    dl.store(-dl.load())
    lower_triangle(dl, warp, width, strict=True)
    warp_tiles.store_fragment(dl, warp.part(smem.square, width))
    store_diagonal(dl, smem.dl_diagonal, warp, width)


def _anchor(smem: Smem, warp: Warp, block: int | cutlass.Int32) -> cute.Tensor:
    """G of the last row of a block, as a fragment of the warp's columns."""
    return row_fragment(cute.local_tile(smem.gate, (1, KEYS), (block * BLOCK + BLOCK - 1, warp.group))[0, None]).load()


def _step(smem: Smem, warp: Warp, block: int) -> cute.Tensor:
    """Decay over a whole block: from the last row of the block before it to its own last row."""
    return cute.math.exp2(_anchor(smem, warp, block) - _anchor(smem, warp, block - 1), fastmath=True)


def _square(tile: cute.Tensor, row: int | cutlass.Int32, column: int | cutlass.Int32) -> cute.Tensor:
    return cute.local_tile(tile, (BLOCK, BLOCK), (row, column))


@cute.jit
def earlier_blocks(smem: Smem, warp: Warp, parts: Fragments) -> None:
    """B4's dqi and a from the blocks before the warp's own, J = 0, 1, ..

    With the anchor b_J = G of the last row of block J, both 2^(G_i - b_J) and kd_j = k_j 2^(b_J - G_j) are at most 1;
    the sums are carried from anchor to anchor by the whole blocks' decays, so that one operand kd serves all blocks.
    """
    dqi, a = warp_tiles.accumulator(BLOCK, KEYS), warp_tiles.accumulator(BLOCK, KEYS)
    for other in cutlass.range_constexpr(CHUNK // BLOCK - 1):
        if other < warp.block:
            if cutlass.const_expr(other > 0):
                step = _step(smem, warp, other)
                dqi.store(dqi.load() * step)
                a.store(a.load() * step)
            kd = cute.local_tile(transposed(smem.kd), (KEYS, BLOCK), (warp.group, other))
            gemm(dqi, _square(smem.e, warp.block, other), kd)
            gemm(a, _square(smem.square, warp.block, other), kd)
    if warp.block > 0:
        gate = load_fragment(warp.keys(smem.gate)).load()
        inside = cute.math.exp2(gate - _anchor(smem, warp, warp.block - 1), fastmath=True)
        parts.dq.store(parts.dq.load() + dqi.load() * inside)
        parts.x.store(parts.x.load() + a.load() * inside)


@cute.jit
def later_blocks(smem: Smem, warp: Warp, parts: Fragments) -> None:
    """B4's t from the blocks after the warp's own, from the last one on, added to dks; anchors as in `earlier_blocks`.

    The operands are qd_i = q_i 2^(G_i - b_(I-1)) and kbd_i = beta_i k_i 2^(G_i - b_(I-1)), at most the plain values.
    """
    t = warp_tiles.accumulator(BLOCK, KEYS)
    for back in cutlass.range_constexpr(CHUNK // BLOCK - 1):
        other = CHUNK // BLOCK - 1 - back
        if other > warp.block:
            if cutlass.const_expr(back > 0):
                t.store(t.load() * _step(smem, warp, other))
            for square, tile in ((smem.e, smem.qd), (smem.square, smem.kbd)):
                operand = cute.local_tile(transposed(tile), (KEYS, BLOCK), (warp.group, other))
                gemm(t, _square(transposed(square), warp.block, other), operand)
    if warp.block < CHUNK // BLOCK - 1:
        gate = load_fragment(warp.keys(smem.gate)).load()
        inside = cute.math.exp2(_anchor(smem, warp, warp.block) - gate, fastmath=True)
        parts.dks.store(parts.dks.load() + t.load() * inside)
