"""The roles before the epilogue: a loading warp, two that decode scales, a warpgroup that converts B, the product."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from culax.grouped_wgrad.stages.gemm import roles, schedule
from culax.grouped_wgrad.stages.gemm.config import CONSUMERS
from culax.grouped_wgrad.stages.gemm.unaligned import fill, group_view
from culax.grouped_wgrad.stages.gemm_scaled import convert, layouts
from culax.grouped_wgrad.stages.gemm_scaled.config import ATOM, Config

ATOM_BYTES = 512


@dataclass(frozen=True)
class Rings:
    """loaded: TMA and scales -> both conversions; ready: B converted -> the multiplying warpgroup. Equally deep."""

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

    a, b (tile, loaded_k, stages) bytes as TMA writes them; a_words, b_words (4, 16-byte chunks, stages) int32, the
    same memory; a_factors, b_factors (tile, blocks, stages) bf16 twice; ready_b (tile_n, tile_k, stages) bf16 as WGMMA
    reads it; b_chunks (4, chunks, stages) int32, the same memory. c, offs as in roles.Smem; atoms (MAX_EXPERTS + 1).
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


class Place:
    """Where a lane is in its stages: `index` among all stages of the CTA, and the parity of the barriers there."""

    def __init__(self, depth: int, end: Int32, index: Int32, phase: Int32) -> None:
        self.depth, self.end, self.index, self.phase = depth, end, index, phase

    def clone(self) -> "Place":
        """A copy that advances by itself."""
        return Place(self.depth, self.end, self.index, self.phase)

    def advance(self) -> None:
        """To the lane's next stage."""
        around = Int32(self.index + 1 == self.end)
        self.index = self.index + 1 - around * self.depth
        self.phase = self.phase ^ around

    def __get_mlir_types__(self) -> list:
        return [value.type for value in self.__extract_mlir_values__()]

    def __extract_mlir_values__(self) -> list:
        return [value.ir_value() for value in (self.end, self.index, self.phase)]

    def __new_from_mlir_values__(self, values: list) -> "Place":
        return Place(self.depth, *(Int32(value) for value in values))


def start(config: Config, lane: Int32, producing: bool) -> Place:
    """A lane's first stage. Whoever fills stages finds the barriers of empty ones in the phase before the first."""
    return Place(config.depth, (lane + 1) * config.depth, lane * config.depth, Int32(int(producing)))


def first_tile(lane: Int32) -> Int32:
    """A lane's first tile; the next are `stride` apart."""
    return cute.arch.block_idx()[1] + lane * cute.arch.grid_dim()[1]


def stride() -> Int32:
    """Tiles that all lanes of the grid work on at once."""
    return CONSUMERS * cute.arch.grid_dim()[1]


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
def load(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, rings: Rings, space: schedule.Space, lane: Int32):
    """A loading warp: bytes of both operands of every tile of its lane, by TMA where it can read the group."""
    state = start(config, lane, True)
    index = first_tile(lane)
    while index < space.total:
        expert, row, column = schedule.locate(config, space, index)
        begin, length, lead, k_tiles = group(config, smem, expert)
        begin, length = (begin - lead) // config.packed, length // config.packed
        tile = row, column, begin, length, k_tiles
        if loadable(config, begin, length):
            descriptors = roles.acquire_operands(config, gmem, expert)
            state = roles.load_tile(config, gmem, smem, rings.loaded, state, tile, descriptors)
        else:
            state = load_unaligned(config, gmem, smem, rings.loaded, state, tile)
        index += stride()
    # A CTA of the cluster must not leave before its stages are free: the others' arrivals go to its memory.
    for _ in cutlass.range_constexpr(config.depth):
        rings.loaded.sync_object_empty.wait(state.index, state.phase)
        state.advance()


