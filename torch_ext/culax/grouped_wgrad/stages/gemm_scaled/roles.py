"""The roles before the epilogue: warps that load, decode scales and convert B, and two warpgroups that multiply."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from culax.grouped_wgrad.stages.gemm import roles, schedule
from culax.grouped_wgrad.stages.gemm.config import CONSUMERS, WARPGROUP
from culax.grouped_wgrad.stages.gemm.unaligned import fill, group_view
from culax.grouped_wgrad.stages.gemm_scaled import convert, layouts
from culax.grouped_wgrad.stages.gemm_scaled.config import ATOM, Config

ATOM_BYTES = 512


@dataclass(frozen=True)
class Rings:
    """loaded: TMA and scales -> both conversions; ready: B converted, here or elsewhere -> multiplying warpgroups."""

    loaded: roles.Ring
    ready: roles.Ring


@dataclass(frozen=True)
class Gmem(roles.Gmem):
    """Operands as bytes (X, T / packed), and the scales.

    scale_a, scale_b: the bytes of the scale tensors as vectors of 4 int32, 4 bytes of one row each (4, atoms * 32).
    global_a, global_b (E,) fp32 or None. concatenated: the scale layout, 0 for "padded".
    """

    scale_a: cute.Tensor
    scale_b: cute.Tensor
    global_a: cute.Tensor | None
    global_b: cute.Tensor | None
    concatenated: Int32


@dataclass(frozen=True)
class Smem:
    """What a stage holds, in the views its users want.

    a, b (rows, loaded_k, stages) bytes as TMA writes them; a_words, b_words (4, 16-byte chunks, stages) int32, the
    same memory; a_factors, b_factors (rows, blocks, stages) bf16 twice; ready_b (tile_n, tile_k, ready_stages) bf16 as
    WGMMA reads it; b_chunks (4, chunks, ready_stages) int32, the same memory. c, offs as in roles.Smem; atoms
    (MAX_EXPERTS + 1). Rows are tile_m of A and b_rows of B.
    """

    a: cute.Tensor
    b: cute.Tensor
    a_words: cute.Tensor
    b_words: cute.Tensor
    a_factors: cute.Tensor
    b_factors: cute.Tensor
    ready_b: cute.Tensor
    b_chunks: cute.Tensor
    c: cute.Tensor
    offs: cute.Tensor
    atoms: cute.Tensor


def part_of_b(config: Config, column: Int32) -> Int32:
    """Which b_rows of B this CTA loads and converts for the tiles of a column."""
    return column * config.cluster_m + cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())


def state_of(user: pipeline.PipelineUserType, stages: int) -> pipeline.PipelineState:
    """The first stage of a ring."""
    return pipeline.make_pipeline_state(user, stages)


@cute.jit
def group(config: cutlass.Constexpr[Config], smem: Smem, expert: Int32):
    """(first token, tokens, tokens of other groups before them in the first k tile, k tiles) of an expert.

    Where tiles are masked they start on 16 bytes, up to 16 tokens before the group.
    """
    begin, length, k_tiles = roles.group_tiles(config, smem, expert)
    lead = Int32(0)
    if cutlass.const_expr(config.masked):
        if length > 0:
            lead = begin % (config.vector * config.packed)
            k_tiles = (length + lead + config.tile_k - 1) // config.tile_k
    return begin, length, lead, k_tiles


@cute.jit
def loadable(config: cutlass.Constexpr[Config], begin: Int32, length: Int32):
    """Whether TMA can read a group's bytes: rows that start on 16 bytes and are a multiple of them long.

    An expert-major group starts at X * begin bytes, and X is a multiple of 8.
    """
    result = (begin | length) % config.vector == 0
    if cutlass.const_expr(config.masked):
        result = begin % config.vector == 0
    if cutlass.const_expr(config.ragged):
        result = (length % config.vector == 0) & (begin % 2 == 0)
    return result


@cute.jit
def load(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, ring: roles.Ring, space: schedule.Space):
    """The loading warp: bytes of both operands of every tile, by TMA where it can read the group."""
    state = state_of(pipeline.PipelineUserType.Producer, config.stages)
    index = cute.arch.block_idx()[1]
    while index < space.total:
        expert, row, column = schedule.locate(config, space, index)
        begin, length, lead, k_tiles = group(config, smem, expert)
        begin, length = (begin - lead) // config.packed, length // config.packed
        tile = row, part_of_b(config, column), begin, length, k_tiles
        if loadable(config, begin, length):
            descriptors = roles.acquire_operands(config, gmem, expert)
            state = load_tile(config, gmem, smem, ring, state, tile, descriptors)
        else:
            state = load_unaligned(config, gmem, smem, ring, state, tile)
        index += cute.arch.grid_dim()[1]


@cute.jit
def load_tile(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, ring: roles.Ring, state, tile, descriptors):
    """All k tiles of one output tile by TMA; returns the pipeline state."""
    row, part, begin, length, k_tiles = tile
    g_a = roles.operand_view(config, gmem.a, config.a_written, begin, length)
    g_b = roles.operand_view(config, gmem.b, config.b_written, begin, length)
    g_a = cute.local_tile(g_a, (config.tile_m, config.loaded_k), (row, None))
    g_b = cute.local_tile(g_b, (config.b_rows, config.loaded_k), (part, None))
    a = roles.partition(gmem.tma_a, 0, 1, smem.a, g_a)
    b = roles.partition(gmem.tma_b, 0, 1, smem.b, g_b)
    return roles.stream(
        config, gmem, smem, ring, state, k_tiles, (*a, None, descriptors[0]), (*b, None, descriptors[1])
    )


@cute.jit
def load_unaligned(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, ring: roles.Ring, state, tile):
    """As load_tile, byte by byte: the full barrier gets an arrival without a byte count."""
    row, part, begin, length, k_tiles = tile
    g_a, g_b = (group_view(config, plain, begin, length) for plain in (gmem.a_plain, gmem.b_plain))
    for k in cutlass.range(k_tiles, unroll=1):
        ring.sync_object_empty.wait(state.index, state.phase)
        start = k * config.loaded_k
        fill(smem.a[None, None, state.index], g_a, row * config.tile_m, start, length, 32)
        fill(smem.b[None, None, state.index], g_b, part * config.b_rows, start, length, 32)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.producer_get_barrier(state))
        state.advance()
    return state


@cute.jit
def atom_scales(scales: cute.Tensor, atom: Int64, target: cute.Tensor):
    """Lane l's 16 bytes of a 512-byte atom; NaN where the tensor doesn't hold it. Reads nothing out of bounds."""
    target.fill(Int32(-1))
    if (atom >= 0) & (atom * 32 + 32 <= scales.shape[1]):
        cute.autovec_copy(scales[None, atom * 32 + cute.arch.lane_idx()], target)


@cute.jit
def delay(scales: cute.Tensor, kept: cute.Tensor, shift: Int32):
    """Four rows' scales one block later where shift is 1: the last of each row is kept for the next call."""
    for row in cutlass.range_constexpr(4):
        word = scales[row]
        if shift > 0:
            scales[row] = (word << 8) | kept[row]
            kept[row] = (word >> 24) & 0xFF


