"""Shared memory of the local kernel: units of [64, 64] bf16, what lies in them when, and how it is looked at."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import images
from culax.device.bulk import allocate_barriers
from culax.device.sizes import BLOCK, CHUNK
from culax.kda.stages.local.config import BARRIERS, EIGHT, KEYS, P_UNIT, UNIT, V_UNIT, LocalConfig


@dataclass(frozen=True)
class Split:
    """fp32 values in two bf16 tiles: rounded, and so many elements behind what that left, rounded."""

    start: cute.Pointer
    apart: int

    @property
    def rest(self) -> cute.Pointer:
        """The second tile."""
        return self.start + self.apart


@dataclass(frozen=True)
class Smem:
    """Barriers, starts of tiles (bf16 images unless noted) and scratch (fp32 unless noted).

    arrived: of all loads at the start; m_arrived, sums_arrived: of what the cluster's other CTA sends.
    Loaded first: do, v_new, dvn [64, V], h, dh [64, V], v [64, columns], k [64, 64], p (P).
    Over them, in the order of the timeline in kernel.py: e, dw, ke, q; dks fp32; dv over v; received fp32 (M's other
    part); kd, qd, kbd (decayed to an end of their 8 rows), each in two tiles; m; dl, x with their signs changed; dq, x,
    t fp32 [64, 64]; dq_share fp32. e and dl have no blocks [8, 8] on the diagonal, and above it what rounding left
    of the blocks below it (pairs.py).

    e_diagonal, dl_diagonal [64, 8]; decays [8, 64] over each 8 rows; key_sums [8, 64] of k dks by 8 rows, before that
    [4, 64] of h dh by quarters of V; state_sums [64] of h dh; beta, row_sums [64], and peer_sums [64] in dl's unit;
    chunk [4] int32: query head, batch, first token, rows.
    """

    arrived: cute.Pointer
    m_arrived: cute.Pointer
    sums_arrived: cute.Pointer
    do: cute.Pointer
    v_new: cute.Pointer
    dvn: cute.Pointer
    h: cute.Pointer
    dh: cute.Pointer
    p: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    e: cute.Pointer
    dw: cute.Pointer
    ke: cute.Pointer
    q: cute.Pointer
    dks: cute.Pointer
    received: cute.Pointer
    kd: Split
    qd: Split
    kbd: Split
    m: cute.Pointer
    dl: cute.Pointer
    dq: cute.Pointer
    x: cute.Pointer
    t: cute.Pointer
    dq_share: cute.Pointer
    e_diagonal: cute.Tensor
    dl_diagonal: cute.Tensor
    decays: cute.Tensor
    key_sums: cute.Tensor
    state_sums: cute.Tensor
    beta: cute.Tensor
    row_sums: cute.Tensor
    chunk: cute.Tensor
    peer_sums: cute.Tensor


def allocate(config: LocalConfig) -> Smem:
    """Take the units and the scratch from the CTA's shared memory."""
    memory = cutlass.memory.SmemAllocator()
    start = memory.allocate_array(cutlass.BFloat16, UNIT * config.units, byte_alignment=1024)
    unit = [start + UNIT * i for i in range(config.units)]

    def floats(*shape: int) -> cute.Tensor:
        order = tuple(reversed(range(len(shape))))
        return memory.allocate_tensor(cutlass.Float32, cute.make_ordered_layout(shape, order=order), 16)

    def split(first: int, second: int) -> Split:
        return Split(unit[first], (second - first) * UNIT)

    def wide(first: int) -> cute.Pointer:
        return cute.recast_ptr(unit[first], dtype=cutlass.Float32)

    barriers = allocate_barriers(memory, BARRIERS)
    return Smem(
        arrived=barriers,
        m_arrived=barriers + 1,
        sums_arrived=barriers + 2,
        do=unit[0],
        v_new=unit[2],
        dvn=unit[4],
        h=unit[6],
        dh=unit[8],
        p=unit[P_UNIT],
        k=unit[11],
        v=unit[V_UNIT],
        e=unit[0],
        ke=unit[1],
        q=unit[2],
        kd=split(8, 9),
        dks=wide(4 if config.splits > 1 else 6),
        qd=split(4, V_UNIT),
        kbd=split(1, 5),
        received=wide(6),
        m=unit[6],
        dw=unit[3],
        dl=unit[3],
        dq=wide(6),
        x=wide(8),
        t=wide(4),
        dq_share=wide(0),
        e_diagonal=floats(CHUNK, EIGHT),
        dl_diagonal=floats(CHUNK, EIGHT),
        decays=floats(CHUNK // EIGHT, KEYS),
        key_sums=floats(CHUNK // EIGHT, KEYS),
        state_sums=floats(KEYS),
        beta=floats(CHUNK),
        row_sums=floats(CHUNK),
        chunk=memory.allocate_tensor(cutlass.Int32, cute.make_layout((4,)), 16),
        peer_sums=cute.make_tensor(cute.recast_ptr(unit[3], dtype=cutlass.Float32), cute.make_layout((CHUNK,))),
    )


def flat(start: cute.Pointer, elements: int = UNIT) -> cute.Tensor:
    """A tile as the vector of its elements in the order of memory."""
    return cute.make_tensor(start, cute.make_layout((elements,)))


def square(start: cute.Pointer) -> cute.Tensor:
    """An image of [64, 64] as a tensor for ldmatrix."""
    swizzled = images.image_at(start, CHUNK, KEYS).iterator
    return cute.make_tensor(swizzled, cute.make_layout((CHUNK, KEYS), stride=(KEYS, 1)))


def thread() -> cutlass.Int32:
    """The thread's index in the CTA through a shuffle, which no compiler sees through: what follows from it is computed
    where it is needed, and takes no registers between."""
    return cute.arch.shuffle_sync(cute.arch.thread_idx()[0], cute.arch.lane_idx())


def lane() -> cutlass.Int32:
    """The thread's lane, from `thread`."""
    return thread() & 31


def pair_of(first: cutlass.Int32, i: int | cutlass.Int32) -> cutlass.Int32:
    """A place, in pairs, in an image of [64, 64]; in fp32 tiles likewise. A row has 32 pairs.

    With first = 32 r + lane that of columns 2 lane and the next one in row r, i = r % 8; with first = 32 r + 4 (r % 8)
    + t that of columns 8 i + 2 t and the next one in row r. Groups of 8 columns change places with the row: neither a
    warp's columns of one row nor its part of an accumulator meet bank conflicts.
    """
    return first ^ (4 * i)


@dataclass(frozen=True)
class Part:
    """This thread's part of an accumulator: the warp's block of 16 rows, the thread's row in the block's upper half,
    and the places of its pairs in tiles by half and group of 8 columns."""

    block: cutlass.Int32
    row: cutlass.Int32
    lane: cutlass.Int32
    within: cutlass.Int32
    places: list[list[cutlass.Int32]]


def part_of_thread() -> Part:
    """The calling thread's part of its warpgroup's accumulators."""
    block = cute.arch.make_warp_uniform(thread() >> 5) & (CHUNK // BLOCK - 1)
    index = lane()
    first = block * (BLOCK * KEYS // 2) + (index >> 2) * (KEYS // 2) + index
    upper = [pair_of(first, n) for n in range(KEYS // 8)]
    lower = [place + EIGHT * KEYS // 2 for place in upper]
    return Part(block, block * BLOCK + (index >> 2), index, index & 3, [upper, lower])


def unpack(bits: cutlass.Int32) -> list[cutlass.Float32]:
    """Two bf16 in fp32."""
    both = cute.make_rmem_tensor((2,), cutlass.Int32)
    both[0], both[1] = bits << 16, bits & -65536
    values = cute.recast_tensor(both, cutlass.Float32)
    return [values[0], values[1]]


def read_pair(tile: cute.Tensor, place: cutlass.Int32) -> list[cutlass.Float32]:
    """Two neighbouring elements of a flat tile in fp32."""
    if tile.element_type is cutlass.BFloat16:
        return unpack(cute.recast_tensor(tile, cutlass.Int32)[place])
    raw = cute.make_rmem_tensor((2,), tile.element_type)
    cute.autovec_copy(cute.local_tile(tile, (2,), (place,)), raw)
    return [raw[0], raw[1]]


def write_pair(tile: cute.Tensor, place: cutlass.Int32, values: list[cutlass.Float32]) -> cute.Tensor:
    """Round and store two neighbouring elements of a flat tile; returns what was stored."""
    pair = cute.make_rmem_tensor((2,), cutlass.Float32)
    pair[0], pair[1] = values
    rounded = cute.make_rmem_tensor((2,), tile.element_type)
    rounded.store(pair.load().to(tile.element_type))
    cute.autovec_copy(rounded, cute.local_tile(tile, (2,), (place,)))
    return rounded


def write_split(
    tile: cute.Tensor, place: cutlass.Int32, rest: cute.Tensor, at: cutlass.Int32, values: list[cutlass.Float32]
) -> None:
    """Round two values and store them in a flat bf16 tile; round and store in another what that left of them."""
    rounded = write_pair(tile, place, values)
    stored = unpack(cute.recast_tensor(rounded, cutlass.Int32)[0])
    write_pair(rest, at, [values[c] - stored[c] for c in range(2)])
