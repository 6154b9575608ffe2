"""The two roles of a CTA: one warp loads, two warpgroups take tiles in turn, one multiplying while the other stores."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from culax.grouped_wgrad.stages.gemm import layouts, schedule
from culax.grouped_wgrad.stages.gemm.config import CONSUMERS, STORE_ROWS, WARPGROUP, Config
from culax.grouped_wgrad.stages.gemm.descriptors import descriptor
from culax.grouped_wgrad.stages.gemm.unaligned import load_unaligned, poison

Ring = pipeline.PipelineTmaAsync
TURN_BARRIER = 2 + CONSUMERS
"""Named barriers: 1 and 2 epilogues, 3 the producer warpgroup, 4 and 5 whose turn it is."""


@dataclass(frozen=True)
class Gmem:
    """What lives as long as the launch: TMA atoms with their coordinate tensors, and plain tensors.

    a (M, ...), b (N, ...), c (M, N[, E]) are coordinates; a_plain, b_plain the operands' memory; ws (E, slots, 16)
    int64 the device-written descriptors or None.
    """

    tma_a: cute.CopyAtom
    a: cute.Tensor
    tma_b: cute.CopyAtom
    b: cute.Tensor
    tma_c: cute.CopyAtom
    c: cute.Tensor
    a_plain: cute.Tensor
    b_plain: cute.Tensor
    ws: cute.Tensor | None


@dataclass(frozen=True)
class Smem:
    """a (tile_m, tile_k, stages), b (tile_n, tile_k, stages), c (64, epi_n, buffers), offs (MAX_EXPERTS + 1)."""

    a: cute.Tensor
    b: cute.Tensor
    c: cute.Tensor
    offs: cute.Tensor


@cute.jit
def group_tiles(config: cutlass.Constexpr[Config], smem: Smem, expert: Int32):
    """(first token, tokens, k tiles) of an expert."""
    begin = smem.offs[expert]
    length = smem.offs[expert + 1] - begin
    return begin, length, (length + config.tile_k - 1) // config.tile_k


def operand_view(config: Config, tensor: cute.Tensor, written: bool, begin: Int32, length: Int32) -> cute.Tensor:
    """The (X, tokens) coordinates of one group, for either kind of descriptor."""
    if written or not config.wrapped:
        return tensor if config.ragged else cute.domain_offset((0, begin), tensor)
    return layouts.group_of(tensor, begin, length)


@cute.jit
def load(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, ab: Ring, space: schedule.Space):
    """Producer: for each tile of this cluster, stream the group's A and B tiles through the ring.

    One warp issues TMA. Where a group cannot be read by TMA, the whole warpgroup loads it, so all its warps walk along.
    """
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    index = cute.arch.block_idx()[1]
    while index < space.total:
        expert, row, column = schedule.locate(config, space, index)
        begin, length, k_tiles = group_tiles(config, smem, expert)
        tile = row, column, begin, length, k_tiles
        if cutlass.const_expr(config.whole_producer):
            if aligned(config, begin, length):
                if warp == 0:
                    state = load_tile(config, gmem, smem, ab, state, tile, acquire_operands(config, gmem, expert))
                else:
                    state.advance(k_tiles)
            else:
                state = load_unaligned(config, gmem, smem, ab, state, tile)
        else:
            state = load_tile(config, gmem, smem, ab, state, tile, acquire_operands(config, gmem, expert))
        index += cute.arch.grid_dim()[1]
    if warp == 0:
        ab.producer_tail(state)


@cute.jit
def aligned(config: cutlass.Constexpr[Config], begin: Int32, length: Int32):
    """Whether TMA can read a K-major group: 16-byte aligned in its rows, and a multiple of 16 bytes long."""
    result = length % config.vector == 0
    if cutlass.const_expr(not config.ragged):
        result = (begin | length) % config.vector == 0
    return result


@cute.jit
def acquire_operands(config: cutlass.Constexpr[Config], gmem: Gmem, expert: Int32):
    """Descriptor pointers of A and B (None for parameter descriptors), acquired by the whole warp."""
    desc_a, desc_b = None, None
    if cutlass.const_expr(config.a_written):
        desc_a = descriptor(gmem.ws, expert, 0)
        if cutlass.const_expr(config.fault != "no_acquire_load"):
            cpasync.fence_tma_desc_acquire(desc_a)
    if cutlass.const_expr(config.b_written):
        desc_b = descriptor(gmem.ws, expert, config.slot_b)
        if cutlass.const_expr(config.fault != "no_acquire_load"):
            cpasync.fence_tma_desc_acquire(desc_b)
    return desc_a, desc_b


def partition(atom: cute.CopyAtom, rank: Int32, ctas: int, shared: cute.Tensor, tiles: cute.Tensor):
    """One CTA's part of each tile that `ctas` CTAs load together: (shared (part, stages), global (part, tiles))."""
    grouped = cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    return cpasync.tma_partition(atom, rank, cute.make_layout(ctas), *grouped)


