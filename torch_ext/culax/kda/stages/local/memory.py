"""The local kernel's traffic with global memory, and with the other CTA of its cluster."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import bulk, chunks, gates
from culax.device.sizes import CHUNK, VECTOR
from culax.kda.stages.local import layouts
from culax.kda.stages.local.config import BARRIERS, GROUP, KEYS, THREADS, UNIT, LocalConfig
from culax.kda.stages.local.layouts import Smem, flat


@dataclass(frozen=True)
class Gmem:
    """Inputs [B, T, heads, D], tapes [NT, HV, ...] as images, the chunk table, and the gradients [B, T, heads, D]
    (dbeta [B, T, HV])."""

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
    """What a CTA works on: a chunk by its index and row of the table, a value head and that head's query head, and
    the part of the columns that the CTA's rank in its cluster says."""

    index: cutlass.Int32
    chunk: chunks.Chunk
    value_head: cutlass.Int32
    head: cutlass.Int32
    rank: cutlass.Int32

    def part(self, tensor: cute.Tensor, head: cutlass.Int32, columns: int = KEYS) -> cute.Tensor:
        """This rank's columns [64, columns] of the chunk's rows in a tensor [B, T, heads, D]."""
        rows = chunks.chunk_rows(tensor, self.chunk, head)
        return cute.local_tile(rows, (CHUNK, columns), (0, self.rank))


def value_block(config: LocalConfig, task: Task) -> int | cutlass.Int32:
    """The first block of 64 value columns that is this rank's."""
    return task.rank if config.splits > 1 and config.value_dim > KEYS else 0


def has_values(config: LocalConfig, task: Task) -> bool | cutlass.Boolean:
    """Whether any value columns are this rank's."""
    return True if config.value_columns * config.splits == config.value_dim else task.rank == 0


