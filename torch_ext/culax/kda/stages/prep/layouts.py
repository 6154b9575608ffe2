"""Shared memory of the prep kernel."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from culax.device.images import allocate_images
from culax.device.sizes import BLOCK, CHUNK
from culax.device.warp_tiles import allocate_tile
from culax.kda.stages.prep.config import PrepConfig


@dataclass(frozen=True)
class Smem:
    """Padded tile: P [64, 64]; images [64, n, 1]: q and k [64, K] (qg and kg afterwards), the operands of W [64, K] and
    U [64, V] (their results afterwards); gate sums [4, K], beta [64]."""

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
        q=allocate_images(memory, CHUNK, config.key_dim),
        k=allocate_images(memory, CHUNK, config.key_dim),
        keys=allocate_images(memory, CHUNK, config.key_dim),
        values=allocate_images(memory, CHUNK, config.value_dim),
        p=allocate_tile(memory, CHUNK, CHUNK),
        gate_sums=memory.allocate_tensor(
            cutlass.Float32, cute.make_layout((CHUNK // BLOCK, config.key_dim), stride=(config.key_dim, 1)), 16
        ),
        beta=memory.allocate_tensor(cutlass.Float32, cute.make_layout((CHUNK,)), 16),
    )