@cute.jit
def decode(
    config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, ring: roles.Ring, space: schedule.Space, side: Int32
):
    """A decoding warp: the scales of every stage of A (side 0) or B (1) as factors, an atom fetched ahead."""
    state = state_of(pipeline.PipelineUserType.Producer, config.stages)
    parts: cutlass.Constexpr = 4 // config.blocks
    scales, extent, factors = gmem.scale_a, gmem.a_plain.shape[0], smem.a_factors
    if side == 1:
        scales, extent, factors = gmem.scale_b, gmem.b_plain.shape[0], smem.b_factors
    now, ahead, kept = (cute.make_rmem_tensor((4,), Int32) for _ in range(3))
    index = cute.arch.block_idx()[1]
    while index < space.total:
        expert, row, column = schedule.locate(config, space, index)
        begin, length, lead, k_tiles = group(config, smem, expert)
        live = cute.ceil_div(length, config.block)
        atoms = cute.ceil_div(live, 4)
        before = smem.atoms[expert]
        if gmem.concatenated != 0:
            before = begin // (4 * config.block)
        if side == 1:
            row = part_of_b(config, column)
        first = Int64(cute.ceil_div(extent, ATOM)) * before + Int64(row) * atoms
        atom_scales(scales, first, now)
        shift = lead // config.block
        kept.fill(Int32(0))
        for atom in cutlass.range((k_tiles + parts - 1) // parts, unroll=1):
            atom_scales(scales, first + atom + 1, ahead)
            if cutlass.const_expr(config.masked):
                delay(now, kept, shift)
            for part in cutlass.range_constexpr(parts):
                if atom * parts + part < k_tiles:
                    ring.sync_object_empty.wait(state.index, state.phase)
                    done = (atom * parts + part) * config.blocks
                    left = shift - done, shift + live - done
                    convert.write_factors(config, now, part, left, factors[None, None, state.index])
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(ring.producer_get_barrier(state))
                    state.advance()
            cute.autovec_copy(ahead, now)
        index += cute.arch.grid_dim()[1]


@cute.jit
def convert_b(config: cutlass.Constexpr[Config], smem: Smem, rings: Rings, space: schedule.Space):
    """A converting warp: its 32 rows of every stage's part of B, to bf16 in WGMMA's layout here and in the other CTA.

    A ready stage is filled when this CTA's warps have arrived and the other's have sent their bytes: each warp expects
    as much as it sends. It is free once both CTAs' multiplying warps have read it, so what is sent has left by then.
    """
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    row = cute.arch.thread_idx()[0] % WARPGROUP
    ready_row = rank * config.b_rows + row
    loaded = state_of(pipeline.PipelineUserType.Consumer, config.stages)
    ready = state_of(pipeline.PipelineUserType.Producer, config.ready_stages)
    index = cute.arch.block_idx()[1]
    while index < space.total:
        expert, _, _ = schedule.locate(config, space, index)
        _, _, _, k_tiles = group(config, smem, expert)
        for _ in cutlass.range(k_tiles, unroll=1):
            rings.loaded.consumer_wait(loaded)
            rings.ready.sync_object_empty.wait(ready.index, ready.phase)
            convert.convert_row(config, smem, row, ready_row, (loaded.index, ready.index))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            rings.loaded.consumer_release(loaded)
            rows = smem.b_chunks[None, cute.arch.make_warp_uniform(ready_row // 32 * 32) * 8, ready.index]
            send(config, rows, rings.ready.producer_get_barrier(ready), 1 - rank)
            loaded.advance()
            ready.advance()
        index += cute.arch.grid_dim()[1]


@cute.jit
def send(config: cutlass.Constexpr[Config], rows: cute.Tensor, barrier: cute.Pointer, peer: Int32):
    """A converting warp: arrive at the stage's full barrier, and copy the warp's rows to the same place in `peer`."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, config.sent_bytes)
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[
                cute.arch.map_dsmem_ptr(rows.iterator, peer),
                rows.iterator,
                Int32(config.sent_bytes),
                cute.arch.map_dsmem_ptr(barrier, peer),
            ],
        )


def product(config: Config, smem: Smem):
    """(mma, accumulators, A in registers (.., rows / 64, 4), the same as pairs in int32, B) of a consumer's tile."""
    mma = layouts.tiled_mma(config)
    thread = mma.get_slice(0)
    r_a = cute.make_rmem_tensor(mma.partition_shape_A((config.rows, config.tile_k)), cutlass.BFloat16)
    pairs = cute.make_tensor(
        cute.recast_ptr(r_a.iterator, dtype=Int32), cute.make_layout((4, config.rows // 64, config.tile_k // 16))
    )
    r_b = mma.make_fragment_B(thread.partition_B(smem.ready_b))
    acc = cute.make_rmem_tensor(mma.partition_shape_C((config.rows, config.tile_n)), Float32)
    return mma, acc, r_a, pairs, r_b


@cute.jit
def multiply(config: cutlass.Constexpr[Config], operands, gmem: Gmem, smem: Smem, rings: Rings, state, tile):
    """acc = sum over k_tiles > 0 tiles, half a k tile at a time: one half of A is converted while the other multiplies.

    One WGMMA group stays in flight. Registers of a half are written again two groups later; a stage of B is released
    when the first group of the next one has been issued and its own second group has completed.
    """
    mma, acc, r_a, pairs, r_b = operands
    expert, _, _, k_tiles = tile
    loaded, ready = state
    behind = ready.clone()
    for k in cutlass.range(k_tiles, unroll=1):
        rings.loaded.consumer_wait(loaded)
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, k > 0)
        for half in cutlass.range_constexpr(2):
            first = roles.consumer_index(config) * config.rows
            convert.fragment(config, smem, first, loaded.index, half, pairs)
            if cutlass.const_expr(half == 0):
                rings.ready.consumer_wait(ready)
            else:
                cute.arch.sync_warp()
                rings.loaded.consumer_release(loaded)
            warpgroup.fence()
            for block in cutlass.range_constexpr(2 * half, 2 * half + 2):
                cute.gemm(atom, acc, r_a[None, None, block], r_b[None, None, block, ready.index], acc)
                atom.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if cutlass.const_expr(config.fault == "weak_release"):
                if cutlass.const_expr(half == 1):
                    rings.ready.consumer_release(ready)
            elif cutlass.const_expr(half == 0):
                if k > 0:
                    rings.ready.consumer_release(behind)
                    behind.advance()
        loaded.advance()
        ready.advance()
    warpgroup.wait_group(0)
    if cutlass.const_expr(config.fault != "weak_release"):
        rings.ready.consumer_release(behind)
    if cutlass.const_expr(gmem.global_a is not None):
        for factor in cutlass.range_constexpr(2):
            scale = (gmem.global_a if factor == 0 else gmem.global_b)[expert]
            for i in cutlass.range_constexpr(cute.size(acc)):
                acc[i] = acc[i] * scale
    return loaded, ready


@cute.jit
def consume(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, rings: Rings, space: schedule.Space):
    """A multiplying warpgroup: its rows of every tile; while one stores the other may be some stages behind."""
    operands = product(config, smem)
    consumer = pipeline.PipelineUserType.Consumer
    state = state_of(consumer, config.stages), state_of(consumer, config.ready_stages)
    index = cute.arch.block_idx()[1]
    while index < space.total:
        expert, row, column = schedule.locate(config, space, index)
        _, _, _, k_tiles = group(config, smem, expert)
        tile = expert, row * CONSUMERS + roles.consumer_index(config), column, k_tiles
        state = roles.work(config, multiply, operands, gmem, smem, rings, state, tile)
        index += cute.arch.grid_dim()[1]
    cute.arch.cp_async_bulk_wait_group(0)
