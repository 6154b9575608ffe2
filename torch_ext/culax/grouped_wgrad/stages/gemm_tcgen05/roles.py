"""The three roles of a CTA: one warp loads, one issues products, four store tiles out of tensor memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import cpasync, tcgen05

from culax.grouped_wgrad.stages.gemm import schedule
from culax.grouped_wgrad.stages.gemm.config import STORE_ROWS
from culax.grouped_wgrad.stages.gemm.descriptors import descriptor
from culax.grouped_wgrad.stages.gemm.layouts import DTYPES
from culax.grouped_wgrad.stages.gemm.roles import acquire_output, group_tiles, partition, send
from culax.grouped_wgrad.stages.gemm_tcgen05 import layouts
from culax.grouped_wgrad.stages.gemm_tcgen05.by_hand import fill_operands, fill_scales, publish
from culax.grouped_wgrad.stages.gemm_tcgen05.config import LOAD_SLOTS, TILE_BYTES, WARP, Config

Ring = pipeline.PipelineTmaUmma
Accumulators = pipeline.PipelineUmmaAsync
HALF_BARRIER = 1
"""Named barriers: 1 and 2 the halves of the epilogue, 3 the tensor memory's address."""
HALF_THREADS = 2 * WARP


@dataclass(frozen=True)
class Gmem:
    """What lives as long as the launch: TMA atoms with their coordinate tensors, and plain memory.

    a (M, bytes), b (N, bytes), scales (words, atoms, atoms), c (M, N[, E]) are coordinates; a_plain, b_plain,
    scale_a, scale_b the operands' and scales' bytes; ws (E, slots, 16) int64; global_a, global_b (E,) fp32 or None.
    """

    tma: tuple[cute.CopyAtom, cute.CopyAtom, cute.CopyAtom, cute.CopyAtom]
    coordinates: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor]
    tma_c: cute.CopyAtom
    c: cute.Tensor
    plain: tuple[cute.Tensor, cute.Tensor]
    scales: tuple[cute.Pointer, cute.Pointer]
    global_scales: tuple[cute.Tensor, cute.Tensor] | None
    ws: cute.Tensor


@dataclass(frozen=True)
class Smem:
    """loads: what TMA fills, uint8 a (rows, 128, stages) and b, 16-bit words of their scales (256, K, rows, stages).

    a, b (MMA, rows, K, stages), scale_a, scale_b: the same bytes as the tensor cores read them. c (64, epi_n, buffers),
    offs (MAX_EXPERTS + 1).
    """

    loads: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor]
    a: cute.Tensor
    b: cute.Tensor
    scale_a: cute.Tensor
    scale_b: cute.Tensor
    c: cute.Tensor
    offs: cute.Tensor


def rank() -> Int32:
    """This CTA's place in its pair; 0 leads."""
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())


@cute.jit
def load(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, ab: Ring, space: schedule.Space):
    """Load warp: for each tile, stream the group's operands and scales through the ring."""
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
    index = cute.arch.block_idx()[1]
    while index < space.total:
        expert, row, column = schedule.locate(config, space, index)
        begin, length, k_tiles = group_tiles(config, smem, expert)
        descriptors = acquire_operands(config, gmem, expert)
        tile = expert, row, column, begin, length, k_tiles
        if aligned(config, begin, length):
            state = load_tile(config, gmem, smem, ab, state, tile, descriptors)
        else:
            state = load_by_hand(config, gmem, smem, ab, state, tile)
        index += cute.arch.grid_dim()[1]
    ab.producer_tail(state)


@cute.jit
def aligned(config: cutlass.Constexpr[Config], begin: Int32, length: Int32):
    """Whether TMA can read a group: K-major rows must start and end on 16 bytes; token-major ones always."""
    tokens: cutlass.Constexpr = 16 * config.packed
    result = length % tokens == 0
    if cutlass.const_expr((config.a_major, config.b_major) == ("mn", "mn")):
        result = length >= 0
    elif cutlass.const_expr(not config.ragged):
        result = (begin | length) % tokens == 0
    return result