@cute.jit
def load_tile(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, ab: Ring, state, tile, descriptors):
    """All k tiles of one output tile by TMA; returns the pipeline state."""
    row, column, begin, length, k_tiles = tile
    desc_a, desc_b = descriptors
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    ctas = cute.make_layout((config.cluster_m, config.cluster_n, 1))
    coord = ctas.get_flat_coord(rank)
    g_a = operand_view(config, gmem.a, config.a_written, begin, length)
    g_b = operand_view(config, gmem.b, config.b_written, begin, length)
    g_a = cute.local_tile(g_a, (config.tile_m, config.loaded_k), (row, None))
    g_b = cute.local_tile(g_b, (config.tile_n, config.loaded_k), (column, None))
    t_as, t_ag = partition(gmem.tma_a, coord[1], config.cluster_n, smem.a, g_a)
    t_bs, t_bg = partition(gmem.tma_b, coord[0], config.cluster_m, smem.b, g_b)
    mask_a = cute.make_layout_image_mask(ctas, coord, mode=1) if config.cluster_n > 1 else None
    mask_b = cute.make_layout_image_mask(ctas, coord, mode=0) if config.cluster_m > 1 else None
    return stream(config, gmem, smem, ab, state, k_tiles, (t_as, t_ag, mask_a, desc_a), (t_bs, t_bg, mask_b, desc_b))


@cute.jit
def stream(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, ab: Ring, state, k_tiles: Int32, part_a, part_b):
    """k_tiles stages by TMA; a part is (shared memory, coordinates, multicast mask, descriptor) of an operand."""
    t_as, t_ag, mask_a, desc_a = part_a
    t_bs, t_bg, mask_b, desc_b = part_b
    for k in cutlass.range(k_tiles, unroll=1):
        ab.producer_acquire(state)
        if cutlass.const_expr(config.poison):
            poison(config, smem, state.index)
        bar = ab.producer_get_barrier(state)
        cute.copy(
            gmem.tma_a, t_ag[None, k], t_as[None, state.index], tma_bar_ptr=bar, mcast_mask=mask_a, tma_desc_ptr=desc_a
        )
        cute.copy(
            gmem.tma_b, t_bg[None, k], t_bs[None, state.index], tma_bar_ptr=bar, mcast_mask=mask_b, tma_desc_ptr=desc_b
        )
        state.advance()
    return state


def consumer_index(config: Config) -> Int32:
    """Which consumer warpgroup this thread is in: 0 or 1."""
    return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP) - config.producers


def product(config: Config, smem: Smem):
    """(mma, accumulators, A, B) of one warpgroup's tile, both operands in shared memory."""
    mma = layouts.tiled_mma(config)
    thread = mma.get_slice(0)
    r_a = mma.make_fragment_A(thread.partition_A(smem.a))
    r_b = mma.make_fragment_B(thread.partition_B(smem.b))
    acc = cute.make_rmem_tensor(mma.partition_shape_C((config.tile_m, config.tile_n)), cutlass.Float32)
    return mma, acc, r_a, r_b