@cute.jit
def load_unaligned(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, ring: roles.Ring, state, tile):
    """As roles.load_tile, byte by byte: the full barrier gets an arrival without a byte count."""
    row, column, begin, length, k_tiles = tile
    g_a, g_b = (group_view(config, plain, begin, length) for plain in (gmem.a_plain, gmem.b_plain))
    for k in cutlass.range(k_tiles, unroll=1):
        ring.sync_object_empty.wait(state.index, state.phase)
        start = k * config.loaded_k
        fill(smem.a[None, None, state.index], g_a, row * config.tile_m, start, length, 32)
        fill(smem.b[None, None, state.index], g_b, column * config.tile_n, start, length, 32)
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
def decode(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, rings: Rings, space: schedule.Space, lane: Int32):
    """A decoding warp: the scales of every stage of its lane as factors, an atom of each operand fetched ahead."""
    ring = rings.loaded
    state = start(config, lane, True)
    parts: cutlass.Constexpr = 4 // config.blocks
    now_a, next_a, now_b, next_b, kept_a, kept_b = (cute.make_rmem_tensor((4,), Int32) for _ in range(6))
    index = first_tile(lane)
    while index < space.total:
        expert, row, column = schedule.locate(config, space, index)
        begin, length, lead, k_tiles = group(config, smem, expert)
        live = cute.ceil_div(length, config.block)
        atoms = cute.ceil_div(live, 4)
        before = smem.atoms[expert]
        if gmem.concatenated != 0:
            before = begin // (4 * config.block)
        first_a = Int64(cute.ceil_div(gmem.a_plain.shape[0], ATOM)) * before + Int64(row) * atoms
        first_b = Int64(cute.ceil_div(gmem.b_plain.shape[0], ATOM)) * before + Int64(column) * atoms
        atom_scales(gmem.scale_a, first_a, now_a)
        atom_scales(gmem.scale_b, first_b, now_b)
        shift = lead // config.block
        kept_a.fill(Int32(0))
        kept_b.fill(Int32(0))
        for atom in cutlass.range((k_tiles + parts - 1) // parts, unroll=1):
            atom_scales(gmem.scale_a, first_a + atom + 1, next_a)
            atom_scales(gmem.scale_b, first_b + atom + 1, next_b)
            if cutlass.const_expr(config.masked):
                delay(now_a, kept_a, shift)
                delay(now_b, kept_b, shift)
            for part in cutlass.range_constexpr(parts):
                if atom * parts + part < k_tiles:
                    ring.sync_object_empty.wait(state.index, state.phase)
                    done = (atom * parts + part) * config.blocks
                    left = shift - done, shift + live - done
                    convert.write_factors(config, now_a, part, left, smem.a_factors[None, None, state.index])
                    convert.write_factors(config, now_b, part, left, smem.b_factors[None, None, state.index])
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(ring.producer_get_barrier(state))
                    state.advance()
            cute.autovec_copy(next_a, now_a)
            cute.autovec_copy(next_b, now_b)
        index += stride()


@cute.jit
def convert_b(config: cutlass.Constexpr[Config], smem: Smem, rings: Rings, space: schedule.Space, lane: Int32):
    """A converting warp: its part of B of every stage of its lane, from bytes to bf16 in WGMMA's layout."""
    state = start(config, lane, False)
    index = first_tile(lane)
    while index < space.total:
        expert, _, _ = schedule.locate(config, space, index)
        _, _, _, k_tiles = group(config, smem, expert)
        for _ in cutlass.range(k_tiles, unroll=1):
            rings.ready.sync_object_empty.wait(state.index, state.phase ^ 1)
            rings.loaded.consumer_wait(state)
            convert.tile_b(config, smem, state.index)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            rings.loaded.consumer_release(state)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.ready.producer_get_barrier(state))
            state.advance()
        index += stride()


def product(config: Config, smem: Smem):
    """(mma, accumulators, A in registers (.., tile_m / 64, 4), the same as pairs in int32, B) of one tile."""
    mma = layouts.tiled_mma(config)
    thread = mma.get_slice(0)
    r_a = cute.make_rmem_tensor(mma.partition_shape_A((config.tile_m, config.tile_k)), cutlass.BFloat16)
    pairs = cute.make_tensor(
        cute.recast_ptr(r_a.iterator, dtype=Int32), cute.make_layout((4, config.tile_m // 64, config.tile_k // 16))
    )
    r_b = mma.make_fragment_B(thread.partition_B(smem.ready_b))
    acc = cute.make_rmem_tensor(mma.partition_shape_C((config.tile_m, config.tile_n)), Float32)
    return mma, acc, r_a, pairs, r_b


@cute.jit
def multiply(config: cutlass.Constexpr[Config], operands, gmem: Gmem, smem: Smem, rings: Rings, state, tile):
    """acc = sum over k_tiles > 0 tiles, half a k tile at a time: one half of A is converted while the other multiplies.

    One WGMMA group stays in flight. Registers of a half are written again two groups later; a stage of B is released
    when the first group of the next one has been issued and its own second group has completed.
    """
    mma, acc, r_a, pairs, r_b = operands
    expert, _, _, k_tiles = tile
    behind = state.clone()
    for k in cutlass.range(k_tiles, unroll=1):
        rings.loaded.consumer_wait(state)
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, k > 0)
        for half in cutlass.range_constexpr(2):
            convert.fragment(config, smem, state.index, half, pairs)
            if cutlass.const_expr(half == 0):
                rings.ready.consumer_wait(state)
            else:
                cute.arch.sync_warp()
                rings.loaded.consumer_release(state)
            warpgroup.fence()
            for block in cutlass.range_constexpr(2 * half, 2 * half + 2):
                cute.gemm(atom, acc, r_a[None, None, block], r_b[None, None, block, state.index], acc)
                atom.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if cutlass.const_expr(config.fault == "weak_release"):
                if cutlass.const_expr(half == 1):
                    rings.ready.consumer_release(state)
            elif cutlass.const_expr(half == 0):
                if k > 0:
                    rings.ready.consumer_release(behind)
                    behind.advance()
        state.advance()
    warpgroup.wait_group(0)
    if cutlass.const_expr(config.fault != "weak_release"):
        rings.ready.consumer_release(behind)
    if cutlass.const_expr(gmem.global_a is not None):
        for factor in cutlass.range_constexpr(2):
            scale = (gmem.global_a if factor == 0 else gmem.global_b)[expert]
            for i in cutlass.range_constexpr(cute.size(acc)):
                acc[i] = acc[i] * scale
    return state


@cute.jit
def consume(config: cutlass.Constexpr[Config], gmem: Gmem, smem: Smem, rings: Rings, space: schedule.Space):
    """A multiplying warpgroup: products and stores of every tile of its lane; while one stores the other multiplies."""
    operands = product(config, smem)
    lane = roles.consumer_index(config)
    state = start(config, lane, False)
    index = first_tile(lane)
    while index < space.total:
        expert, row, column = schedule.locate(config, space, index)
        _, _, _, k_tiles = group(config, smem, expert)
        state = roles.work(config, multiply, operands, gmem, smem, rings, state, (expert, row, column, k_tiles))
        index += stride()
    cute.arch.cp_async_bulk_wait_group(0)