@cute.jit
def acquire_operands(config: cutlass.Constexpr[Config], gmem: Gmem, expert: Int32):
    """Descriptor pointers of A, B and their scales, acquired by the whole warp."""
    pointers = tuple(descriptor(gmem.ws, expert, slot) for slot in range(LOAD_SLOTS))
    for slot in cutlass.range_constexpr(LOAD_SLOTS):
        if cutlass.const_expr(config.fault != "no_acquire_load"):
            cpasync.fence_tma_desc_acquire(pointers[slot])
    return pointers


@cute.jit
def arrive_full(config: cutlass.Constexpr[Config], ab: Ring, state, size: Int32):
    """This CTA's arrival on the stage's full barrier, expecting `size` bytes from TMA; in a pair, on the leader's.

    What was written to shared memory by ordinary stores was fenced before; the arrival publishes it.
    """
    bar = ab.producer_get_barrier(state)
    with cute.arch.elect_one():
        if cutlass.const_expr(config.pair):
            cute.arch.mbarrier_arrive_and_expect_tx(bar, size, 0, scope=MemScopeKind.CLUSTER)
        else:
            cute.arch.mbarrier_arrive_and_expect_tx(bar, size)


@cute.jit
def load_tile(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, ab: Ring, state, tile, descriptors):
    """All stages of one output tile by TMA; returns the pipeline state.

    NVFP4: where the group's last scale atom has unused bytes, the stage's scales are written by hand instead.
    """
    expert, row, column, begin, length, k_tiles = tile
    first = 0 if config.ragged else begin // config.packed
    b_row = column * config.cluster_m + rank() if config.pair else column
    views = tuple(cute.domain_offset((0, first), gmem.coordinates[i]) for i in range(2))
    tiles = (
        cute.local_tile(views[0], (config.tile_m, TILE_BYTES), (row, None)),
        cute.local_tile(views[1], (config.b_rows, TILE_BYTES), (b_row, None)),
        cute.local_tile(gmem.coordinates[2], layouts.scale_box(config, 0), (0, None, row)),
        cute.local_tile(gmem.coordinates[3], layouts.scale_box(config, 1), (0, None, column)),
    )
    parts = _parts(gmem, smem, tiles)
    partial = length % (4 * config.block) != 0
    for k in cutlass.range(k_tiles, unroll=1):
        ab.sync_object_empty.wait(state.index, state.phase)
        bar = ab.producer_get_barrier(state)
        by_hand = False
        if cutlass.const_expr(config.nvfp4):
            by_hand = partial and k == k_tiles - 1
        if by_hand:
            fill_scales(config, gmem, smem, tile, k, state.index)
            publish()
            arrive_full(config, ab, state, config.operand_bytes)
        else:
            arrive_full(config, ab, state, config.stage_bytes)
            for i in cutlass.range_constexpr(2, LOAD_SLOTS):
                _copy(gmem.tma[i], parts[i], k, state.index, bar, descriptors[i])
        for i in cutlass.range_constexpr(2):
            _copy(gmem.tma[i], parts[i], k, state.index, bar, descriptors[i])
        state.advance()
    return state


def _parts(gmem: Gmem, smem: Smem, tiles):
    """(shared memory (part, stages), coordinates (part, k tiles)) of each load."""
    found = []
    for i, tile in enumerate(tiles):
        modes = cute.rank(tile) - 1
        grouped = cute.group_modes(smem.loads[i], 0, modes), cute.group_modes(tile, 0, modes)
        found.append(cpasync.tma_partition(gmem.tma[i], 0, cute.make_layout(1), *grouped))
    return found


