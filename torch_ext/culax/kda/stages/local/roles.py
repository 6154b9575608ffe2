"""The two warpgroups of the local kernel up to the off-diagonal blocks: one for dq, x and dv, one for E, dL and t.

Equation numbers are those of kda/README.md. Both walk through the same barriers; between them each has its own
products, and both do their share of the work by columns.
"""

import cutlass
import cutlass.cute as cute

from culax.device import bulk
from culax.device.chunks import select
from culax.device.sizes import BLOCK, CHUNK
from culax.kda.stages.local import columns, memory, pairs, products
from culax.kda.stages.local.config import EIGHT, GROUP, KEYS, UNIT, LocalConfig
from culax.kda.stages.local.layouts import Part, Smem, flat, part_of_thread, read_pair, write_pair
from culax.kda.stages.local.memory import Gmem, Task
from culax.kda.stages.local.products import Operand, by_columns, by_rows

FIRST_BARRIER, SECOND_BARRIER = 1, 2
"""Named barriers of the two warpgroups."""


def store_part(acc: cute.Tensor, start: cute.Pointer, part: Part) -> None:
    """Round an accumulator to a tile's dtype and write it there."""
    for half in range(2):
        for n in range(KEYS // 8):
            values = [acc[4 * n + 2 * half], acc[4 * n + 2 * half + 1]]
            write_pair(flat(start), part.places[half][n], values)


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


def multiply_states(
    config: LocalConfig,
    gmem: Gmem,
    smem: Smem,
    task: Task,
    acc: cute.Tensor,
    left: Operand,
    states: Operand,
    target: cute.Pointer,
) -> None:
    """A product with h or dh, to a tile, and beside it the sums of h dh. It is the last one to read the first tiles:
    they may be overwritten then, here and by the other CTA, and q is loaded over v_new."""
    products.begin()
    products.add(acc, left, states, depth=config.value_dim)
    products.commit()
    columns.state_sums(config, smem)
    products.wait()
    cute.arch.sync_threads()
    if config.splits > 1:
        cute.arch.cluster_arrive_relaxed()
    store_part(acc, target, part_of_thread())
    columns.add_state_sums(smem)
    task = memory.kept(smem, task)
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
    multiply_states(config, gmem, smem, task, x, by_rows(smem.dvn, CHUNK, depth), h, smem.dw)
    columns.keys_from_start(smem, sums)
    bulk.publish()
    cute.arch.sync_threads()
    task = memory.kept(smem, task)
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
    columns.set_aside(smem, sums)
    part = part_of_thread()
    pairs.earlier_blocks(smem, part, dq, x)
    if cutlass.const_expr(config.splits > 1):
        cute.arch.cluster_wait()
    part = part_of_thread()
    store_part(dq, smem.dq, part)
    # Its own four warps alone have read kd, whose place x takes.
    cute.arch.barrier(barrier_id=FIRST_BARRIER, number_of_threads=GROUP)
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
    pairs.store_coefficients(e, smem.e, smem.e_diagonal, part, True)
    t = e  # Its registers serve again: each accumulator is a fixed range of them.
    multiply_states(config, gmem, smem, task, t, v_new, by_rows(smem.dh, KEYS, depth), smem.dks)
    if cutlass.const_expr(values * config.splits > depth):
        for i in cutlass.range_constexpr(cute.size(m)):
            m[i] = select(memory.has_values(config, task), m[i], 0.0)
    columns.keys_from_start(smem, sums)
    bulk.publish()
    cute.arch.sync_threads()
    products.begin()
    products.add(m, by_rows(smem.dw, CHUNK, KEYS), by_rows(smem.ke, CHUNK, KEYS), fresh=False)
    products.commit()
    task = memory.kept(smem, task)
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
    pairs.later_blocks(smem, part, t)
    # Its own four warps alone have read qd and kbd, whose place t and the sums take.
    cute.arch.barrier(barrier_id=SECOND_BARRIER, number_of_threads=GROUP)
    columns.set_aside(smem, sums)
    part = part_of_thread()
    store_part(t, smem.t, part)


def inverse_gradient(smem: Smem, sums: cute.Tensor, m: cute.Tensor) -> None:
    """B3's -dL = strict-lower(P^T M P^T) from the sums of M, whose columns get beta here."""
    part = part_of_thread()
    below = part.row - 2 * part.within
    for n in range(KEYS // 8):
        beta = read_pair(smem.beta, 4 * n + part.within)
        for half in range(2):
            at, pair = part.places[half][n], [m[4 * n + 2 * half + c] * beta[c] for c in range(2)]
            pair = [select(below > 8 * n + c - EIGHT * half, pair[c], 0.0) for c in range(2)]
            write_pair(flat(smem.m), at, pair)
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
    pairs.store_coefficients(dl, smem.dl, smem.dl_diagonal, part, False)