@cute.jit
def consume(config: cutlass.Constexpr[Config], main: cutlass.Constexpr, operands, gmem, smem, rings, space):
    """Consumer warpgroup: every second tile of this CTA, skipping the stages of the others.

    main(config, operands, gmem, smem, rings, state, tile) is the loop over k tiles, `multiply` or one like it;
    operands = (mma, accumulators, ...) and rings are what it works on.
    """
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
    index, turn = cute.arch.block_idx()[1], Int32(0)
    if consumer_index(config) == 1:
        pass_turn(config)
    while index < space.total:
        expert, row, column = schedule.locate(config, space, index)
        _, _, k_tiles = group_tiles(config, smem, expert)
        if turn == consumer_index(config):
            tile = expert, row, column, k_tiles
            state = work(config, main, operands, gmem, smem, rings, state, tile)
        else:
            state.advance(k_tiles)
        turn = 1 - turn
        index += cute.arch.grid_dim()[1]
    cute.arch.cp_async_bulk_wait_group(0)


def take_turn(config: Config) -> None:
    """Wait until the other warpgroup has issued all products of the tile before this one.

    This is needed for correctness: a stage barrier's parity means nothing to a reader that is two rounds ahead.
    """
    if config.turns:
        cute.arch.barrier(barrier_id=TURN_BARRIER + consumer_index(config), number_of_threads=CONSUMERS * WARPGROUP)


def pass_turn(config: Config) -> None:
    """Let the other warpgroup start its products."""
    if config.turns:
        barrier = TURN_BARRIER + 1 - consumer_index(config)
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=CONSUMERS * WARPGROUP)


@cute.jit
def work(config: cutlass.Constexpr[Config], main: cutlass.Constexpr, operands, gmem, smem, rings, state, tile):
    """One tile: products, then the store; zeros where an expert has no tokens."""
    expert, row, column, k_tiles = tile
    mma, acc = operands[:2]
    desc_c = acquire_output(config, gmem, expert)
    take_turn(config)
    if k_tiles > 0:
        state = main(config, operands, gmem, smem, rings, state, tile)
        store(config, mma, acc, gmem, smem, (expert, row, column, desc_c))
    else:
        pass_turn(config)
        if cutlass.const_expr(not config.accumulate):
            zeros = cute.make_rmem_tensor(acc.shape, cutlass.Float32)
            zeros.fill(0.0)
            store(config, mma, zeros, gmem, smem, (expert, row, column, desc_c))
    return state


@cute.jit
def acquire_output(config: cutlass.Constexpr[Config], gmem: Gmem, expert: Int32):
    """C's descriptor of an expert, acquired by every warp that may store through it, empty experts included."""
    desc_c = None
    if cutlass.const_expr(config.discrete):
        desc_c = descriptor(gmem.ws, expert, config.slot_c)
        if cutlass.const_expr(config.fault != "no_acquire"):
            cpasync.fence_tma_desc_acquire(desc_c)
    return desc_c