def _copy(atom: cute.CopyAtom, part, k: Int32, stage: Int32, bar, pointer) -> None:
    shared, tiles = part
    cute.copy(atom, tiles[None, k], shared[None, stage], tma_bar_ptr=bar, tma_desc_ptr=pointer)


@cute.jit
def load_by_hand(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, ab: Ring, state, tile):
    """As load_tile for groups TMA cannot read, by ordinary loads: right, and many times slower."""
    k_tiles = tile[5]
    for k in cutlass.range(k_tiles, unroll=1):
        ab.sync_object_empty.wait(state.index, state.phase)
        fill_operands(config, gmem, smem, tile, k, state.index)
        fill_scales(config, gmem, smem, tile, k, state.index)
        publish()
        arrive_full(config, ab, state, 0)
        state.advance()
    return state


@cute.jit
def multiply(
    config: cutlass.Constexpr[Config], smem: Smem, ab: Ring, acc: Accumulators, space: schedule.Space, tensor_memory
):
    """Multiply warp of a leading CTA: scales to tensor memory, then products, stage by stage.

    Copies and products of one thread run in order, so the scales of a stage need no second buffer. A stage is given
    back by a commit, which arrives once everything issued before it has completed.
    """
    mma = layouts.tiled_mma(config)
    r_a, r_b = mma.make_fragment_A(smem.a), mma.make_fragment_B(smem.b)
    accumulators, t_a, t_b = tensor_memory
    copy_a, from_a, to_a = scale_copy(config, smem.scale_a, t_a)
    copy_b, from_b, to_b = scale_copy(config, smem.scale_b, t_b)
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
    out = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.accumulator_stages)
    index, tile = cute.arch.block_idx()[1], Int32(0)
    while index < space.total:
        expert, _, _ = schedule.locate(config, space, index)
        _, length, _ = group_tiles(config, smem, expert)
        if length > 0:
            acc.producer_acquire(out)
            fence("after_thread_sync")
            target = accumulators[None, None, None, tile]
            atom = cute.make_mma_atom(mma.op)
            rest = length
            while rest > 0:
                ab.consumer_wait(state)
                stage = (None, None, None, None, state.index)
                cute.copy(copy_a, from_a[stage], to_a)
                cute.copy(copy_b, from_b[stage], to_b)
                needed = config.instructions(rest)
                atom.set(tcgen05.Field.ACCUMULATE, rest < length)
                product(atom, target, (r_a, r_b, t_a, t_b), 0, state.index)
                atom.set(tcgen05.Field.ACCUMULATE, True)
                for block in cutlass.range_constexpr(1, config.tile_k // config.instruction_k):
                    if block < needed:
                        product(atom, target, (r_a, r_b, t_a, t_b), block, state.index)
                ab.consumer_release(state)
                state.advance()
                rest -= config.tile_k
            acc.producer_commit(out)
            out.advance()
            tile = 1 - tile
        index += cute.arch.grid_dim()[1]
    acc.producer_tail(out)


def product(atom: cute.MmaAtom, target: cute.Tensor, operands, block: int, stage: Int32) -> None:
    """One instruction's tokens: operands are A and B in shared memory, then their scales in tensor memory."""
    r_a, r_b, t_a, t_b = operands
    where, scale = (None, None, block, stage), (None, None, block)
    cute.gemm(atom, target, [r_a[where], t_a[scale]], [r_b[where], t_b[scale]], target)


def scale_copy(config: Config, shared: cute.Tensor, columns: cute.Tensor):
    """tcgen05.cp of one operand's scales: (tiled copy, source descriptors with stages, target)."""
    source, target = cute.filter_zeros(shared), cute.filter_zeros(columns)
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(layouts.cta_group(config)), layouts.scale_type(config))
    copy = tcgen05.make_s2t_copy(atom, target)
    thread = copy.get_slice(0)
    return copy, tcgen05.get_s2t_smem_desc_tensor(copy, thread.partition_S(source)), thread.partition_D(target)


