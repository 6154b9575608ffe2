"""Shared memory of the local kernel."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device.bulk import allocate_barriers
from culax.device.sizes import BLOCK, CHUNK, PAD, tile_elements
from culax.device.warp_tiles import allocate_tiles, padded_tile
from culax.kda.stages.local.config import LocalConfig


@dataclass(frozen=True)
class Smem:
    """Tiles; a name after a comma is the slot's later content, in the order of the timeline in kernel.py.

    q, k [64, K]; v, kd; v_new, ke, dv; dvn, qd; do, dW, kbd: [64, V] or [64, K]; h, dh [K, V]; [64, K] in fp32: gate in
    h's slot, sums within blocks in dh's, dq in those of v and v_new, x in those of dvn and do, t over the squares;
    squares [64, 64]: P, E, M then dL, P^T M; fp32: E's and dL's diagonal blocks [64, 16], gate sums and k dks by block
    [4, K], h dh [K], beta [64], sums by row [64, groups].
    """

    arrived: cute.Pointer
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    kd: cute.Tensor
    v_new: cute.Tensor
    ke: cute.Tensor
    dv: cute.Tensor
    dvn: cute.Tensor
    qd: cute.Tensor
    do: cute.Tensor
    dw: cute.Tensor
    kbd: cute.Tensor
    h: cute.Tensor
    dh: cute.Tensor
    gate: cute.Tensor
    dq: cute.Tensor
    x: cute.Tensor
    inside: cute.Tensor
    t: cute.Tensor
    p: cute.Tensor
    e: cute.Tensor
    square: cute.Tensor
    p_m: cute.Tensor
    e_diagonal: cute.Tensor
    dl_diagonal: cute.Tensor
    gate_sums: cute.Tensor
    key_sums: cute.Tensor
    state_sums: cute.Tensor
    beta: cute.Tensor
    value_row_sums: cute.Tensor
    key_row_sums: cute.Tensor


def allocate(config: LocalConfig) -> Smem:
    """Take the slots from the CTA's shared memory and lay the tiles over them."""
    memory = cutlass.memory.SmemAllocator()
    key, value = config.key_dim, config.value_dim
    rows = memory.allocate_array(cutlass.BFloat16, 4 * config.row_elements, byte_alignment=16)
    slots = [rows + i * config.row_elements for i in range(4)]
    states = [memory.allocate_array(cutlass.BFloat16, config.state_bytes // 2, byte_alignment=16) for _ in range(2)]

    square = tile_elements(CHUNK, CHUNK)
    squares = memory.allocate_array(cutlass.BFloat16, 4 * square, byte_alignment=16)

    def floats(*shape: int) -> cute.Tensor:
        order = tuple(reversed(range(len(shape))))
        return memory.allocate_tensor(cutlass.Float32, cute.make_ordered_layout(shape, order=order), 16)

    def wide(slot: cute.Pointer) -> cute.Tensor:
        layout = cute.make_layout((CHUNK, key), stride=(key + PAD, 1))
        return cute.make_tensor(cute.recast_ptr(slot, dtype=cutlass.Float32), layout)

    blocks = CHUNK // BLOCK
    return Smem(
        arrived=allocate_barriers(memory, 1),
        q=allocate_tiles(memory, CHUNK, key),
        k=allocate_tiles(memory, CHUNK, key),
        v=padded_tile(slots[0], CHUNK, value),
        kd=padded_tile(slots[0], CHUNK, key),
        v_new=padded_tile(slots[1], CHUNK, value),
        ke=padded_tile(slots[1], CHUNK, key),
        dv=padded_tile(slots[1], CHUNK, value),
        dvn=padded_tile(slots[2], CHUNK, value),
        qd=padded_tile(slots[2], CHUNK, key),
        do=padded_tile(slots[3], CHUNK, value),
        dw=padded_tile(slots[3], CHUNK, key),
        kbd=padded_tile(slots[3], CHUNK, key),
        h=padded_tile(states[0], key, value),
        dh=padded_tile(states[1], key, value),
        gate=wide(states[0]),
        dq=wide(slots[0]),
        x=wide(slots[2]),
        inside=wide(states[1]),
        t=wide(squares),
        p=padded_tile(squares, CHUNK, CHUNK),
        e=padded_tile(squares + 1 * square, CHUNK, CHUNK),
        square=padded_tile(squares + 2 * square, CHUNK, CHUNK),
        p_m=padded_tile(squares + 3 * square, CHUNK, CHUNK),
        e_diagonal=floats(CHUNK, BLOCK),
        dl_diagonal=floats(CHUNK, BLOCK),
        gate_sums=floats(blocks, key),
        key_sums=floats(blocks, key),
        state_sums=floats(key),
        beta=floats(CHUNK),
        value_row_sums=floats(CHUNK, config.groups),
        key_row_sums=floats(CHUNK, config.groups),
    )