@cute.jit
def multiply(config: cutlass.Constexpr[Config], operands, gmem: Gmem, smem: Smem, ab: Ring, state, tile):
    """acc = sum over k_tiles > 0 tiles; a stage is released once the WGMMA group that reads it has completed.

    One group stays in flight, so the stage released after the commit of tile k is that of tile k - 1.
    """
    mma, acc, r_a, r_b = operands
    k_tiles = tile[3]
    behind = state.clone()
    for k in cutlass.range(k_tiles, unroll=1):
        ab.consumer_wait(state)
        if cutlass.const_expr(config.fault == "early_release"):
            ab.consumer_release(state)
            cute.arch.inline_ptx("nanosleep.u32 10000;")
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, k > 0)
        for block in cutlass.range_constexpr(config.tile_k // 16):
            cute.gemm(atom, acc, r_a[None, None, block, state.index], r_b[None, None, block, state.index], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if cutlass.const_expr(config.fault == "weak_release"):
            ab.consumer_release(state)
        if cutlass.const_expr(config.fault not in ("early_release", "weak_release")):
            if k > 0:
                ab.consumer_release(behind)
                behind.advance()
        state.advance()
    pass_turn(config)
    warpgroup.wait_group(0)
    if cutlass.const_expr(config.fault not in ("early_release", "weak_release")):
        ab.consumer_release(behind)
    return state


@cute.jit
def store(config: cutlass.Constexpr[Config], mma: cute.TiledMma, acc: cute.Tensor, gmem: Gmem, smem: Smem, tile):
    """Send a consumer's rows out: registers -> shared memory -> TMA store (or reduce-add), chunk by chunk.

    `row` counts in config.rows.
    With S = epi_stages >= 2 one warpgroup barrier a chunk is enough: the storing warp lets at most S - 2 older
    stores keep reading shared memory before it meets that barrier, so the buffer two chunks ahead is free.
    """
    expert, row, column, desc_c = tile
    tid = cute.arch.thread_idx()[0] % WARPGROUP
    warpgroup_index = consumer_index(config)
    storing = cute.arch.make_warp_uniform(tid // 32) == 0
    out = layouts.DTYPES[config.out_dtype]
    copy = layouts.register_to_shared(config, mma)
    thread = copy.get_slice(tid)
    t_rs_s = thread.partition_D(smem.c)
    t_rs_acc = copy.retile(acc)
    chunk_shape = cute.shape(thread.partition_S(smem.c))[:3]
    r_out = cute.make_rmem_tensor(chunk_shape, out)
    r_acc = cute.make_rmem_tensor(chunk_shape, cutlass.Float32)
    size = cute.size(r_out)
    m_c = gmem.c if config.discrete else gmem.c[None, None, expert]
    g_c = cute.local_tile(m_c, (STORE_ROWS, config.epi_n), (None, None))
    t_cs, t_cg = partition(gmem.tma_c, 0, 1, smem.c, g_c)
    row_block = row * (config.rows // STORE_ROWS)
    columns = config.tile_n // config.epi_n
    for chunk in cutlass.range_constexpr(config.chunks):
        buffer = warpgroup_index * config.epi_stages + chunk % config.epi_stages
        if cutlass.const_expr(config.epi_stages == 1):
            if storing:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=1 + warpgroup_index, number_of_threads=WARPGROUP)
        for i in cutlass.range_constexpr(size):
            r_acc[i] = t_rs_acc[chunk * size + i]
        r_out.store(r_acc.load().to(out))
        cute.copy(copy, r_out, t_rs_s[None, None, None, buffer])
        where = (None, row_block + chunk // columns, column * columns + chunk % columns)
        send(config, gmem.tma_c, (t_cs[None, buffer], t_cg[where]), desc_c, 1 + warpgroup_index, WARPGROUP)


@cute.jit
def send(
    config: cutlass.Constexpr[Config],
    atom: cute.CopyAtom,
    chunk,
    desc_c,
    barrier: Int32,
    threads: cutlass.Constexpr[int],
):
    """TMA store (or reduce-add) of a chunk that `threads` threads have written to shared memory, by their first warp.

    chunk: (shared memory, coordinates). Threads are numbered from a multiple of their count. Epilogues of both
    architectures end so; `store` says when the buffer may be written again.
    """
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
    if cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] % threads // 32) == 0:
        cute.copy(atom, chunk[0], chunk[1], tma_desc_ptr=desc_c)
        cute.arch.cp_async_bulk_commit_group()
        if cutlass.const_expr(config.epi_stages > 1):
            cute.arch.cp_async_bulk_wait_group(config.epi_stages - 2, read=True)
