"""Shared memory of the prep kernel."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device.sizes import BLOCK, CHUNK
from culax.device.warp_tiles import allocate_tiles
from culax.kda.stages.prep.config import PrepConfig


@dataclass(frozen=True)
class Smem:
    """Tiles: P [64, 64], q and k [64, K] (qg and kg afterwards), the operands of W [64, K] and U [64, V] (their results
    afterwards), gate sums [4, K], beta [64]."""

    p: cute.Tensor
    q: cute.Tensor
    k: cute.Tensor
    keys: cute.Tensor
    values: cute.Tensor
    gate_sums: cute.Tensor
    beta: cute.Tensor


def allocate(config: PrepConfig) -> Smem:
    """Take the tiles from the CTA's shared memory."""
    memory = cutlass.memory.SmemAllocator()
    return Smem(
        p=allocate_tiles(memory, CHUNK, CHUNK),
        q=allocate_tiles(memory, CHUNK, config.key_dim),
        k=allocate_tiles(memory, CHUNK, config.key_dim),
        keys=allocate_tiles(memory, CHUNK, config.key_dim),
        values=allocate_tiles(memory, CHUNK, config.value_dim),
        gate_sums=memory.allocate_tensor(
            cutlass.Float32, cute.make_layout((CHUNK // BLOCK, config.key_dim), stride=(config.key_dim, 1)), 16
        ),
        beta=memory.allocate_tensor(cutlass.Float32, cute.make_layout((CHUNK,)), 16),
    )
