"""The two warpgroups of the local kernel up to the off-diagonal blocks: one for dq, x and dv, one for E, dL and t.

Equation numbers are those of kda/README.md. Both walk through the same barriers; between them each has its own
products, and both do their share of the work by columns.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import bulk, warp_tiles
from culax.device.chunks import select
from culax.device.sizes import BLOCK, CHUNK
from culax.device.warp_tiles import transposed
from culax.kda.stages.local import columns, layouts, memory, products
from culax.kda.stages.local.config import EIGHT, GROUP, KEYS, UNIT, LocalConfig
from culax.kda.stages.local.layouts import Smem, flat, pair_of, read_pair, square, write_pair
from culax.kda.stages.local.memory import Gmem, Task
from culax.kda.stages.local.products import by_columns, by_rows

SECOND_BARRIER = 1
"""Named barrier of the second warpgroup."""


@dataclass(frozen=True)
class Part:
    """This thread's part of an accumulator: the warp's block of 16 rows, the thread's row in the block's upper half,
    and the places of its pairs in tiles by half and group of 8 columns."""

    block: cutlass.Int32
    row: cutlass.Int32
    within: cutlass.Int32
    places: list[list[cutlass.Int32]]


def part_of_thread() -> Part:
    """The calling thread's part of its warpgroup's accumulators."""
    block = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % (CHUNK // BLOCK)
    lane = layouts.lane()
    row = block * BLOCK + lane // 4
    upper = [pair_of(row, lane, n) for n in range(KEYS // 8)]
    return Part(block, row, lane % 4, [upper, [place + EIGHT * KEYS // 2 for place in upper]])


def store_part(acc: cute.Tensor, start: cute.Pointer, part: Part) -> None:
    """Round an accumulator to a tile's dtype and write it there."""
    for half in range(2):
        for n in range(KEYS // 8):
            values = [acc[4 * n + 2 * half], acc[4 * n + 2 * half + 1]]
            write_pair(flat(start), part.places[half][n], values)


@cute.jit
def store_diagonal(acc: cute.Tensor, diagonal: cute.Tensor, part: Part) -> None:
    """Keep the 8 x 8 diagonal blocks of a [64, 64] accumulator in fp32."""
    target = flat(diagonal.iterator, CHUNK * EIGHT)
    for n in cutlass.range_constexpr(KEYS // 8):
        if part.block == n // 2:
            half = n % 2
            place = (part.row + EIGHT * half) * (EIGHT // 2) + part.within
            write_pair(target, place, [acc[4 * n + 2 * half], acc[4 * n + 2 * half + 1]])


def multiply(acc: cute.Tensor, factor: float | cutlass.Float32) -> None:
    """Multiply an accumulator by a number."""
    acc.store(acc.load() * factor)


def value_gradient(smem: Smem, part: Part, dy: cute.Tensor, block: int, totals: list[cutlass.Float32]) -> None:
    """B3's dv = beta dY over 64 columns, in v's place; adds the sums over them of dY v to the totals of both rows."""
    tile = smem.v + UNIT * block
    for half in range(2):
        beta = smem.beta[part.row + EIGHT * half]
        for n in range(KEYS // 8):
            v = read_pair(flat(tile), part.places[half][n])
            both = [dy[4 * n + 2 * half], dy[4 * n + 2 * half + 1]]
            totals[half] = totals[half] + both[0] * v[0] + both[1] * v[1]
            write_pair(flat(tile), part.places[half][n], [beta * x for x in both])


@cute.jit
def write_value_sums(config: cutlass.Constexpr, smem: Smem, task: Task, part: Part, totals) -> None:
    """dbeta's part from dY v to row_sums, zero where no value columns are this rank's."""
    for half in cutlass.range_constexpr(2):
        total = totals[half]
        for offset in cutlass.range_constexpr(1, 3):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
        if cutlass.const_expr(config.value_columns * config.splits > config.value_dim):
            total = select(memory.has_values(config, task), total, 0.0)
        if part.within == 0:
            smem.row_sums[part.row + EIGHT * half] = total


def free_first_tiles(config: LocalConfig) -> None:
    """Both warpgroups' first products are done: the tiles they read may be overwritten, here and by the other CTA."""
    cute.arch.sync_threads()
    if config.splits > 1:
        cute.arch.cluster_arrive_relaxed()


def load_queries(gmem: Gmem, smem: Smem, task: Task) -> None:
    """Start loading q, over v_new."""
    memory.load_image(task.part(gmem.q, task.head), smem.q, task.chunk.rows)
    cute.arch.cp_async_commit_group()


@cute.jit
def first(
    config: cutlass.Constexpr, gmem: Gmem, smem: Smem, task: Task, sums: cute.Tensor, scale: cutlass.Float32
) -> None:
    """The first warpgroup: dq, -x = -(dX 2^G + a), dv."""
    depth = config.value_dim
    dq, dy = products.accumulator(), products.accumulator()
    inverse, dvn = by_columns(smem.p, CHUNK, CHUNK), by_columns(smem.dvn, CHUNK, depth)
    h = by_rows(smem.h, KEYS, depth)
    products.begin()
    products.add(dy, inverse, dvn, columns=memory.value_block(config, task))
    products.add(dq, by_rows(smem.do, CHUNK, depth), h, depth=depth)
    products.commit()
    products.wait()
    # v and do are done with in both warpgroups; h serves one more product.
    cute.arch.sync_threads()
    part = part_of_thread()
    totals = [cutlass.Float32(0.0) for _ in range(2)]
    value_gradient(smem, part, dy, 0, totals)
    for later in cutlass.range_constexpr(1, config.value_columns // KEYS):
        products.begin()
        products.add(dy, inverse, dvn, columns=later)
        products.commit()
        products.wait()
        value_gradient(smem, part, dy, later, totals)
    write_value_sums(config, smem, task, part, totals)
    x = dy  # Its registers serve again: each accumulator is a fixed range of them.
    products.begin()
    products.add(x, by_rows(smem.dvn, CHUNK, depth), h, depth=depth)
    products.commit()
    columns.state_sums(config, smem)
    products.wait()
    free_first_tiles(config)
    store_part(x, smem.dw, part_of_thread())
    columns.add_state_sums(smem)
    load_queries(gmem, smem, task)
    columns.keys_from_start(smem, sums)
    bulk.publish()
    cute.arch.sync_threads()
    memory.store_values(config, gmem, smem, task)
    columns.key_operands(smem, sums, task.chunk.rows - 1)
    products.begin()
    products.add(x, inverse, by_columns(smem.dw, CHUNK, KEYS))
    products.commit()
    multiply(dq, scale)
    products.wait()
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    columns.query_operands(smem, sums)
    cute.arch.sync_threads()
    part = part_of_thread()
    earlier_blocks(smem, part, dq, x)
    if cutlass.const_expr(config.splits > 1):
        cute.arch.cluster_wait()
    part = part_of_thread()
    store_part(dq, smem.dq, part)
    store_part(x, smem.x, part)


@cute.jit
def second(
    config: cutlass.Constexpr, gmem: Gmem, smem: Smem, task: Task, sums: cute.Tensor, scale: cutlass.Float32
) -> None:
    """The second warpgroup: E, M, dL, and t with dks."""
    depth, values = config.value_dim, config.value_columns
    e, m = products.accumulator(), products.accumulator()
    v_new = by_rows(smem.v_new, CHUNK, depth)
    products.begin()
    first_step = memory.value_block(config, task) * (KEYS // BLOCK)
    products.add(m, by_rows(smem.dvn, CHUNK, depth), by_rows(smem.v, CHUNK, values), depth=values, first=first_step)
    products.add(e, by_rows(smem.do, CHUNK, depth), v_new, depth=depth)
    products.commit()
    products.wait()
    cute.arch.sync_threads()
    part = part_of_thread()
    multiply(e, scale)
    store_part(e, smem.e, part)
    store_diagonal(e, smem.e_diagonal, part)
    t = e  # Its registers serve again: each accumulator is a fixed range of them.
    products.begin()
    products.add(t, v_new, by_rows(smem.dh, KEYS, depth), depth=depth)
    products.commit()
    columns.state_sums(config, smem)
    products.wait()
    free_first_tiles(config)
    store_part(t, smem.dks, part_of_thread())
    columns.add_state_sums(smem)
    load_queries(gmem, smem, task)
    if cutlass.const_expr(values * config.splits > depth):
        for i in cutlass.range_constexpr(cute.size(m)):
            m[i] = select(memory.has_values(config, task), m[i], 0.0)
    columns.keys_from_start(smem, sums)
    bulk.publish()
    cute.arch.sync_threads()
    products.begin()
    products.add(m, by_rows(smem.dw, CHUNK, KEYS), by_rows(smem.ke, CHUNK, KEYS), fresh=False)
    products.commit()
    memory.store_values(config, gmem, smem, task)
    columns.key_operands(smem, sums, task.chunk.rows - 1)
    products.wait()
    cute.arch.cp_async_wait_group(0)
    if cutlass.const_expr(config.splits > 1):
        cute.arch.cluster_wait()
        memory.send(m, smem, task)
    cute.arch.sync_threads()
    if cutlass.const_expr(config.splits > 1):
        memory.receive(m, smem)
    inverse_gradient(smem, sums, m)
    cute.arch.sync_threads()
    part = part_of_thread()
    later_blocks(smem, part, t)
    # Its own four warps alone have read qd and kbd, whose place t takes.
    cute.arch.barrier(barrier_id=SECOND_BARRIER, number_of_threads=GROUP)
    part = part_of_thread()
    store_part(t, smem.t, part)


def inverse_gradient(smem: Smem, sums: cute.Tensor, m: cute.Tensor) -> None:
    """B3's -dL = strict-lower(P^T M P^T) from the sums of M, whose columns get beta here; above the diagonal dl holds
    what is never read."""
    part = part_of_thread()
    below = part.row - 2 * part.within
    for n in range(KEYS // 8):
        beta = read_pair(smem.beta, 4 * n + part.within)
        for half in range(2):
            for c in range(2):
                i = 4 * n + 2 * half + c
                m[i] = select(below > 8 * n + c - EIGHT * half, m[i] * beta[c], 0.0)
    store_part(m, smem.m, part)
    bulk.publish()
    cute.arch.barrier(barrier_id=SECOND_BARRIER, number_of_threads=GROUP)
    p_m = dl = m
    products.begin()
    products.add(p_m, by_columns(smem.p, CHUNK, CHUNK), by_columns(smem.m, CHUNK, CHUNK))
    products.commit()
    columns.query_operands(smem, sums)
    products.wait()
    operand = products.rounded(p_m)
    products.begin()
    products.add(dl, operand, by_rows(smem.p, CHUNK, CHUNK))
    products.commit()
    products.wait()
    part = part_of_thread()
    store_part(dl, smem.dl, part)
    store_diagonal(dl, smem.dl_diagonal, part)


def _decay(smem: Smem, part: Part, eights: list, n: int) -> list[cutlass.Float32]:
    """Decays over some eights of rows, for the thread's columns of group n."""
    table = flat(smem.decays.iterator, CHUNK // EIGHT * KEYS)
    factor = read_pair(table, eights[0] * (KEYS // 2) + 4 * n + part.within)
    for eight in eights[1:]:
        more = read_pair(table, eight * (KEYS // 2) + 4 * n + part.within)
        factor = [factor[c] * more[c] for c in range(2)]
    return factor


def _scale(smem: Smem, part: Part, accs: list[cute.Tensor], eights: list, halves: tuple[int, ...]) -> None:
    """Multiply the columns of accumulators by the decays over some eights of rows, in some halves of the block."""
    for n in range(KEYS // 8):
        factor = _decay(smem, part, eights, n)
        for acc in accs:
            for half in halves:
                for c in range(2):
                    i = 4 * n + 2 * half + c
                    acc[i] = acc[i] * factor[c]


def _of_warp(acc: cute.Tensor) -> cute.Tensor:
    """A warp's part of an accumulator as `warp_tiles.gemm` takes it."""
    return cute.make_tensor(acc.iterator, warp_tiles.accumulator(BLOCK, KEYS).layout)


def _block(start: cute.Pointer, row: cutlass.Int32, column: int | cutlass.Int32) -> cute.Tensor:
    return cute.local_tile(square(start), (BLOCK, BLOCK), (row, column))


def _columns_of(start: cute.Pointer, block: int | cutlass.Int32) -> cute.Tensor:
    """Rows of one block of a decayed operand, columns first."""
    return cute.local_tile(transposed(square(start)), (KEYS, BLOCK), (0, block))


@cute.jit
def earlier_blocks(smem: Smem, part: Part, dq: cute.Tensor, x: cute.Tensor) -> None:
    """B4's dqi and a from earlier rows, added to B3's parts, all but the last factor 2^(G - G before the 8 rows); x and
    dL have their signs changed.

    A sum holds what it would be at an anchor, G of some earlier row: do S^T and dX those at the chunk's start. From
    block to block the anchor moves on, by a factor of at most 1, to its last row, where the block's kd is anchored.
    """
    dq_part, x_part = _of_warp(dq), _of_warp(x)
    for other in cutlass.range_constexpr(CHUNK // BLOCK - 1):
        if other < part.block:
            _scale(smem, part, [dq, x], [2 * other, 2 * other + 1], (0, 1))
            kd = _columns_of(smem.kd, other)
            warp_tiles.gemm(dq_part, _block(smem.e, part.block, other), kd)
            warp_tiles.gemm(x_part, _block(smem.dl, part.block, other), kd)
    _scale(smem, part, [dq, x], [2 * part.block], (1,))
    middle = _columns_of(smem.middle, part.block)
    warp_tiles.gemm(dq_part, _block(smem.e, part.block, part.block), middle, keep=(1, 0))
    warp_tiles.gemm(x_part, _block(smem.dl, part.block, part.block), middle, keep=(1, 0))


@cute.jit
def later_blocks(smem: Smem, part: Part, t: cute.Tensor) -> None:
    """B4's t from later rows, added to dks, all but the last factor 2^(G of the 8 rows' last - G); the anchor moves
    back from the chunk's end as in `earlier_blocks`."""
    t_part = _of_warp(t)
    for back in cutlass.range_constexpr(CHUNK // BLOCK - 1):
        other = CHUNK // BLOCK - 1 - back
        if other > part.block:
            _scale(smem, part, [t], [2 * other, 2 * other + 1], (0, 1))
            for tile, operand in ((smem.e, smem.qd), (smem.dl, smem.kbd)):
                left = transposed(_block(tile, cutlass.Int32(other), part.block))
                warp_tiles.gemm(t_part, left, _columns_of(operand, other))
    _scale(smem, part, [t], [2 * part.block + 1], (0,))
    for tile, operand in ((smem.e, smem.middle), (smem.dl, smem.kb_middle)):
        left = transposed(_block(tile, part.block, part.block))
        warp_tiles.gemm(t_part, left, _columns_of(operand, part.block), keep=(0, 1))