def load_image(source: cute.Tensor, start: cute.Pointer, rows: cutlass.Int32) -> None:
    """Start copying [64, D] bf16 rows to an image, 16 bytes a thread; rows from `rows` on are not read and become zero.

    The copies join the calling thread's current cp.async group.
    """
    across = source.shape[1] // VECTOR
    thread = layouts.thread()
    vector, first, step = thread & (across - 1), thread >> (across.bit_length() - 1), THREADS // across
    place = (vector >> 3) * UNIT + first * KEYS + ((vector ^ first) & 7) * VECTOR
    for i in range(CHUNK // step):
        row = first + i * step
        begin = source[row, None].iterator + vector * VECTOR
        size = chunks.select_int(row < rows, 16, 0)
        cute.arch.inline_ptx(
            "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
            read_only_args=[start + place + i * step * KEYS, begin, size],
        )


@cute.jit
def store_tile(start: cute.Pointer, target: cute.Tensor, rows: cutlass.Int32) -> None:
    """Copy the first `rows` rows of an image [64, 64], or of such a tile in fp32, to global memory, 16 bytes a
    thread."""
    dtype = target.element_type
    vector = 128 // dtype.width
    across = KEYS // vector
    source = flat(start)
    thread = layouts.thread()
    at = thread & (across - 1)
    wide = across // 8
    for i in cutlass.range_constexpr(CHUNK * across // THREADS):
        row = (thread >> (across.bit_length() - 1)) + i * (THREADS // across)
        place = row * across + (at ^ ((row & 7) * wide))
        four = cute.make_rmem_tensor((vector,), dtype)
        cute.autovec_copy(cute.local_tile(source, (vector,), (place,)), four)
        if row < rows:
            cute.autovec_copy(four, cute.local_tile(target[row, None], (vector,), (at,)))


def load_inputs(config: LocalConfig, gmem: Gmem, smem: Smem, task: Task) -> None:
    """Start all loads but those of the gates and of q: the tapes' bulk copies, and a cp.async group for the rest."""
    rows = task.chunk.rows
    bulk.init_barriers([(smem.arrived, BARRIERS, 1)])
    keep_chunk(smem, task)
    _load_tapes(config, gmem, smem, task)
    load_image(chunks.chunk_rows(gmem.do, task.chunk, task.value_head), smem.do, rows)
    load_image(task.part(gmem.k, task.head), smem.k, rows)
    values = chunks.chunk_rows(gmem.v, task.chunk, task.value_head)
    for block in range(config.value_columns // KEYS):
        at = (0, value_block(config, task) + block)
        load_image(cute.local_tile(values, (CHUNK, KEYS), at), smem.v + UNIT * block, rows)
    load_image(chunks.chunk_rows(gmem.akk, task.chunk, task.value_head), smem.p, rows)
    cute.arch.cp_async_commit_group()
    gates.load_beta(chunks.chunk_column(gmem.beta, task.chunk, task.value_head), smem.beta, rows)


@cute.jit
def keep_chunk(smem: Smem, task: Task) -> None:
    """Chunk and query head to shared memory, a barrier must lie between this and `kept`; what the other CTA sends is
    announced."""
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(smem.m_arrived, 4 * UNIT)
        cute.arch.mbarrier_arrive_and_expect_tx(smem.sums_arrived, 4 * CHUNK)
        chunk = task.chunk
        for i, field in enumerate((task.head, chunk.batch, chunk.first, chunk.rows)):
            smem.chunk[i] = field


def kept(smem: Smem, task: Task) -> Task:
    """The same task from shared memory, so that it takes no registers before; but for the chunk's sequence."""
    head, batch, first, rows = (smem.chunk[i] for i in range(4))
    return Task(task.index, chunks.Chunk(cutlass.Int32(0), batch, first, rows), task.value_head, head, task.rank)


@cute.jit
def _load_tapes(config: cutlass.Constexpr, gmem: Gmem, smem: Smem, task: Task) -> None:
    """v_new and dvn whole; of h and dh this rank's 64 rows, in every block of columns."""
    if cute.arch.thread_idx()[0] == 0:
        pairs = []
        for tape, start in ((gmem.v_new, smem.v_new), (gmem.dvn, smem.dvn)):
            pairs.append((tape[task.index, task.value_head, None], flat(start, CHUNK * config.value_dim)))
        for tape, start in ((gmem.h, smem.h), (gmem.dh, smem.dh)):
            entry = tape[task.index, task.value_head, None]
            for block in cutlass.range_constexpr(config.value_dim // KEYS):
                part = cute.local_tile(entry, (UNIT,), (block * config.splits + task.rank,))
                pairs.append((part, flat(start + UNIT * block)))
        bulk.load_images(pairs, smem.arrived)


def wait_for_inputs(smem: Smem) -> None:
    """Until the loads have arrived, and every thread and wgmma may read them."""
    cute.arch.cp_async_wait_group(0)
    bulk.wait(smem.arrived, 0)
    bulk.publish()
    cute.arch.sync_threads()


@cute.jit
def store_values(config: cutlass.Constexpr, gmem: Gmem, smem: Smem, task: Task) -> None:
    """Write dv, by all threads."""
    if has_values(config, task):
        rows = chunks.chunk_rows(gmem.dv, task.chunk, task.value_head)
        for block in cutlass.range_constexpr(config.value_columns // KEYS):
            target = cute.local_tile(rows, (CHUNK, KEYS), (0, value_block(config, task) + block))
            store_tile(smem.v + UNIT * block, target, task.chunk.rows)


def _exchanged(smem: Smem, thread: cutlass.Int32, n: int) -> cute.Tensor:
    """Where an accumulator's elements 4 n .. 4 n + 3 of a warpgroup's thread lie in `received`: in the first unit for
    n < 4, in its warp's quarter."""
    vector = n // 4 * (UNIT // VECTOR) + (thread >> 5) * GROUP + n % 4 * 32 + (thread & 31)
    return cute.local_tile(flat(smem.received), (4,), (vector,))


def send(acc: cute.Tensor, smem: Smem, task: Task) -> None:
    """Write an accumulator of one warpgroup to the other CTA's `received`."""
    thread = layouts.thread() & (GROUP - 1)
    four = cute.make_rmem_tensor((4,), cutlass.Float32)
    bits = cute.recast_tensor(four, cutlass.Int32)
    for n in range(KEYS // 8):
        for i in range(4):
            four[i] = acc[4 * n + i]
        target = _exchanged(smem, thread, n).iterator
        values = tuple(bits[i] for i in range(4))
        cute.arch.store_async_dsmem(target, values, smem.m_arrived, 1 - task.rank)


def receive(acc: cute.Tensor, smem: Smem) -> None:
    """Wait for what the other CTA sends and add it. Then a warp may overwrite its quarter of either unit."""
    bulk.wait(smem.m_arrived, 0)
    thread = layouts.thread() & (GROUP - 1)
    four = cute.make_rmem_tensor((4,), cutlass.Float32)
    for n in range(KEYS // 8):
        cute.autovec_copy(_exchanged(smem, thread, n), four)
        for i in range(4):
            acc[4 * n + i] = acc[4 * n + i] + four[i]
    cute.arch.sync_warp()


@cute.jit
def write_beta(config: cutlass.Constexpr, gmem: Gmem, smem: Smem, task: Task) -> None:
    """dbeta of each valid row: the sums by row of all ranks, written by the first. A barrier must lie between the sums
    and this."""
    row = layouts.thread()
    if cutlass.const_expr(config.splits > 1):
        # The other CTA is done with what lay where its sums go.
        cute.arch.cluster_wait()
    if row < CHUNK:
        total = smem.row_sums[row]
        if task.rank == 0:
            if cutlass.const_expr(config.splits > 1):
                bulk.wait(smem.sums_arrived, 0)
                total = total + smem.peer_sums[row]
            if row < task.chunk.rows:
                chunks.chunk_column(gmem.dbeta, task.chunk, task.value_head)[row] = total.to(gmem.dbeta.element_type)
        else:
            one = cute.make_rmem_tensor((1,), cutlass.Float32)
            one[0] = total
            value = cute.recast_tensor(one, cutlass.Int32)[0]
            cute.arch.store_async_dsmem(smem.peer_sums.iterator + row, value, smem.sums_arrived, 0)


@cute.jit
def write_zeros(config: cutlass.Constexpr, gmem: Gmem, task: Task) -> None:
    """Zero gradients for the -rows tokens of a stretch outside all sequences; the ranks take turns at rows."""
    thread = cute.arch.thread_idx()[0]
    head = task.value_head if config.partial else task.head
    for row in cutlass.range(task.rank, -task.chunk.rows, config.splits, unroll=1):
        for tensor, column in (
            (gmem.dq, head),
            (gmem.dk, head),
            (gmem.dg, task.value_head),
            (gmem.dv, task.value_head),
        ):
            target = chunks.chunk_rows(tensor, task.chunk, column)
            if thread < tensor.shape[3]:
                target[row, thread] = tensor.element_type(0.0)
        if thread == 0:
            chunks.chunk_column(gmem.dbeta, task.chunk, task.value_head)[row] = gmem.dbeta.element_type(0.0)