@cute.jit
def store(
    config: cutlass.Constexpr[Config],
    gmem: Gmem,
    smem: Smem,
    acc: Accumulators,
    space: schedule.Space,
    accumulators: cute.Tensor,
):
    """Epilogue warps: every tile of this CTA; zeros where an expert has no tokens."""
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.accumulator_stages)
    index, tile = cute.arch.block_idx()[1], Int32(0)
    while index < space.total:
        expert, row, column = schedule.locate(config, space, index)
        _, _, k_tiles = group_tiles(config, smem, expert)
        where = expert, row, column, acquire_output(config, gmem, expert)
        if k_tiles > 0:
            acc.consumer_wait(state)
            fence("after_thread_sync")
            store_tile(config, gmem, smem, acc, state, where, accumulators[None, None, None, tile], tile)
            state.advance()
            tile = 1 - tile
        else:
            if cutlass.const_expr(not config.accumulate):
                store_tile(config, gmem, smem, None, None, where, accumulators[None, None, None, 0], 0)
        index += cute.arch.grid_dim()[1]
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def store_tile(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, acc, state, where, accumulator, tile):
    """Send one tile out: tensor memory -> registers -> shared memory -> TMA store (or reduce-add), chunk by chunk.

    acc is None where there are no products: zeros then. The accumulator is given back once its last chunk, or where
    two accumulators overlap the last of the shared columns, is in registers.
    """
    expert, row, column, desc_c = where
    tid = cute.arch.thread_idx()[0]
    half = cute.arch.make_warp_uniform(tid // HALF_THREADS)
    chunks = cute.flat_divide(accumulator[(None, None), 0, 0], (config.tile_m, config.epi_n))
    copy = layouts.tensor_to_register(config, chunks[None, None, 0, 0])
    thread = copy.get_slice(tid)
    t_acc = thread.partition_S(chunks)
    m_c = gmem.c if config.discrete else gmem.c[None, None, expert]
    g_c = cute.local_tile(m_c, (STORE_ROWS, config.epi_n), (None, None))
    t_cs, t_cg = partition(gmem.tma_c, 0, 1, smem.c, g_c)
    part = thread.partition_D(cute.make_identity_tensor((config.tile_m, config.epi_n)))
    r_acc = cute.make_rmem_tensor(part.shape, cutlass.Float32)
    r_out = cute.make_rmem_tensor((config.epi_n,), DTYPES[config.out_dtype])
    for i in cutlass.range(config.chunks, unroll=1):
        chunk = i
        if cutlass.const_expr(config.overlap > 0 and acc is not None):
            if tile == 0:
                chunk = config.chunks - 1 - i
        if cutlass.const_expr(acc is not None):
            cute.copy(copy, t_acc[None, None, None, 0, chunk], r_acc)
            cute.arch.fence_view_async_tmem_load()
            if i == config.release_after:
                fence("before_thread_sync")
                acc.consumer_release(state)
        else:
            r_acc.fill(0.0)
        values = cute.make_tensor(r_acc.iterator, cute.make_layout(config.epi_n)).load()
        if cutlass.const_expr(config.nvfp4 and acc is not None):
            values = values * gmem.global_scales[0][expert] * gmem.global_scales[1][expert]
        r_out.store(values.to(DTYPES[config.out_dtype]))
        buffer = half * config.epi_stages + i % config.epi_stages
        cute.autovec_copy(r_out, smem.c[(tid % HALF_THREADS, None, buffer)])
        target = (None, row * 2 + half, column * config.chunks + chunk)
        send(config, gmem.tma_c, (t_cs[None, buffer], t_cg[target]), desc_c, HALF_BARRIER + half, HALF_THREADS)


def fence(kind: str) -> None:
    """Order tensor-memory instructions before or after this thread's next or last synchronisation with another."""
    cute.arch.inline_ptx(f"tcgen05.fence::{kind};")
