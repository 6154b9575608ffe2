"""Shared memory of the local kernel: units of [64, 64] bf16, what lies in them when, and how it is looked at."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device import images
from culax.device.bulk import allocate_barriers
from culax.device.sizes import CHUNK
from culax.kda.stages.local.config import BARRIERS, EIGHT, KD_UNIT, KEYS, UNIT, V_UNIT, LocalConfig


@dataclass(frozen=True)
class Smem:
    """Barriers, starts of tiles (bf16 images unless noted) and scratch (fp32 unless noted).

    arrived: of all loads at the start; m_arrived, sums_arrived: of what the cluster's other CTA sends.
    Loaded first: do, v_new, dvn [64, V], h, dh [64, V], v [64, columns], k [64, 64], p (P).
    Over them, in the order of the timeline in kernel.py: e, dw, ke, q; dks fp32; dv over v; received fp32 (M's other
    part); kd, qd, kbd (decayed to the ends of 16 rows), middle (to the middle: k in the upper, q in the lower 8 rows of
    each 16), kb_middle; m; dl, x with their signs changed; dq, x, t fp32 [64, 64]; dq_share fp32.

    e_diagonal, dl_diagonal [64, 8]; decays [8, 64] over each 8 rows; key_sums [8, 64] of k dks by 8 rows, before that
    [4, 64] of h dh by quarters of V; state_sums [64] of h dh; beta, row_sums [64], and peer_sums [64] in middle's unit;
    chunk [4] int32, the row of the chunk table.
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
    kd: cute.Pointer
    qd: cute.Pointer
    kbd: cute.Pointer
    middle: cute.Pointer
    kb_middle: cute.Pointer
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
        p=unit[10],
        k=unit[11],
        v=unit[V_UNIT],
        e=unit[0],
        ke=unit[1],
        q=unit[2],
        kd=unit[KD_UNIT],
        dks=wide(4 if config.splits > 1 else 6),
        qd=unit[4],
        kbd=unit[5],
        received=wide(6),
        middle=unit[8],
        kb_middle=unit[V_UNIT],
        dw=unit[9],
        m=unit[9],
        dl=unit[1],
        dq=wide(6),
        x=wide(9),
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
        peer_sums=cute.make_tensor(wide(8), cute.make_layout((CHUNK,))),
    )


def flat(start: cute.Pointer, elements: int = UNIT) -> cute.Tensor:
    """A tile as the vector of its elements in the order of memory."""
    return cute.make_tensor(start, cute.make_layout((elements,)))


def square(start: cute.Pointer) -> cute.Tensor:
    """An image of [64, 64] as a tensor for ldmatrix."""
    swizzled = images.image_at(start, CHUNK, KEYS).iterator
    return cute.make_tensor(swizzled, cute.make_layout((CHUNK, KEYS), stride=(KEYS, 1)))


def lane() -> cutlass.Int32:
    """The thread's lane through a shuffle, which no compiler sees through: what follows from it is computed where it is
    needed, and takes no registers between."""
    lane = cute.arch.lane_idx()
    return cute.arch.shuffle_sync(lane, lane)


def thread() -> cutlass.Int32:
    """The thread's index in the CTA, from `lane`."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) * 32 + lane()


def pair_of(row: cutlass.Int32, within: cutlass.Int32, i: int) -> cutlass.Int32:
    """A place, in pairs, in an image of [64, 64]; in fp32 tiles likewise.

    With within = lane and i = row % 8 that of columns 2 lane and the next one; with within = 4 (row % 8) + t that of
    columns 8 i + 2 t and the next one. Groups of 8 columns change places with the row, so that neither a warp's columns
    of one row nor its part of an accumulator meet bank conflicts.
    """
    return row * (KEYS // 2) + (within ^ (4 * i))


def read_pair(tile: cute.Tensor, place: cutlass.Int32) -> list[cutlass.Float32]:
    """Two neighbouring elements of a flat tile in fp32."""
    raw = cute.make_rmem_tensor((2,), tile.element_type)
    cute.autovec_copy(cute.local_tile(tile, (2,), (place,)), raw)
    return [raw[0].to(cutlass.Float32), raw[1].to(cutlass.Float32)]


def write_pair(tile: cute.Tensor, place: cutlass.Int32, values: list[cutlass.Float32]) -> None:
    """Round and store two neighbouring elements of a flat tile."""
    pair = cute.make_rmem_tensor((2,), cutlass.Float32)
    pair[0], pair[1] = values
    rounded = cute.make_rmem_tensor((2,), tile.element_type)
    rounded.store(pair.load().to(tile.element_type))
    cute.autovec_copy(rounded, cute.local_tile(tile, (2,), (place,)))
